//! `sweep`: a grid of cells on one device; without a model, the tiny one here and plans of real ones on the usual cards.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use highwater::checkpoint::Source;
use highwater::error::{Error, mib};
use highwater::ops::Numerics;

use crate::axis::{Cell, Grid};
use crate::cell::{EngineRunner, Workload, within_context};
use crate::charts;
use crate::cli::SweepArgs;
use crate::edges::{Answer, Question, edge_text, edges};
use crate::failure::Failure;
use crate::journal::Journal;
use crate::out::print;
use crate::progress::Progress;
use crate::provenance::Provenance;
use crate::record::Row;
use crate::sweep::{Runner, failures, run_cells};
use crate::table::{Align, Table, or_null, sweep_definitions, sweep_table};
use crate::target::{Kind, Model, Place, Values, template};

/// What the bare `sweep` plans after it has measured the tiny model here: models and the cards people ask about.
const USUAL_PLANS: [(&[&str], &[&str]); 2] = [
    (&["qwen3.5-4b@bf16", "qwen3.5-9b@bf16"], &["rtx-4060-ti-16g", "rtx-4090", "rtx-5090"]),
    (&["qwen3.6-27b@bf16", "qwen3.6-35b-a3b@bf16"], &["h100", "h200"]),
];
/// Axes of the tiny model's grid before those plans.
const TINY_AXES: [&str; 3] = ["chunk=16,64,256", "batch=1,4", "depth=0,128"];
/// Context of those plans.
const USUAL_CONTEXT: u64 = 8192;
/// Batches of those plans.
const USUAL_BATCHES: [u64; 2] = [1, 8];
/// Largest chunk asked about.
const USUAL_CHUNKS: u64 = 1 << 16;

/// `sweep`.
pub(crate) fn sweep(args: &SweepArgs) -> Result<(), Failure> {
    let place = Place::of(&args.target)?;
    let values = Values::of(&args.numerics, Numerics::BF16)?;
    let workload =
        Workload { prompt: args.prompt, output: args.output, kv_tokens: args.target.budget.kv_tokens, context: None };
    let axes = if args.model.is_none() && args.axes.is_empty() {
        TINY_AXES.iter().map(|axis| axis.parse()).collect::<Result<_>>()?
    } else {
        args.axes.clone()
    };
    let grid = Grid::new(&axes).map_err(|e| Failure::usage(&e))?;
    let text = args.model.clone().unwrap_or_else(|| "tiny@bf16".into());
    let model = Model { text, seed: args.numerics.seed };

    // Opened before any file is made: a model that cannot be opened must not leave a folder that blocks the next try.
    let source = model.open()?;
    let provenance = Provenance::gather();
    let out = args.out.clone().unwrap_or_else(|| Path::new("highwater-out").join(&provenance.run));
    let mut journal = Journal::create(&out)?;
    let mut rows = grid_rows(&model, &source, &place, values, &workload, &grid, &provenance, &mut journal)?;
    // Pictures are of grids; the usual plans are a table.
    let drawn = rows.len();
    print(&sweep_table(&rows).text())?;
    if args.model.is_none() {
        let (planned, fits) = usual_plans(values, &provenance, &mut journal)?;
        let file = out.join("fits.md");
        std::fs::write(&file, fits.markdown()).with_context(|| format!("cannot write {}", file.display()))?;
        print(&format!(
            "\nPlanned without a GPU: the largest prefill chunk (tokens) that fits, each sequence holding {USUAL_CONTEXT} \
             tokens\n{}",
            fits.text()
        ))?;
        rows.extend(planned);
    }
    print(&format!("\n{}\n", sweep_definitions()))?;
    let pictures = charts::write(&rows[..drawn], &out)?;
    let mut files = format!("{}: sweep.csv, sweep.jsonl", out.display());
    for picture in &pictures {
        let _ = write!(files, ", {}", picture.file_name().unwrap_or_default().to_string_lossy());
    }
    print(&format!("{files}\n"))?;
    match failures(&rows) {
        0 => Ok(()),
        n => Err(anyhow::anyhow!("{n} of {} cells failed; the rows say why", rows.len()).into()),
    }
}

fn grid_rows(
    model: &Model,
    source: &Source,
    place: &Place,
    values: Values,
    workload: &Workload,
    grid: &Grid,
    provenance: &Provenance,
    journal: &mut Journal,
) -> Result<Vec<Row>, Failure> {
    let mut base = template(model, source, place, values);
    provenance.stamp(&mut base);
    let cells = grid.cells();
    let progress = Progress::cells(cells.len() as u64);
    let mut runner =
        Checked { source, workload, inner: EngineRunner::new(model.clone(), place.clone(), values, workload.clone()) };
    let rows = run_cells(&cells, &base, true, &mut runner, journal, &progress)?;
    progress.finish();
    Ok(rows)
}

/// An engine runner that first looks whether the cell's context is one the model has.
struct Checked<'a> {
    source: &'a Source,
    workload: &'a Workload,
    inner: EngineRunner,
}

impl Runner for Checked<'_> {
    fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error> {
        within_context(self.source, cell, self.workload)?;
        self.inner.run(cell, row)
    }

    fn discard(&mut self) {
        self.inner.discard();
    }
}

/// A plan per usual model, card and batch: the row of its largest chunk, and the table of them.
fn usual_plans(values: Values, provenance: &Provenance, journal: &mut Journal) -> Result<(Vec<Row>, Table), Failure> {
    let mut columns =
        vec![("model", Align::Left), ("card", Align::Left), ("memory", Align::Right), ("weights", Align::Right)];
    let names: Vec<String> = USUAL_BATCHES.iter().map(|b| format!("batch {b}")).collect();
    columns.extend(names.iter().map(|n| (n.as_str(), Align::Right)));
    columns.push(("transient at most", Align::Right));
    let mut table = Table::new(&columns);
    let mut rows = Vec::new();
    let points = USUAL_BATCHES.map(|batch| (batch, 0));
    let pairs: Vec<(&str, &str)> = USUAL_PLANS
        .iter()
        .flat_map(|(models, cards)| models.iter().flat_map(|m| cards.iter().map(|c| (*m, *c))))
        .collect();
    let progress = Progress::cells(pairs.len() as u64);
    for (text, card) in pairs {
        progress.doing(&format!("{text} on {card}"));
        let model = Model { text: text.into(), seed: 0 };
        let place = Place::new(Some(card), None, Kind::Plan)?;
        let question = Question { context: USUAL_CONTEXT, kv_tokens: None, max_chunk: USUAL_CHUNKS };
        let answers = edges(&model, &place, values, &points, question)?;
        let memory = mib(place.spec.total_bytes);
        let mut fields = vec![text.to_owned(), card.to_owned(), memory, String::new()];
        let mut transient = None;
        for Answer { edge, mut row, .. } in answers {
            provenance.stamp(&mut row);
            fields.push(edge_text(edge));
            fields[3] = or_null(row.weights_bytes, mib);
            transient = transient.max(row.transient_peak_bytes);
            journal.append(&row)?;
            rows.push(row);
        }
        fields.push(or_null(transient, mib));
        table.push(fields);
        progress.advance(1);
    }
    progress.finish();
    Ok((rows, table))
}
