//! `logits` and `generate`: one request on one engine.

use anyhow::Result;
use highwater::checkpoint::Source;
use highwater::engine::{Engine, Finish, KvBudget, Logits, Options, Policy, Request};
use highwater::error::Error;
use highwater::ops::sampler::SampleRow;
use highwater::ops::{ActQuant, Limits, Numerics};

use crate::cli::{GenerateArgs, LogitsArgs, Rows, SamplingArgs};
use crate::failure::Failure;
use crate::logits_file::LogitsFile;
use crate::out::{note, print, print_while_read};
use crate::progress::Progress;
use crate::record::Row;
use crate::target::{Kind, Model, Place, Values, load, template};

/// Opens a model that is to compute values.
fn open(model: &Model, place: &Place) -> Result<Source, Failure> {
    if place.kind == Kind::Plan {
        return Err(Error::NoData { what: "the logits of a planned run".into() }.into());
    }
    Ok(model.open()?)
}

/// f32 arithmetic on the weights as they are stored: what another engine's logits are compared in.
const WEIGHTS_ONLY: Numerics = Numerics { act_quant: ActQuant::Off, ..Numerics::F32 };

/// A loaded engine with one request in it.
fn one_request(
    source: Source,
    seed: u64,
    place: &Place,
    values: Values,
    chunk: u64,
    request: Request,
    kv_tokens: Option<u64>,
) -> Result<Engine, Failure> {
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
        graphs: true,
        fault: values.fault,
    };
    let mut engine = load(place, source, options)?;
    engine.submit(request)?;
    Ok(engine)
}

/// `logits`.
pub(crate) fn logits(args: &LogitsArgs) -> Result<(), Failure> {
    let ids = args.ids.load()?;
    let place = Place::of(&args.target)?;
    let values = Values::of(&args.numerics, WEIGHTS_ONLY)?;
    let which = match args.rows {
        Rows::All => Logits::Prompt,
        Rows::Last => Logits::Sampled,
    };
    let rows = if which == Logits::Prompt { ids.len() } else { 1 };
    let model = Model { text: args.model.clone(), seed: args.numerics.seed };
    let source = open(&model, &place)?;
    let vocab = source.geometry().vocab;
    // Before the model is loaded: a path that cannot be written fails now.
    let notes = notes(&template(&model, &source, &place, values), args.numerics.seed);
    let mut file = LogitsFile::create(&args.out, rows as u64, vocab as u64, &notes)?;
    let request = Request { logits: which, ..Request::greedy(ids, 1) };
    let mut engine =
        one_request(source, args.numerics.seed, &place, values, args.chunk, request, args.target.budget.kv_tokens)?;
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

/// What the file says about where its logits come from; the values of its model, its weights and its run.
fn notes(row: &Row, seed: u64) -> Vec<(&'static str, String)> {
    let mut notes = vec![
        ("model", row.model.clone()),
        ("recipe", row.recipe.clone()),
        ("weights", row.weights_source.clone().unwrap_or_default()),
        ("seed", seed.to_string()),
        ("dtype", row.dtype.clone()),
        ("highwater", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    notes.extend(row.fault.clone().map(|fault| ("fault", fault)));
    notes
}

/// `generate`.
pub(crate) fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let ids = args.ids.load()?;
    let place = Place::of(&args.target)?;
    let values = Values::of(&args.numerics, Numerics::BF16)?;
    let request = Request {
        sampling: sample_row(&args.sampling)?,
        ignore_eos: false,
        ..Request::greedy(ids, args.max_tokens as usize)
    };
    let model = Model { text: args.model.clone(), seed: args.numerics.seed };
    let source = open(&model, &place)?;
    let kv_tokens = args.target.budget.kv_tokens;
    let mut engine = one_request(source, args.numerics.seed, &place, values, args.chunk, request, kv_tokens)?;
    let mut generated = 0;
    while let Some(step) = engine.step()? {
        for record in step.records {
            if let Some(token) = record.token {
                if !print_while_read(&format!("{}{}", if generated == 0 { "" } else { "," }, token.id))? {
                    return Ok(());
                }
                generated += 1;
            }
            match record.finish {
                Some(Finish::Failed(why)) => return Err(anyhow::anyhow!(why).into()),
                Some(finish) => {
                    print("\n")?;
                    if finish == Finish::Length && generated < args.max_tokens {
                        note(&format!(
                            "stopped after {generated} of {} tokens: the context is {} tokens, and the KV pool holds {}",
                            args.max_tokens,
                            engine.options().limits.context,
                            engine.sizing().kv_tokens
                        ));
                    }
                }
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
