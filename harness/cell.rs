//! Runs a cell on an engine that keeps its parameters, and writes what came of it into the row.

use std::time::{Duration, Instant};

use highwater::checkpoint::{Mlp, Source};
use highwater::device::Device;
use highwater::engine::{Engine, KvBudget, Options, Runner as Bare, cache};
use highwater::error::{Error, KvPoolError, Result};
use highwater::model::StateScope;
use highwater::ops::batch::PAGE_TOKENS;
use highwater::ops::{Limits, Numerics};

use crate::axis::Cell;
use crate::hygiene;
use crate::leak;
use crate::measure::{Clock, LEVEL, Measure, Measured};
use crate::nvml::CardSource;
use crate::owners::{Owner, Phases};
use crate::pass::{self, Course, Pass};
use crate::record::{Row, Stage};
use crate::stats::{Interval, Summary};
use crate::sweep::Runner;
use crate::target::{Kind, Model, Place, Values, load_telling};
use crate::workload::Script;

pub(crate) use crate::workload::Workload;

/// Passes of a trace by the clock: the second, with everything loaded, says which step each request comes before.
const PASSES_BY_CLOCK: usize = 2;

/// Runs cells on one engine, which keeps its parameters between them.
pub(crate) struct EngineRunner {
    model: Model,
    place: Place,
    values: Values,
    /// May be changed between cells.
    pub(crate) workload: Workload,
    /// Told how loading gets on: bytes done and bytes in all.
    pub(crate) loading: Option<Loading>,
    engine: Option<Engine>,
    /// What loading it took, for the row of the cell that had it loaded.
    took: Option<Duration>,
    /// The card, to be looked at while a cell runs on it; none where its management library does not answer.
    card: Option<CardSource>,
}

/// What is told how loading gets on.
pub(crate) type Loading = Box<dyn FnMut(u64, u64)>;

/// This process's own time.
struct WallClock(Instant);

impl Clock for WallClock {
    fn now(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }

    fn pause(&self, seconds: f64) {
        std::thread::sleep(Duration::from_secs_f64(seconds));
    }
}

impl EngineRunner {
    /// Nothing is loaded before the first cell.
    pub(crate) fn new(model: Model, place: Place, values: Values, workload: Workload) -> EngineRunner {
        let card = match place.kind {
            Kind::Cuda(ordinal) => CardSource::open(ordinal),
            Kind::Cpu | Kind::Emulated | Kind::Plan => None,
        };
        EngineRunner { model, place, values, workload, loading: None, engine: None, took: None, card }
    }

    /// The engine with this cell's pools, loaded if there is none.
    fn engine(&mut self, options: Options) -> Result<&mut Engine> {
        let engine = if let Some(mut engine) = self.engine.take() {
            // Cells that do not fit leave the engine as it was.
            if let Err(error) = engine.resize(options) {
                self.engine = Some(engine);
                return Err(error);
            }
            engine
        } else {
            let source = self.model.open()?;
            let (engine, took) = load_telling(&self.place, source, options, self.loading.as_deref_mut())?;
            self.took = Some(took);
            engine
        };
        Ok(self.engine.insert(engine))
    }

    /// The engine, where one is loaded.
    pub(crate) fn loaded(&mut self) -> Option<&mut Engine> {
        self.engine.as_mut()
    }
}

