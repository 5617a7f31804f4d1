//! The OOM frontier of a model on a card: the largest chunk of each batch and depth that fits, and what does not fit beyond it.

use anyhow::Result;
use highwater::error::{Error, mib};
use highwater::ops::Numerics;

use crate::axis::{Axis, Cell, Grid};
use crate::cell::{EngineRunner, Workload};
use crate::cli::{DeviceChoice, FrontierArgs};
use crate::failure::Failure;
use crate::frontier::{Edge, STEP_TOKENS, largest_chunk};
use crate::measure::Rules;
use crate::out::print;
use crate::provenance::rfc3339_utc;
use crate::record::Row;
use crate::status::Status;
use crate::sweep::Runner as _;
use crate::table::{Align, Table, or_null};
use crate::target::{Model, Place, Values, template};

/// Tokens each sequence decodes in a cell of the frontier: enough to run the decode kernels.
const OUTPUT_TOKENS: u64 = 2;

/// What is asked of each batch and depth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    /// Tokens each sequence may hold.
    pub(crate) context: u64,
    /// Tokens of the KV pool; what the batch needs if `None`.
    pub(crate) kv_tokens: Option<u64>,
    /// The largest chunk to try.
    pub(crate) max_chunk: u64,
}

/// The answer for one batch and depth.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Where it ends.
    pub(crate) edge: Edge,
    /// The plan of the largest chunk that fits; of the smallest one where none does.
    pub(crate) row: Row,
    /// The first buffer that does not fit in the next larger chunk.
    pub(crate) beyond: Option<String>,
}

pub(crate) fn edge_text(edge: Edge) -> String {
    match edge {
        Edge::Nothing => "does not fit".into(),
        Edge::Largest(chunk) => chunk.to_string(),
        Edge::Beyond(chunk) => format!("{chunk} or more"),
        Edge::Whole(chunk) => format!("{chunk} (all of the context)"),
    }
}

/// The largest chunk of each (batch, depth). A chunk longer than one prompt takes rows of several.
pub(crate) fn edges(
    model: &Model,
    place: &Place,
    values: Values,
    points: &[(u64, u64)],
    question: Question,
) -> Result<Vec<Answer>, Failure> {
    for (_, depth) in points {
        if depth.saturating_add(1 + OUTPUT_TOKENS) > question.context {
            let what = format!(
                "a depth of {depth} and a prompt leave no room for {OUTPUT_TOKENS} more tokens in the context of {}; raise \
                 --context",
                question.context
            );
            return Err(Error::Request { param: "--context", what }.into());
        }
    }
    let base = template(model, &model.open()?, place, values);
    let workload = Workload {
        output: OUTPUT_TOKENS,
        kv_tokens: question.kv_tokens,
        context: Some(question.context),
        // Whether it fits is asked, not how fast it is.
        rules: Rules { repetitions: Some(1), ..Rules::default() },
        ..Workload::default()
    };
    let mut runner = EngineRunner::new(model.clone(), place.clone(), values, workload);
    let mut answers = Vec::new();
    for &(batch, depth) in points {
        let longest = question.context - depth - OUTPUT_TOKENS;
        let mut plan = |chunk: u64| -> Result<Row> {
            runner.workload.prompt = Some(chunk.min(longest));
            let mut row = Row { chunk, batch, depth, ..base.clone() };
            match runner.run(&Cell::fixed(chunk, batch, depth), &mut row) {
                Ok(()) => row.status = Status::Ok,
                Err(error) => {
                    row.set_error(&error);
                    if !row.status.is_oom() {
                        return Err(error.into());
                    }
                }
            }
            row.time = rfc3339_utc(std::time::SystemTime::now());
            Ok(row)
        };
        // More rows than all prompts together have cannot be in one step.
        let rows = batch.saturating_mul(longest).next_multiple_of(STEP_TOKENS);
        let most = question.max_chunk.min(rows).max(STEP_TOKENS);
        let edge = largest_chunk(most, |chunk| Ok(plan(chunk)?.status == Status::Ok))?;
        let (at, next) = match edge {
            Edge::Nothing => (STEP_TOKENS, Some(STEP_TOKENS)),
            Edge::Largest(chunk) => (chunk, Some(chunk + STEP_TOKENS)),
            Edge::Beyond(chunk) | Edge::Whole(chunk) => (chunk, None),
        };
        let edge = match edge {
            Edge::Beyond(chunk) if chunk >= rows => Edge::Whole(chunk),
            edge => edge,
        };
        let beyond = next.map(&mut plan).transpose()?.and_then(|row| row.oom_tag);
        answers.push(Answer { edge, row: plan(at)?, beyond });
    }
    Ok(answers)
}

/// The places of `--card` (this machine where none is given) on a device.
pub(crate) fn places(device: DeviceChoice, names: &[String], vram: Option<u64>) -> Result<Vec<Place>, Failure> {
    if names.is_empty() {
        return Ok(vec![Place::choose(device, None, vram)?]);
    }
    names.iter().map(|name| Ok(Place::choose(device, Some(name), vram)?)).collect()
}

/// `frontier`.
pub(crate) fn frontier(args: &FrontierArgs) -> Result<(), Failure> {
    let values = Values::of(&args.numerics, Numerics::BF16)?;
    if args.axes.iter().any(|values| !matches!(values.axis(), Axis::Batch | Axis::Depth)) {
        let refused =
            anyhow::anyhow!("frontier looks for the chunk; its axes are batch and depth, and --max-chunk ends it");
        return Err(Failure::usage(&refused));
    }
    let points = Grid::new(&args.axes).map_err(|e| Failure::usage(&e))?.batches_and_depths();
    let model = Model { text: args.model.clone(), seed: args.numerics.seed };
    let question = Question { context: args.context, kv_tokens: args.budget.kv_tokens, max_chunk: args.max_chunk };
    let mut table = Table::new(&[
        ("model", Align::Left),
        ("card", Align::Left),
        ("device", Align::Left),
        ("fault", Align::Left),
        ("batch", Align::Right),
        ("depth", Align::Right),
        ("largest chunk", Align::Right),
        ("transient there", Align::Right),
        ("free there", Align::Right),
        ("does not fit beyond", Align::Left),
    ]);
    for place in places(args.device, &args.cards, args.budget.vram)? {
        for answer in edges(&model, &place, values, &points, question)? {
            table.push(vec![
                args.model.clone(),
                place.spec.name.into(),
                answer.row.device.clone(),
                or_null(values.fault, |f| f.name().to_owned()),
                answer.row.batch.to_string(),
                answer.row.depth.to_string(),
                edge_text(answer.edge),
                or_null(answer.row.transient_peak_bytes, mib),
                or_null(answer.row.free_bytes, mib),
                or_null(answer.beyond, |tag| tag),
            ]);
        }
    }
    print(&table.without_empty_columns().text())?;
    Ok(())
}
