//! `gate --self-test N`: how often the verdicts are wrong on this machine. One engine runs one cell over and over: as it is
//! (A), as it is once more (B), and with the seeded slowdown of 3 % (S), interleaved so that what drifts is in all of them.
//! N comparisons of A with B should find nothing, and N of A with S should find it. Bytes are compared beside it: those of A
//! and B must be equal, and one buffer more must be found and named.

use std::fs::File;
use std::path::Path;
use std::time::SystemTime;

use anyhow::Context;
use highwater::checkpoint::Source;
use highwater::device::Rates;
use highwater::engine::{Engine, Fault};
use highwater::error::Error;
use highwater::ops::Numerics;
use serde::Serialize;

use crate::axis::Cell;
use crate::cell::{options, write_memory, write_sizing};
use crate::failure::{FAILED, Failure, UNDECIDED};
use crate::gate::cli::{Asked, GateArgs};
use crate::gate::compare::METRICS;
use crate::gate::memory::Memory;
use crate::gate::rates::Rate;
use crate::measure::Times;
use crate::out::print;
use crate::pass::{self, Course};
use crate::progress::Progress;
use crate::provenance::{Provenance, rfc3339_utc};
use crate::record::Row;
use crate::stats::Summary;
use crate::status::Status;
use crate::table::{Align, Table};
use crate::target::{Kind, Model, Place, Values, load, template};
use crate::verdict::{Comparison, MOST_HALF_WIDTH, Rule, Verdict};
use crate::workload::{Script, Workload};

/// Repetitions before the first that counts.
const WARM_UP: usize = 3;
/// The most false verdicts there may be, and the least of the slowdowns that must be found.
const MOST_FALSE: f64 = 1.0 / 200.0;
const LEAST_FOUND: f64 = 0.95;
/// The tag of the seeded buffer.
const EXTRA: &str = "extra_buffer";

/// One repetition of the cell.
struct Pass {
    /// In the order of [`METRICS`].
    times: [Option<f64>; 2],
    memory: Row,
}

/// The cell: an engine and what it is given.
struct Probe {
    engine: Engine,
    script: Script,
    depth: u64,
    seed: u64,
    rates: Rates,
    timed: bool,
}

impl Probe {
    fn load(
        asked: Asked,
        kv_tokens: Option<u64>,
        (model, source): (&Model, Source),
        place: &Place,
        values: Values,
    ) -> Result<Probe, Error> {
        let workload = Workload { prompt: Some(asked.prompt), output: asked.output, kv_tokens, ..Workload::default() };
        let cell = Cell::fixed(asked.chunk, asked.batch, asked.depth);
        let script = Script::of(&workload, &cell)?;
        let engine = load(place, source, options(values, model.seed, &workload, &cell, &script))?;
        let (rates, timed) = (place.spec.rates, place.kind != Kind::Plan);
        Ok(Probe { engine, script, depth: asked.depth, seed: model.seed, rates, timed })
    }

    /// Runs the cell once with this fault.
    fn pass(&mut self, fault: Option<Fault>) -> Result<Pass, Failure> {
        let Probe { engine, script, depth, seed, rates, timed } = self;
        engine.set_fault(fault);
        let course = Course { script, depth: *depth, seed: *seed, rates, timed: *timed };
        let ran = pass::run(engine, &course).map_err(|error| match error {
            // The command line asked for nothing wrong: a request of the cell failed.
            Error::Request { param: "cell", what } => Failure::found(FAILED, format!("the cell failed: {what}")),
            error => error.into(),
        })?;
        let mut memory = Row::default();
        write_sizing(&mut memory, engine);
        write_memory(&mut memory, script, &[&ran]);
        memory.transient_peak_bytes.context("the cell has no steps")?;
        let Times { prefill_ms, tpot_ms } = ran.times();
        Ok(Pass { times: [prefill_ms, tpot_ms], memory })
    }
}

/// One comparison, as a row of self-test.csv.
#[derive(Debug, Serialize)]
struct Compared {
    comparison: usize,
    /// `a/a`, or the seeded fault.
    kind: &'static str,
    metric: &'static str,
    base_ms: f64,
    candidate_ms: f64,
    ratio: f64,
    low: Option<f64>,
    high: Option<f64>,
    half_width: Option<f64>,
    samples: usize,
    verdict: Verdict,
}

/// What became of one metric.
#[derive(Debug, Serialize)]
struct Score {
    metric: &'static str,
    /// A/A comparisons called FASTER or SLOWER.
    false_verdicts: Rate,
    /// A/A comparisons called SAME.
    same: usize,
    /// Median half-width of the A/A intervals, as a share of the base.
    half_width: f64,
    /// Seeded slowdowns called SLOWER.
    found: Rate,
    /// What that says.
    verdict: &'static str,
}

