//! `sweep`: groups of cells, each group on one device; without a model, the tiny one here and plans of real ones on the usual cards.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use highwater::checkpoint::Source;
use highwater::error::{Error, mib};
use highwater::ops::Numerics;

use crate::axis::Cell;
use crate::cell::{EngineRunner, Workload, within_context};
use crate::charts;
use crate::cli::SweepArgs;
use crate::edges::{Answer, Question, edge_text, edges};
use crate::failure::Failure;
use crate::group::{Group, groups};
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
/// Context of those plans.
const USUAL_CONTEXT: u64 = 8192;
/// Batches of those plans.
const USUAL_BATCHES: [u64; 2] = [1, 8];
/// Largest chunk asked about.
const USUAL_CHUNKS: u64 = 1 << 16;

/// `sweep`.
pub(crate) fn sweep(args: &SweepArgs) -> Result<(), Failure> {
    let groups = groups(args)?;
    // Opened before any file is made: a model that cannot be opened must not leave a folder that blocks the next try.
    let sources = groups.iter().map(|group| group.model.open()).collect::<Result<Vec<_>, Error>>()?;
    let provenance = Provenance::gather();
    let out = args.out.clone().unwrap_or_else(|| Path::new("highwater-out").join(&provenance.run));
    let mut journal = Journal::create(&out)?;
    let mut rows = group_rows(&groups, &sources, &provenance, &mut journal)?;
    // Pictures are of grids; the usual plans are a table.
    let drawn = rows.len();
    print(&sweep_table(&rows).text())?;
    if args.model.is_none() {
        let values = Values::of(&args.numerics, Numerics::BF16)?;
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

/// The rows of every cell of `groups`, in order. `sources` are the groups' models, opened.
fn group_rows(
    groups: &[Group],
    sources: &[Source],
    provenance: &Provenance,
    journal: &mut Journal,
) -> Result<Vec<Row>, Failure> {
    let progress = Progress::cells(groups.iter().map(|group| group.cells.len() as u64).sum());
    let mut rows = Vec::new();
    for (group, source) in groups.iter().zip(sources) {
        let mut base = template(&group.model, source, &group.place, group.values);
        provenance.stamp(&mut base);
        let (model, place) = (group.model.clone(), group.place.clone());
        let inner = EngineRunner::new(model, place, group.values, group.workload.clone());
        let mut runner = Checked { source, workload: &group.workload, inner };
        rows.extend(run_cells(&group.cells, &base, true, &mut runner, journal, &progress)?);
    }
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
