//! `logits` and `generate`: one request on one engine.

use anyhow::Result;
use highwater::engine::{Engine, Finish, KvBudget, Logits, Options, Policy, Request};
use highwater::error::Error;
use highwater::num::DType;
use highwater::ops::Limits;
use highwater::ops::sampler::SampleRow;

use crate::cli::{GenerateArgs, LogitsArgs, Rows, SamplingArgs};
use crate::failure::Failure;
use crate::logits_file::LogitsFile;
use crate::out::print;
use crate::progress::Progress;
use crate::target::{Kind, Model, Place, Values, load};

/// A loaded engine with one request in it.
fn one_request(
    model: &str,
    seed: u64,
    place: &Place,
    values: Values,
    chunk: u64,
    request: Request,
    kv_tokens: Option<u64>,
) -> Result<Engine, Failure> {
    let source = Model { text: model.to_owned(), seed }.open()?;
    let context = request.prompt.len() as u64 + request.max_tokens as u64;
    let most = source.geometry().max_context as u64;
    let context = context.clamp(2, most.max(2));
    let options = Options {
        numerics: values.numerics,
        chunk: chunk as usize,
        limits: Limits { step_tokens: chunk as usize, batch: 1, context: context as usize },
        kv: KvBudget::Tokens(kv_tokens.unwrap_or(context)),
        policy: Policy::Mixed,
        seed,
        fault: values.fault,
    };
    if place.kind == Kind::Plan {
        return Err(Error::NoData { what: "the logits of a planned run".into() }.into());
    }
    let mut engine = load(place, source, options)?;
    engine.submit(request)?;
    Ok(engine)
}

/// `logits`.
pub(crate) fn logits(args: &LogitsArgs) -> Result<(), Failure> {
    let ids = args.ids.load()?;
    let place = Place::of(&args.target)?;
    let values = Values::of(&args.numerics, DType::F32)?;
    let which = match args.rows {
        Rows::All => Logits::Prompt,
        Rows::Last => Logits::Sampled,
    };
    let rows = if which == Logits::Prompt { ids.len() } else { 1 };
    let request = Request { logits: which, ..Request::greedy(ids, 1) };
    let mut engine = one_request(
        &args.model,
        args.numerics.seed,
        &place,
        values,
        args.chunk,
        request,
        args.target.budget.kv_tokens,
    )?;
    let vocab = engine.runner().model().geometry().vocab;
    let notes = [
        ("model", args.model.clone()),
        ("dtype", values.numerics.activations.to_string()),
        ("highwater", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let mut file = LogitsFile::create(&args.out, rows as u64, vocab as u64, &notes)?;
    let progress = Progress::cells(rows as u64);
    while let Some(step) = engine.step()? {
        for record in step.records {
            if let Some(Finish::Failed(why)) = record.finish {
                return Err(anyhow::anyhow!(why).into());
            }
            for row in record.logits.chunks(vocab) {
                file.push(row)?;
                progress.advance(1);
            }
        }
    }
    progress.finish();
    file.finish()?;
    print(&format!("{}: logits [{rows}, {vocab}] f32\n", args.out.display()))?;
    Ok(())
}

/// `generate`.
pub(crate) fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let ids = args.ids.load()?;
    let place = Place::of(&args.target)?;
    let values = Values::of(&args.numerics, DType::Bf16)?;
    let request = Request {
        sampling: sample_row(&args.sampling)?,
        ignore_eos: false,
        ..Request::greedy(ids, args.max_tokens as usize)
    };
    let mut engine = one_request(
        &args.model,
        args.numerics.seed,
        &place,
        values,
        args.chunk,
        request,
        args.target.budget.kv_tokens,
    )?;
    let mut first = true;
    while let Some(step) = engine.step()? {
        for record in step.records {
            if let Some(token) = record.token {
                print(&format!("{}{}", if first { "" } else { "," }, token.id))?;
                first = false;
            }
            match record.finish {
                Some(Finish::Failed(why)) => return Err(anyhow::anyhow!(why).into()),
                Some(Finish::Stop | Finish::Length) => print("\n")?,
                None => {}
            }
        }
    }
    Ok(())
}

fn sample_row(args: &SamplingArgs) -> Result<SampleRow, Error> {
    let top_k = match args.top_k {
        -1 => 0,
        k => u32::try_from(k)
            .map_err(|_| Error::Request { param: "--top-k", what: format!("{k}; -1 or 0 for all, or a count") })?,
    };
    Ok(SampleRow {
        temperature: args.temperature,
        top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        bias: args.logit_bias.clone(),
        seed: args.sampling_seed,
        ..SampleRow::default()
    })
}