/// What is written to self-test.json.
#[derive(Debug, Serialize)]
struct Outcome {
    comparisons: usize,
    repetitions: usize,
    /// The cell, the place and where the numbers come from, in the columns of a sweep's row.
    #[serde(flatten)]
    of: serde_json::Map<String, serde_json::Value>,
    scores: Vec<Score>,
    /// Repeats whose bytes differ from the first's.
    memory_alarms: Rate,
    /// Seeded buffers that were found and named.
    buffers_found: Rate,
    /// How the last of them was named.
    buffer: String,
}

const PASSED: &str = "PASSED";
const TOO_WIDE: &str = "INCONCLUSIVE";
const WRONG: &str = "FAILED";

/// `gate --self-test`.
pub(crate) fn self_test(args: &GateArgs, comparisons: usize) -> Result<(), Failure> {
    let probe = &args.probe;
    let (place, values) = (Place::of(&probe.target)?, Values::of(&probe.numerics, Numerics::BF16)?);
    if values.fault.is_some() {
        let what = "a self-test seeds its own faults".to_owned();
        return Err(Error::Request { param: "--fault", what }.into());
    }
    let named = probe.model.clone().unwrap_or_else(|| "tiny@bf16".to_owned());
    let (model, asked) = (Model { text: named, seed: probe.numerics.seed }, probe.cell());
    let source = model.open()?;
    let provenance = Provenance::gather();
    let mut row = Row {
        status: Status::Ok,
        time: rfc3339_utc(SystemTime::now()),
        chunk: asked.chunk,
        batch: asked.batch,
        depth: asked.depth,
        ..template(&model, &source, &place, values)
    };
    (row.prompt, row.output) = (Some(asked.prompt), Some(asked.output));
    provenance.stamp(&mut row);
    let out = probe.out.clone().unwrap_or_else(|| Path::new("highwater-out").join(&provenance.run));
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create the folder {}", out.display()))?;
    let path = out.join("self-test.csv");
    let file = File::create_new(&path);
    let file =
        file.with_context(|| format!("cannot create {}; another --out begins a new self-test", path.display()))?;
    let mut csv = csv::Writer::from_writer(file);

    let timed = place.kind != Kind::Plan;
    let repetitions = if timed { asked.repetitions } else { 1 };
    let mut cell = Probe::load(asked, probe.target.budget.kv_tokens, (&model, source), &place, values)?;
    for _ in 0..if timed { WARM_UP } else { 0 } {
        cell.pass(None)?;
    }
    let (mut rows, mut alarms, mut buffers, mut buffer) = (Vec::new(), 0, 0, String::new());
    let first = cell.pass(None)?.memory;
    let progress = Progress::rows(comparisons as u64);
    for comparison in 1..=comparisons {
        let mut sides: [Vec<Pass>; 3] = Default::default();
        for repetition in 0..repetitions {
            let order = if repetition % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] };
            for side in order {
                sides[side].push(cell.pass((side == 2).then_some(Fault::SlowKernel))?);
            }
        }
        let moved = |pass: &Pass| Memory::of(&first, &pass.memory) != Memory::default();
        alarms += usize::from(sides.iter().flatten().any(moved));
        let memory = Memory::of(&first, &cell.pass(Some(Fault::ExtraBuffer))?.memory);
        buffer = memory.line();
        buffers += usize::from(memory.grew() && buffer.contains(EXTRA));
        if timed {
            for compared in compare(comparison, &sides, args.judge.threshold)? {
                csv.serialize(&compared).with_context(|| format!("cannot write {}", path.display()))?;
                rows.push(compared);
            }
            csv.flush().with_context(|| format!("cannot write {}", path.display()))?;
        }
        progress.advance(1);
    }
    progress.finish();
    let scores: Vec<Score> = METRICS.iter().filter_map(|metric| score(metric, &rows)).collect();
    let serde_json::Value::Object(of) = serde_json::to_value(&row).context("a row is no JSON")? else {
        return Err(Failure::found(FAILED, "a row is no object".into()));
    };
    let of = of.into_iter().filter(|(_, value)| !value.is_null() && !value.is_array()).collect();
    let (memory_alarms, buffers_found) = (Rate::of(alarms, comparisons), Rate::of(buffers, comparisons));
    let outcome = Outcome { comparisons, repetitions, of, scores, memory_alarms, buffers_found, buffer };
    let json = serde_json::to_string_pretty(&outcome).context("the outcome is no JSON")? + "\n";
    let file = out.join("self-test.json");
    std::fs::write(&file, &json).with_context(|| format!("cannot write {}", file.display()))?;
    let text = format!("{}\n{}: self-test.csv, self-test.json\n", text(&outcome), out.display());
    print(if args.judge.json { &json } else { &text })?;
    end(&outcome, args)
}

