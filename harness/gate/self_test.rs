//! `gate --self-test N`: how often the verdicts are wrong on this machine. One engine runs one cell over and over: as it is
//! (A), as it is once more (B), and with the seeded slowdown of 3 % (S), interleaved so that what drifts is in all of them.
//! N comparisons of A with B should find nothing, and N of A with S should find it. Bytes are compared beside it: those of A
//! and B must be equal, and one buffer more must be found and named.

use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use highwater::engine::{Engine, Fault, Finish, KvBudget, Options, Policy, Request};
use highwater::error::Error;
use highwater::mem::Report as Bytes;
use highwater::num::philox;
use highwater::ops::batch::PAGE_TOKENS;
use highwater::ops::{Limits, Numerics};
use serde::Serialize;

use crate::failure::{FAILED, Failure, UNDECIDED};
use crate::gate::cli::{Cell, GateArgs};
use crate::gate::compare::METRICS;
use crate::gate::memory::Memory;
use crate::gate::rates::Rate;
use crate::out::print;
use crate::owners::{Owner, Phases};
use crate::progress::Progress;
use crate::provenance::{Provenance, rfc3339_utc};
use crate::record::Row;
use crate::stats::Summary;
use crate::status::Status;
use crate::table::{Align, Table};
use crate::target::{Kind, Model, Place, Values, load, template};
use crate::verdict::{Comparison, MOST_HALF_WIDTH, Rule, Verdict};

/// Repetitions before the first that counts.
const WARM_UP: usize = 3;
/// The most false verdicts there may be, and the least of the slowdowns that must be found.
const MOST_FALSE: f64 = 1.0 / 200.0;
const LEAST_FOUND: f64 = 0.95;
/// The tag of the seeded buffer.
const EXTRA: &str = "extra_buffer";

/// One repetition of the cell.
struct Pass {
    prefill: Duration,
    decode_ms: Vec<f64>,
    memory: Row,
}

impl Pass {
    /// Prefill, and the median decode step, in the order of [`METRICS`]; in ms.
    fn times(&self) -> [Option<f64>; 2] {
        let prefill = self.prefill.as_secs_f64() * 1e3;
        [Some(prefill).filter(|ms| *ms > 0.0), Summary::of(&self.decode_ms).map(|steps| steps.median)]
    }
}

/// The cell: an engine and what it is given.
struct Probe {
    engine: Engine,
    prompt: usize,
    depth: usize,
    output: usize,
    batch: u64,
    seed: u64,
}

impl Probe {
    fn load(
        args: Cell,
        kv_tokens: Option<u64>,
        model: &Model,
        place: &Place,
        values: Values,
    ) -> Result<Probe, Failure> {
        let context = args.depth.saturating_add(args.prompt).saturating_add(args.output);
        let page = PAGE_TOKENS as u64;
        let each = context.div_ceil(page).saturating_mul(page);
        let options = Options {
            numerics: values.numerics,
            chunk: args.chunk as usize,
            limits: Limits {
                step_tokens: args.chunk.max(args.batch) as usize,
                batch: args.batch as usize,
                context: context as usize,
            },
            kv: KvBudget::Tokens(kv_tokens.unwrap_or(args.batch.saturating_mul(each))),
            policy: Policy::PrefillFirst,
            seed: model.seed,
            graphs: true,
            fault: None,
        };
        let engine = load(place, model.open()?, options)?;
        let (depth, output) = (args.depth as usize, args.output as usize);
        Ok(Probe { engine, prompt: args.prompt as usize, depth, output, batch: args.batch, seed: model.seed })
    }

    /// Runs the cell once with this fault.
    fn pass(&mut self, fault: Option<Fault>) -> Result<Pass, Failure> {
        let engine = &mut self.engine;
        engine.clear();
        engine.set_fault(fault);
        let ids = engine.runner().model().geometry().decodable as u64;
        for sequence in 0..self.batch {
            let key = philox::stream_key(self.seed, &format!("prompt.{sequence}"));
            let word = |at: u32| u64::from(philox::philox4x32(key, [at, 0, 0, 0])[0]);
            let prompt = (0..self.prompt as u32).map(|at| ((word(at) * ids) >> 32) as u32).collect();
            let feed = Some(self.seed ^ (sequence + 1));
            engine.submit(Request { depth: self.depth, feed, ..Request::greedy(prompt, self.output) })?;
        }
        let mut pass = Pass { prefill: Duration::ZERO, decode_ms: Vec::new(), memory: Row::default() };
        let sizing = engine.sizing();
        pass.memory.weights_bytes = Some(sizing.weights);
        pass.memory.kv_bytes = Some(sizing.kv);
        pass.memory.state_bytes = Some(sizing.state);
        pass.memory.inputs_bytes = Some(sizing.inputs);
        let (mut peak, mut phases): (Option<Bytes>, Phases) = Default::default();
        while let Some(step) = engine.step()? {
            let phase = if step.prefill_tokens > 0 {
                pass.prefill += step.elapsed;
                &mut pass.memory.prefill_transient_bytes
            } else {
                if step.decode_tokens as u64 == self.batch {
                    pass.decode_ms.push(step.elapsed.as_secs_f64() * 1e3);
                }
                &mut pass.memory.decode_transient_bytes
            };
            *phase = (*phase).max(Some(step.memory.transient_peak));
            phases.see(step.prefill_tokens > 0, &step.memory);
            let failed = step.records.iter().find_map(|record| match &record.finish {
                Some(Finish::Failed(why)) => Some(why.clone()),
                _ => None,
            });
            if let Some(why) = failed {
                return Err(Failure::found(FAILED, format!("the cell failed: {why}")));
            }
            if peak.as_ref().is_none_or(|peak| step.memory.transient_peak > peak.transient_peak) {
                peak = Some(step.memory);
            }
        }
        let peak = peak.context("the cell has no steps")?;
        pass.memory.resident_bytes = Some(peak.resident);
        pass.memory.transient_peak_bytes = Some(peak.transient_peak);
        pass.memory.lesser_owners = Phases::lesser(std::iter::once(&phases));
        pass.memory.owners =
            peak.owners.iter().map(|(owner, bytes)| Owner { tag: owner.to_string(), bytes: *bytes }).collect();
        Ok(pass)
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
    let mut csv = csv::Writer::from_path(&path).with_context(|| format!("cannot create {}", path.display()))?;

    let timed = place.kind != Kind::Plan;
    let repetitions = if timed { asked.repetitions } else { 1 };
    let mut cell = Probe::load(asked, probe.target.budget.kv_tokens, &model, &place, values)?;
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
            for compared in compare(comparison, &sides, args.threshold)? {
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
    print(if args.json { &json } else { &text })?;
    end(&outcome, args)
}

/// The comparisons of one round: A with B, and A with S.
fn compare(comparison: usize, sides: &[Vec<Pass>; 3], threshold: f64) -> Result<Vec<Compared>, Failure> {
    let mut rows = Vec::new();
    for (at, metric) in METRICS.into_iter().enumerate() {
        let [a, b, s] =
            [0, 1, 2].map(|side| -> Vec<f64> { sides[side].iter().filter_map(|p| p.times()[at]).collect() });
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
    if args.strict {
        return Err(Failure::found(UNDECIDED, what));
    }
    Ok(print(&format!("{TOO_WIDE}: {what}\n"))?)
}
