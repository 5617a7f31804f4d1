//! The OOM frontier of a model on a card: the largest chunk of each batch that fits, and what does not fit beyond it.

use anyhow::Result;
use highwater::num::DType;

use crate::axis::{Cell, Grid};
use crate::cell::{EngineRunner, Workload};
use crate::cli::FrontierArgs;
use crate::failure::Failure;
use crate::frontier::{Edge, STEP_TOKENS, largest_chunk};
use crate::out::print;
use crate::provenance::rfc3339_utc;
use crate::record::{Row, Status};
use crate::sweep::Runner as _;
use crate::table::{Align, Table, or_null};
use crate::target::{Kind, Model, Place, Values, template};
use highwater::error::mib;

/// Tokens each sequence decodes in a cell of the frontier: enough to run the decode kernels.
const OUTPUT_TOKENS: u64 = 2;

/// What is asked of each batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    /// Tokens each sequence may hold.
    pub(crate) context: u64,
    /// Tokens of the KV pool; what the batch needs if `None`.
    pub(crate) kv_tokens: Option<u64>,
    /// The largest chunk to try.
    pub(crate) max_chunk: u64,
}

/// One batch's answer.
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
    }
}

/// The largest chunk of each batch. A chunk longer than one prompt takes rows of several.
pub(crate) fn edges(
    model: &Model,
    place: &Place,
    values: Values,
    batches: &[u64],
    question: Question,
) -> Result<Vec<Answer>, Failure> {
    let base = template(model, &model.open()?, place, values);
    let workload = Workload {
        prompt: None,
        output: OUTPUT_TOKENS,
        kv_tokens: question.kv_tokens,
        context: Some(question.context),
    };
    let mut runner = EngineRunner::new(model.clone(), place.clone(), values, workload);
    let longest = question.context.saturating_sub(OUTPUT_TOKENS).max(1);
    let mut answers = Vec::new();
    for &batch in batches {
        let mut plan = |chunk: u64| -> Result<Row> {
            runner.workload.prompt = Some(chunk.min(longest));
            let mut row = Row { chunk, batch, depth: 0, ..base.clone() };
            match runner.run(&Cell { chunk, batch, depth: 0 }, &mut row) {
                Ok(()) => row.status = Status::Ok,
                Err(error) => row.set_error(&error),
            }
            anyhow::ensure!(
                row.status == Status::Ok || row.status.is_oom(),
                "chunk {chunk}, batch {batch}: {}",
                row.detail.unwrap_or_default()
            );
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
            Edge::Beyond(chunk) => (chunk, None),
        };
        let beyond = next.map(&mut plan).transpose()?.and_then(|row| row.oom_tag);
        answers.push(Answer { edge, row: plan(at)?, beyond });
    }
    Ok(answers)
}

/// The places of `--card` (this machine where none is given), to plan for.
pub(crate) fn places(names: &[String], vram: Option<u64>) -> Result<Vec<Place>, Failure> {
    if names.is_empty() {
        return Ok(vec![Place::new(None, vram, Kind::Plan)?]);
    }
    names.iter().map(|name| Ok(Place::new(Some(name), vram, Kind::Plan)?)).collect()
}

/// `frontier`.
pub(crate) fn frontier(args: &FrontierArgs) -> Result<(), Failure> {
    let values = Values::of(&args.numerics, DType::Bf16)?;
    let grid = Grid::new(&args.axes).map_err(|e| Failure::usage(&e))?;
    let mut batches: Vec<u64> = grid.cells().iter().map(|c| c.batch).collect();
    batches.dedup();
    let model = Model { text: args.model.clone(), seed: args.numerics.seed };
    let question = Question { context: args.context, kv_tokens: args.budget.kv_tokens, max_chunk: args.max_chunk };
    let mut table = Table::new(&[
        ("model", Align::Left),
        ("card", Align::Left),
        ("fault", Align::Left),
        ("batch", Align::Right),
        ("largest chunk", Align::Right),
        ("transient there", Align::Right),
        ("free there", Align::Right),
        ("does not fit beyond", Align::Left),
    ]);
    for place in places(&args.cards, args.budget.vram)? {
        for answer in edges(&model, &place, values, &batches, question)? {
            table.push(vec![
                args.model.clone(),
                place.spec.name.into(),
                or_null(values.fault, |f| f.name().to_owned()),
                answer.row.batch.to_string(),
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