/// The comparisons of one round: A with B, and A with S.
fn compare(comparison: usize, sides: &[Vec<Pass>; 3], threshold: f64) -> Result<Vec<Compared>, Failure> {
    let mut rows = Vec::new();
    for (at, metric) in METRICS.into_iter().enumerate() {
        let [a, b, s] = [0, 1, 2].map(|side| -> Vec<f64> { sides[side].iter().filter_map(|p| p.times[at]).collect() });
        for (kind, candidate) in [("a/a", &b), (Fault::SlowKernel.name(), &s)] {
            let compared = Comparison::of(&a, candidate, Rule::of_steps(threshold), comparison as u64);
            let compared = compared.map_err(|why| Failure::found(FAILED, format!("{metric}: {why}")))?;
            rows.push(Compared {
                comparison,
                kind,
                metric,
                base_ms: compared.base,
                candidate_ms: compared.candidate,
                ratio: compared.ratio,
                low: compared.low,
                high: compared.high,
                half_width: compared.half_width(),
                samples: compared.candidate_samples,
                verdict: compared.verdict,
            });
        }
    }
    Ok(rows)
}

fn score(metric: &'static str, rows: &[Compared]) -> Option<Score> {
    let of = |equal: bool| rows.iter().filter(move |row| row.metric == metric && (row.kind == "a/a") == equal);
    let count = |equal: bool, verdicts: &[Verdict]| of(equal).filter(|row| verdicts.contains(&row.verdict)).count();
    let widths: Vec<f64> = of(true).filter_map(|row| row.half_width).collect();
    let half_width = Summary::of(&widths)?.median;
    let false_verdicts = Rate::of(count(true, &[Verdict::Faster, Verdict::Slower]), of(true).count());
    let found = Rate::of(count(false, &[Verdict::Slower]), of(false).count());
    let verdict = match () {
        () if false_verdicts.low > MOST_FALSE => WRONG,
        () if half_width > MOST_HALF_WIDTH => TOO_WIDE,
        () if found.high < LEAST_FOUND => WRONG,
        () => PASSED,
    };
    Some(Score { metric, false_verdicts, same: count(true, &[Verdict::Same]), half_width, found, verdict })
}

fn text(outcome: &Outcome) -> String {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("metric", Left),
        ("false verdicts of A/A", Left),
        ("SAME", Right),
        ("half-width", Right),
        ("3 % found", Left),
        ("verdict", Left),
    ]);
    for score in &outcome.scores {
        table.push(vec![
            score.metric.to_owned(),
            score.false_verdicts.text(),
            score.same.to_string(),
            format!("{:.2} %", score.half_width * 100.0),
            score.found.text(),
            score.verdict.to_owned(),
        ]);
    }
    let memory = format!(
        "memory: false alarms {}, seeded buffers found {}\n  as: {}\n",
        outcome.memory_alarms.text(),
        outcome.buffers_found.text(),
        outcome.buffer
    );
    let speed = if outcome.scores.is_empty() { String::new() } else { table.text() };
    format!("{speed}{memory}")
}

/// Ends with 1 where the program was shown to be wrong, and says what to do where this machine is too noisy to tell.
fn end(outcome: &Outcome, args: &GateArgs) -> Result<(), Failure> {
    if outcome.memory_alarms.hits > 0 || outcome.buffers_found.hits < outcome.comparisons {
        let what = format!(
            "bytes: {} false alarms and {} of {} seeded buffers found",
            outcome.memory_alarms.hits, outcome.buffers_found.hits, outcome.comparisons
        );
        return Err(Failure::found(FAILED, what));
    }
    if let Some(wrong) = outcome.scores.iter().find(|score| score.verdict == WRONG) {
        let what = format!(
            "{}: {} false verdicts, {} of the slowdowns found",
            wrong.metric,
            wrong.false_verdicts.text(),
            wrong.found.text()
        );
        return Err(Failure::found(FAILED, what));
    }
    let Some(wide) = outcome.scores.iter().find(|score| score.verdict == TOO_WIDE) else { return Ok(()) };
    let factor = (wide.half_width / MOST_HALF_WIDTH).powi(2).clamp(2.0, 20.0);
    let more = (outcome.repetitions as f64 * factor).ceil().min(1000.0);
    let what = format!(
        "{}: intervals of A/A are +-{:.2} % wide on this machine, so nothing is shown; give --repetitions {more}, a longer \
         --output, or a quieter machine",
        wide.metric,
        wide.half_width * 100.0
    );
    if args.judge.strict {
        return Err(Failure::found(UNDECIDED, what));
    }
    Ok(print(&format!("{TOO_WIDE}: {what}\n"))?)
}
