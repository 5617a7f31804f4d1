//! `sweep`: groups of cells, each group on one device; without a model, the tiny one here and plans of real ones on the usual cards.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use highwater::checkpoint::Source;
use highwater::error::{Error, mib};
use highwater::ops::Numerics;

use crate::charts;
use crate::cli::{SweepArgs, verb_at};
use crate::edges::{Answer, Question, edge_text, edges};
use crate::failure::Failure;
use crate::formats::Writers;
use crate::group::{Group, groups};
use crate::hold::hold;
use crate::journal::Journal;
use crate::out::print;
use crate::planned::{self, Planned};
use crate::progress::Progress;
use crate::provenance::Provenance;
use crate::record::Row;
use crate::resume::{Policy, Resumed, is_begun, resume};
use crate::sweep::{Answers, Here, Job, failures, run_cells};
use crate::table::{Align, Table, or_null, sweep_definitions, sweep_table};
use crate::target::{Kind, Model, Place, Values, template};
use crate::worker::answers::Workers;
use crate::worker::{Checked, fingerprint};

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
    if args.run.in_process && groups.iter().any(|group| group.worker_fault.is_some()) {
        let what = "faults of workers need workers; leave --in-process out".into();
        return Err(Error::Request { param: "--in-process", what }.into());
    }
    // Opened before any file is made: a model that cannot be opened must not leave a folder that blocks the next try.
    let sources = groups.iter().map(|group| group.model.open()).collect::<Result<Vec<_>, Error>>()?;
    let mut provenance = Provenance::gather();
    let out = args.out.clone().unwrap_or_else(|| Path::new("highwater-out").join(&provenance.run));
    let begin = |(group, source): (&Group, &Source)| {
        let mut row = template(&group.model, source, &group.place, group.values);
        provenance.stamp(&mut row);
        row.fault = row.fault.or_else(|| Some(group.worker_fault.as_ref()?.name().to_owned()));
        row.shard = args.run.shard.map(|shard| shard.to_string());
        row.cached = Some(false);
        row
    };
    let mut templates: Vec<Row> = groups.iter().zip(&sources).map(begin).collect();
    let mut planned = Planned::of(&groups, &templates, args.run.shard)?;
    // Before anything in it is looked at or written: the folder of a sweep that runs is its own.
    let _held = hold(&out)?;
    let going_on = args.run.resume && is_begun(&out)?;
    if !going_on {
        Journal::refuse_earlier(&out)?;
        planned.write(&out)?;
    }
    let (mut journal, taken) = if going_on {
        let policy = Policy { keep_failures: args.run.keep_failures, force: args.run.force };
        let Resumed { journal, taken } = resume(&out, &mut planned, policy)?;
        provenance.run.clone_from(&planned.run);
        for row in &mut templates {
            row.run.clone_from(&planned.run);
        }
        (journal, taken)
    } else {
        (Journal::create(&out)?, BTreeMap::new())
    };
    journal = journal.with(Writers::create(&out, &args.formats.formats, taken.values())?);
    let resumed = taken.len();
    let jobs = planned.jobs(&groups, taken);
    let mut rows = group_rows(args, &groups, &sources, &templates, jobs, &mut journal)?;
    // Pictures are of grids; the usual plans are a table.
    let drawn = rows.len();
    print(&sweep_table(&rows).text())?;
    if args.model.is_none() {
        let values = Values::sound(&args.numerics, Numerics::BF16, args.numerics.kv_dtype);
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
    if resumed > 0 {
        // Rows that ran now stand after those taken over; the plan's order is everyone's.
        Journal::replace(&out, &rows)?;
    }
    print(&format!("\n{}\n", sweep_definitions()))?;
    let emulated: BTreeSet<String> = groups.iter().filter_map(|group| group.place.not_emulated()).collect();
    for what in emulated {
        print(&format!("{what}\n"))?;
    }
    tell(&rows, resumed)?;
    let pictures = charts::write(&rows[..drawn], &out)?;
    let mut files = format!("{}: sweep.csv, sweep.jsonl, {}, DEFINITIONS.txt", out.display(), planned::FILE);
    if args.model.is_none() {
        files.push_str(", fits.md");
    }
    for file in journal.finish(&rows)? {
        let _ = write!(files, ", {file}");
    }
    for picture in &pictures {
        let _ = write!(files, ", {}", picture.file_name().unwrap_or_default().to_string_lossy());
    }
    print(&format!("{files}\n"))?;
    match failures(&rows) {
        0 => Ok(()),
        n => Err(anyhow::anyhow!("{n} of {} cells failed; the rows say why", rows.len()).into()),
    }
}

/// What a reader of the table must know beside it: rows of earlier, and workers that had to be replaced.
fn tell(rows: &[Row], resumed: usize) -> Result<()> {
    let mut text = String::new();
    if resumed > 0 {
        let _ = writeln!(text, "{resumed} of {} cells are of an earlier run (column cached)", rows.len());
    }
    for row in rows.iter().filter(|row| row.workers_replaced.unwrap_or(0) > 0 && row.cached != Some(true)) {
        let Row { chunk, batch, depth, .. } = row;
        let (what, why) = (row.workload.as_deref().unwrap_or("fixed"), row.worker_note.as_deref().unwrap_or_default());
        let _ = writeln!(text, "worker replaced at {what} chunk {chunk} batch {batch} depth {depth}: {why}");
    }
    if text.is_empty() { Ok(()) } else { print(&format!("{text}\n")) }
}

/// The rows of every job, group after group. `sources` are the groups' models, opened; `templates` their rows' beginnings.
fn group_rows(
    args: &SweepArgs,
    groups: &[Group],
    sources: &[Source],
    templates: &[Row],
    jobs: Vec<Vec<Job>>,
    journal: &mut Journal,
) -> Result<Vec<Row>, Failure> {
    let progress = Progress::cells(jobs.iter().map(|jobs| jobs.len() as u64).sum());
    let timeout = Some(args.run.cell_timeout).filter(|seconds| *seconds > 0.0).map(Duration::from_secs_f64);
    // A worker is started with all words but the program and the verb.
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if let Some(verb) = verb_at(&words) {
        words.remove(verb);
    }
    words.remove(0);
    let mut rows = Vec::new();
    for (number, (group, jobs)) in groups.iter().zip(jobs).enumerate() {
        let (source, template) = (&sources[number], &templates[number]);
        let mut answers: Box<dyn Answers> = if args.run.in_process {
            Box::new(Here(Checked::new(group, source)))
        } else {
            let fingerprint = fingerprint(group, source);
            Box::new(Workers::new(number, fingerprint, words.clone(), timeout, &progress))
        };
        rows.extend(run_cells(jobs, template, true, &mut *answers, journal, &progress)?);
    }
    progress.finish();
    Ok(rows)
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