impl Runner for EngineRunner {
    fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error> {
        let script = Script::of(&self.workload, cell)?;
        cell.stamp(row);
        (row.prompt, row.output) = script.uniform;
        row.context = Some(script.context);
        row.depth_primed = Some(cell.depth > 0);
        let options = options(self.values, self.model.seed, &self.workload, cell, &script);
        if let Some(tokens) = self.workload.kv_tokens {
            pool_holds_all(&self.place, &self.model.open()?, options.numerics, tokens, &script.held)?;
        }
        self.engine(options)?;
        let timed = self.place.kind != Kind::Plan;
        row.load_ms = self.took.take().filter(|_| timed).map(|took| took.as_secs_f64() * 1e3);
        let EngineRunner { model, place, workload, engine: Some(engine), card, .. } = self else {
            unreachable!("loaded on the line above")
        };
        write_sizing(row, engine);

        let course = Course { script: &script, depth: cell.depth, seed: model.seed, rates: &place.spec.rates, timed };
        if !timed {
            let pass = pass::run(engine, &course)?;
            write_memory(row, &script, &[&pass]);
            write_steps(row, &script, &pass);
            return leak::check(&script, [&pass]);
        }
        let by_clock = if script.by_clock() { PASSES_BY_CLOCK } else { 0 };
        let mut at_steps = None;
        let mut run = |at: usize| {
            let script = at_steps.as_ref().filter(|_| at >= by_clock).unwrap_or(&script);
            let pass = pass::run(engine, &Course { script, ..course })?;
            if at + 1 == by_clock {
                at_steps = Some(script.at_steps(&pass.came_at));
            }
            Ok(pass)
        };
        let measure = Measure {
            rules: workload.rules,
            least_warm: by_clock,
            seed: model.seed,
            clock: &WallClock(Instant::now()),
            source: card.as_mut().map(|card| card as &mut dyn hygiene::Source),
            times: &Pass::times,
        };
        let measured = measure.run(&mut run)?;
        // Passes that did the same work: all but those that the clock ordered.
        let same: Vec<&Pass> = measured.warm.iter().chain(&measured.passes).skip(by_clock).collect();
        write_memory(row, &script, &same);
        if let Some(first) = same.first() {
            write_steps(row, &script, first);
            row.output_hash = Some(first.output_hash());
            // A repetition that generates other tokens did not compute the same thing.
            row.checked = (same.len() > 1).then(|| same.iter().all(|pass| Some(pass.output_hash()) == row.output_hash));
        }
        write_speed(row, &measured, &script, model.seed);
        write_conditions(row, &measured);
        if matches!(engine.runner().model().geometry().mlp, Mlp::Moe { .. }) {
            write_experts(row, &pass::count_experts(engine, &course)?);
        }
        write_outside(row, engine)?;
        leak::check(&script, same)
    }

    fn discard(&mut self) {
        self.engine = None;
    }
}

/// What an engine is to be for a cell.
pub(crate) fn options(values: Values, seed: u64, workload: &Workload, cell: &Cell, script: &Script) -> Options {
    let context = workload.context.unwrap_or(script.context);
    // A context beyond what the script holds is room that was asked for.
    let room = || script.together.saturating_mul(context.div_ceil(PAGE_TOKENS as u64) * PAGE_TOKENS as u64);
    let needed = if workload.context.is_some() { room() } else { script.kv_tokens() };
    Options {
        numerics: values.numerics,
        chunk: cell.chunk as usize,
        limits: Limits {
            // A decode step has a row for each sequence, however small the chunk.
            step_tokens: cell.chunk.max(script.together) as usize,
            batch: script.together as usize,
            context: context as usize,
        },
        kv: KvBudget::Tokens(workload.kv_tokens.unwrap_or(needed)),
        policy: script.policy,
        seed,
        graphs: true,
        fault: values.fault,
    }
}

/// What stands on the slab before the first step.
pub(crate) fn write_sizing(row: &mut Row, engine: &Engine) {
    let sizing = engine.sizing();
    row.kv_tokens = Some(sizing.kv_tokens);
    row.weights_bytes = Some(sizing.weights);
    row.kv_bytes = Some(sizing.kv);
    row.state_bytes = Some(sizing.state);
    row.inputs_bytes = Some(sizing.inputs);
}

fn write_experts(row: &mut Row, counts: &[usize]) {
    let (Some(least), Some(most)) = (counts.iter().min(), counts.iter().max()) else { return };
    row.experts_per_layer = Some(counts.iter().sum::<usize>() as f64 / counts.len() as f64);
    row.experts_least = Some(*least as u64);
    row.experts_most = Some(*most as u64);
}

/// The ledger of the card's memory beside the slab.
fn write_outside(row: &mut Row, engine: &Engine) -> Result<()> {
    let Some(cuda) = engine.runner().device().as_cuda().filter(|cuda| cuda.is_card()) else { return Ok(()) };
    let outside = cuda.outside()?;
    row.context_bytes = Some(outside.context);
    row.modules_bytes = Some(outside.modules);
    row.blas_bytes = Some(outside.blas);
    row.graphs_bytes = Some(outside.graphs);
    row.unattributed_bytes = Some(outside.unattributed);
    Ok(())
}

/// What the steps of `passes` over one script took at most, and who held it.
pub(crate) fn write_memory(row: &mut Row, script: &Script, passes: &[&Pass]) {
    row.prefill_transient_bytes = passes.iter().map(|p| p.prefill_peak).max();
    row.decode_transient_bytes = passes.iter().filter(|p| p.decode_steps > 0).map(|p| p.decode_peak).max();
    row.lesser_owners = Phases::lesser(passes.iter().map(|p| &p.phases));
    if let Some(first) = passes.first() {
        let stages = script.stages.iter().zip(&first.stages);
        row.stages = stages
            .filter_map(|(name, report)| {
                let report = report.as_ref()?;
                let (transient_peak_bytes, fragmentation_bytes) = (report.transient_peak, report.fragmentation);
                Some(Stage { name: name.clone(), transient_peak_bytes, fragmentation_bytes })
            })
            .collect();
    }
    let Some(peak) = passes.iter().filter_map(|p| p.peak()).reduce(|a, b| {
        // The first of equals.
        if b.transient_peak > a.transient_peak { b } else { a }
    }) else {
        return;
    };
    row.slab_bytes = Some(peak.slab);
    row.resident_bytes = Some(peak.resident);
    row.transient_peak_bytes = Some(peak.transient_peak);
    row.free_bytes = Some(peak.free);
    row.fragmentation_bytes = Some(peak.fragmentation);
    row.largest_block_bytes = peak.largest.map(|(_, bytes)| bytes);
    row.largest_block_tag = peak.largest.map(|(tag, _)| tag.to_string());
    row.owners = peak.owners.iter().map(|(owner, bytes)| Owner { tag: owner.to_string(), bytes: *bytes }).collect();
}

/// What any pass says, one that takes no time too.
fn write_steps(row: &mut Row, script: &Script, pass: &Pass) {
    row.prefill_steps = Some(pass.prefill_steps);
    row.decode_steps = Some(pass.decode_steps);
    row.preempted = Some(pass.preempted);
    if pass.prefill_floor > 0.0 {
        row.floor_prefill_tok_s = Some(script.timed_prompt_tokens() as f64 / pass.prefill_floor);
    }
    row.floor_tpot_ms = Summary::of(&pass.decode_floors).map(|s| s.median);
}

/// The times of the repetitions that stand.
fn write_speed(row: &mut Row, measured: &Measured<Pass>, script: &Script, seed: u64) {
    row.warm_up = Some(measured.warm.len() as u64);
    row.stopped_by = Some(measured.stop.name().into());
    let all = |of: fn(&Pass) -> &Vec<f64>| measured.kept().flat_map(|p| of(p).iter().copied()).collect::<Vec<f64>>();
    row.prefill_samples_ms = measured.kept().map(|p| p.prefill.as_secs_f64() * 1e3).collect();
    if let Some(prefill) = Summary::of(&row.prefill_samples_ms) {
        row.prefill_ms = Some(prefill.median);
        row.prefill_q1_ms = Some(prefill.q1);
        row.prefill_q3_ms = Some(prefill.q3);
        row.prefill_count = Some(prefill.count);
        row.prefill_tok_s = Some(script.timed_prompt_tokens() as f64 / (prefill.median / 1e3));
    }
    if let Some(interval) = Interval::of_median(&row.prefill_samples_ms, LEVEL, seed) {
        row.prefill_low_ms = Some(interval.low);
        row.prefill_high_ms = Some(interval.high);
    }
    row.ttft_ms = Summary::of(&all(|p| &p.first_token_ms)).map(|s| s.median);
    row.tpot_samples_ms = all(|p| &p.decode_ms);
    row.tpot_passes_ms = measured.kept().filter_map(|p| Some(Summary::of(&p.decode_ms)?.median)).collect();
    // Steps of one repetition are alike; repetitions are what is resampled.
    if let Some(interval) = Interval::of_median(&row.tpot_passes_ms, LEVEL, seed) {
        row.tpot_low_ms = Some(interval.low);
        row.tpot_high_ms = Some(interval.high);
    }
    if let Some(tpot) = Summary::of(&row.tpot_samples_ms) {
        row.tpot_ms = Some(tpot.median);
        row.tpot_q1_ms = Some(tpot.q1);
        row.tpot_q3_ms = Some(tpot.q3);
        row.tpot_count = Some(tpot.count);
    }
    if script.mixes() {
        let (stalled, steady) = (all(|p| &p.stalled_ms), all(|p| &p.steady_ms));
        row.itl_stalled_ms = Summary::of(&stalled).map(|s| s.median);
        row.itl_stalled_count = Some(stalled.len() as u64);
        row.itl_steady_ms = Summary::of(&steady).map(|s| s.median);
        row.itl_steady_count = Some(steady.len() as u64);
    }
}

/// What the card was like meanwhile; nothing where there was none to look at.
fn write_conditions(row: &mut Row, measured: &Measured<Pass>) {
    let conditions = measured.conditions.clone();
    row.dirty_samples = Some(measured.settled.thrown);
    row.dirty.clone_from(&measured.settled.dirty);
    row.sm_clock_mhz = conditions.sm_clock_mhz;
    row.sm_clock_least_mhz = conditions.sm_clock_least_mhz;
    // ms times MHz.
    row.prefill_kcycles = row.prefill_ms.zip(conditions.sm_clock_mhz).map(|(ms, mhz)| ms * mhz);
    row.tpot_kcycles = row.tpot_ms.zip(conditions.sm_clock_mhz).map(|(ms, mhz)| ms * mhz);
    row.memory_clock_mhz = conditions.memory_clock_mhz;
    row.temperature_c = conditions.temperature_c;
    row.power_w = conditions.power_w;
    row.throttled = conditions.throttled;
    row.foreign_processes = conditions.foreign_processes;
}

/// Refuses a KV pool of `kv_tokens` that cannot hold `batch` sequences of `held` tokens at once: they would run one after
/// another, or compute again what they gave up, and the times of such a run are no batch's.
pub(crate) fn pool_holds(
    place: &Place,
    source: &Source,
    numerics: Numerics,
    kv_tokens: u64,
    batch: u64,
    held: u64,
) -> Result<()> {
    pool_holds_all(place, source, numerics, kv_tokens, &[(batch, held)])
}

/// The same for several groups of (sequences, tokens of each).
fn pool_holds_all(
    place: &Place,
    source: &Source,
    numerics: Numerics,
    kv_tokens: u64,
    groups: &[(u64, u64)],
) -> Result<()> {
    const PAGE: u64 = PAGE_TOKENS as u64;
    let pool_pages = kv_tokens.div_ceil(PAGE);
    let pages = groups.iter().fold(0, |sum: u64, (n, held)| sum.saturating_add(pages_needed(*n, *held)));
    let batch = groups.iter().map(|(n, _)| n).sum();
    let held = groups.iter().map(|(_, held)| *held).max().unwrap_or(0);
    if pages <= pool_pages {
        return Ok(());
    }
    // On a plan of any size: a page has the same bytes wherever it lies.
    let endless = Device::plan(place.spec.clone(), 1 << 60);
    let bare = Bare::load(&endless, source, numerics, &mut |_, _| {})?;
    let page_bytes = cache::state_bytes(&bare.model().state(), StateScope::PerToken, 1);
    let (pool_tokens, fits) = (pool_pages * PAGE, pages.saturating_mul(PAGE));
    Err(KvPoolError { batch, tokens: held, pool_tokens, pool_pages, pages, page_bytes, fits }.into())
}

/// Pages that `batch` sequences take at once, each of `held` tokens at its longest.
fn pages_needed(batch: u64, held: u64) -> u64 {
    held.max(1).div_ceil(PAGE_TOKENS as u64).saturating_mul(batch)
}

/// Whether a cell's context is one the model has, before anything is loaded.
pub(crate) fn within_context(source: &Source, cell: &Cell, workload: &Workload) -> Result<()> {
    let geometry = source.geometry();
    Script::of(workload, cell)?.within(geometry.max_context as u64, &geometry.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Place;
    use highwater::num::DType;
    use highwater::ops::ActQuant;

    /// Whatever the pool, a cell is either refused or runs its whole batch together: no preemption, every decode step full.
    #[test]
    fn a_pool_is_refused_exactly_where_the_batch_would_not_run_together() {
        let place = Place::new(None, Some(256 << 20), Kind::Plan).unwrap();
        let numerics = Numerics {
            activations: DType::F32,
            logits: DType::F32,
            state: DType::F32,
            kv: DType::F32,
            act_quant: ActQuant::Checkpoint,
            batch_invariant: false,
        };
        let values = Values { numerics, fault: None };
        let model = Model { text: "tiny".into(), seed: 0 };
        for (prompt, output, batch) in [(64, 1, 1), (64, 1, 2), (60, 5, 2), (60, 6, 2), (100, 40, 3), (10, 3, 3)] {
            let mut edge = None;
            for pages in 1..=12u64 {
                let kv_tokens = Some(pages * 64);
                let workload = Workload { prompt: Some(prompt), output, kv_tokens, ..Workload::default() };
                let mut runner = EngineRunner::new(model.clone(), place.clone(), values, workload);
                let mut row = Row::default();
                match runner.run(&Cell::fixed(512, batch, 0), &mut row) {
                    Ok(()) => {
                        assert_eq!(row.preempted, Some(0));
                        assert_eq!((row.prefill_steps, row.decode_steps), (Some(1), Some(output - 1)));
                        edge = edge.or(Some(pages));
                    }
                    Err(Error::KvPool(short)) => {
                        assert!(edge.is_none() && short.free() < short.requested());
                        row.set_error(&Error::KvPool(short.clone()));
                        row.verify().unwrap();
                        assert_eq!(row.oom_short_bytes, Some((short.pages - pages) * short.page_bytes));
                        assert!(short.to_string().contains(&format!("--kv-tokens {} fits", short.pages * 64)));
                        assert_eq!(row.oom_tag.as_deref(), Some("cache.kv"));
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert_eq!(edge, Some(pages_needed(batch, prompt + output - 1)), "{prompt} + {output} x {batch}");
        }
    }
}
