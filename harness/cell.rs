//! What a sweep cell does: a closed batch of equal requests, prefilled in chunks, then decoded together.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use highwater::checkpoint::{Mlp, Source};
use highwater::device::{Device, Rates};
use highwater::engine::{Engine, KvBudget, Options, Policy, Request, RequestId, Runner as Bare, StepOut, cache};
use highwater::error::{Error, KvPoolError, Result};
use highwater::mem::Report;
use highwater::model::StateScope;
use highwater::num::philox;
use highwater::ops::batch::PAGE_TOKENS;
use highwater::ops::cost::step_floor_seconds;
use highwater::ops::{Limits, Numerics};

use crate::axis::Cell;
use crate::owners::{Owner, Phases};
use crate::record::Row;
use crate::stats::{Interval, Summary};
use crate::sweep::Runner;
use crate::target::{Kind, Model, Place, Values, load_telling};

/// Timed repetitions of a cell after one that is not timed.
const REPETITIONS: usize = 3;
/// Level of the intervals in the rows.
const LEVEL: f64 = 0.95;
/// No further repetition begins after this long.
const CELL_SECONDS: f64 = 10.0;

/// What every cell of a sweep shares.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    /// Prompt tokens after the depth; the cell's chunk if `None`.
    pub(crate) prompt: Option<u64>,
    /// Tokens each sequence generates.
    pub(crate) output: u64,
    /// Tokens of the KV pool; what the cell needs if `None`.
    pub(crate) kv_tokens: Option<u64>,
    /// Tokens a sequence may hold; depth, prompt and output if `None`.
    pub(crate) context: Option<u64>,
}

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
}

/// What is told how loading gets on.
pub(crate) type Loading = Box<dyn FnMut(u64, u64)>;

/// One repetition's numbers.
#[derive(Debug, Default)]
struct Pass {
    prefill: Duration,
    prefill_floor: f64,
    prefill_steps: u64,
    decode_steps: u64,
    preempted: u64,
    decode_ms: Vec<f64>,
    decode_floors: Vec<f64>,
    first_token_ms: Vec<f64>,
    prefill_peak: u64,
    decode_peak: u64,
    peak: Option<Report>,
    phases: Phases,
    tokens: HashMap<RequestId, Vec<u32>>,
}

impl EngineRunner {
    /// Nothing is loaded before the first cell.
    pub(crate) fn new(model: Model, place: Place, values: Values, workload: Workload) -> EngineRunner {
        EngineRunner { model, place, values, workload, loading: None, engine: None }
    }

    fn options(&self, cell: &Cell, context: u64) -> Options {
        let per_sequence = context.div_ceil(PAGE_TOKENS as u64) * PAGE_TOKENS as u64;
        let kv_tokens = self.workload.kv_tokens.unwrap_or(cell.batch.saturating_mul(per_sequence));
        Options {
            numerics: self.values.numerics,
            chunk: cell.chunk as usize,
            limits: Limits {
                // A decode step has a row for each sequence, however small the chunk.
                step_tokens: cell.chunk.max(cell.batch) as usize,
                batch: cell.batch as usize,
                context: context as usize,
            },
            kv: KvBudget::Tokens(kv_tokens),
            policy: Policy::PrefillFirst,
            seed: self.model.seed,
            graphs: true,
            fault: self.values.fault,
        }
    }

    /// The engine with this cell's pools, loaded if there is none.
    fn engine(&mut self, options: Options) -> Result<&mut Engine> {
        let engine = match self.engine.take() {
            Some(mut engine) => {
                // Cells that do not fit leave the engine as it was.
                if let Err(error) = engine.resize(options) {
                    self.engine = Some(engine);
                    return Err(error);
                }
                engine
            }
            None => load_telling(&self.place, self.model.open()?, options, self.loading.as_deref_mut())?,
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
        let prompt = self.workload.prompt.unwrap_or(cell.chunk);
        let context = cell.depth.saturating_add(prompt).saturating_add(self.workload.output);
        row.prompt = Some(prompt);
        row.output = Some(self.workload.output);
        row.context = Some(context);
        row.depth_primed = Some(cell.depth > 0);
        let options = self.options(cell, self.workload.context.unwrap_or(context));
        let (timed, seed, rates, output) =
            (self.place.kind != Kind::Plan, self.model.seed, self.place.spec.rates, self.workload.output as usize);
        if let Some(tokens) = self.workload.kv_tokens {
            let held = context.saturating_sub(1);
            let source = self.model.open()?;
            pool_holds(&self.place, &source, options.numerics, tokens, cell.batch, held)?;
        }
        let engine = self.engine(options)?;
        row.kv_tokens = Some(engine.sizing().kv_tokens);
        row.weights_bytes = Some(engine.sizing().weights);
        row.kv_bytes = Some(engine.sizing().kv);
        row.state_bytes = Some(engine.sizing().state);
        row.inputs_bytes = Some(engine.sizing().inputs);

        let work = Work { prompt: prompt as usize, depth: cell.depth as usize, output, batch: cell.batch, seed };
        let begun = Instant::now();
        let mut passes = vec![pass(engine, &work, &rates)?];
        if timed {
            // The first pass touched the memory and warmed the caches; it stays only if there is time for no other.
            for _ in 0..REPETITIONS {
                if begun.elapsed().as_secs_f64() > CELL_SECONDS {
                    break;
                }
                passes.push(pass(engine, &work, &rates)?);
            }
            if passes.len() > 1 {
                passes.remove(0);
            }
        }
        write_memory(row, &passes);
        write_speed(row, &passes, &work, timed);
        if timed && matches!(engine.runner().model().geometry().mlp, Mlp::Moe { .. }) {
            write_experts(row, &count_experts(engine, &work)?);
        }
        write_outside(row, engine)?;
        Ok(())
    }

    fn discard(&mut self) {
        self.engine = None;
    }
}

/// A cell's requests.
#[derive(Clone, Copy)]
struct Work {
    prompt: usize,
    depth: usize,
    output: usize,
    batch: u64,
    seed: u64,
}

impl Work {
    /// The prompt of sequence `i`: seeded ids below `decodable`, different for each sequence.
    fn ids(&self, i: u64, decodable: usize) -> Vec<u32> {
        let key = philox::stream_key(self.seed, &format!("prompt.{i}"));
        (0..self.prompt as u32)
            .map(|at| ((u64::from(philox::philox4x32(key, [at, 0, 0, 0])[0]) * decodable as u64) >> 32) as u32)
            .collect()
    }
}

/// Empties the engine and gives it the batch.
fn submit(engine: &mut Engine, work: &Work) -> Result<()> {
    engine.clear();
    let decodable = engine.runner().model().geometry().decodable;
    for i in 0..work.batch {
        let prompt = work.ids(i, decodable);
        let feed = Some(work.seed ^ (i + 1));
        engine.submit(Request { depth: work.depth, feed, ..Request::greedy(prompt, work.output) })?;
    }
    Ok(())
}

/// Runs the batch once from an empty engine.
fn pass(engine: &mut Engine, work: &Work, rates: &Rates) -> Result<Pass> {
    submit(engine, work)?;
    let mut pass = Pass::default();
    let mut clock = Duration::ZERO;
    while let Some(step) = engine.step()? {
        clock += step.elapsed;
        pass.count(&step, work.batch, clock, rates)?;
    }
    Ok(pass)
}

impl Pass {
    fn count(&mut self, step: &StepOut, batch: u64, clock: Duration, rates: &Rates) -> Result<()> {
        let floor = step_floor_seconds(&step.metered, rates);
        self.preempted += step.preempted as u64;
        let ms = step.elapsed.as_secs_f64() * 1e3;
        self.phases.see(step.prefill_tokens > 0, &step.memory);
        if step.prefill_tokens > 0 {
            self.prefill += step.elapsed;
            self.prefill_floor += floor;
            self.prefill_steps += 1;
            self.prefill_peak = self.prefill_peak.max(step.memory.transient_peak);
        } else {
            self.decode_steps += 1;
            self.decode_peak = self.decode_peak.max(step.memory.transient_peak);
            if step.decode_tokens as u64 == batch {
                self.decode_ms.push(ms);
                self.decode_floors.push(floor * 1e3);
            }
        }
        if self.peak.as_ref().is_none_or(|p| step.memory.transient_peak > p.transient_peak) {
            self.peak = Some(step.memory.clone());
        }
        for record in &step.records {
            if let Some(highwater::engine::Finish::Failed(why)) = &record.finish {
                return Err(Error::Request { param: "cell", what: why.clone() });
            }
            if let Some(token) = &record.token {
                let tokens = self.tokens.entry(record.request).or_default();
                if tokens.is_empty() {
                    self.first_token_ms.push(clock.as_secs_f64() * 1e3);
                }
                tokens.push(token.id);
            }
        }
        Ok(())
    }

    /// The tokens of each request in the order submitted, to compare passes by.
    fn outputs(&self) -> Vec<&Vec<u32>> {
        let mut ids: Vec<_> = self.tokens.keys().collect();
        ids.sort();
        ids.into_iter().map(|id| &self.tokens[id]).collect()
    }
}

/// Distinct experts of each MoE layer in the decode steps of one more pass, which is not timed.
fn count_experts(engine: &mut Engine, work: &Work) -> Result<Vec<usize>> {
    /// Decode steps that are looked at.
    const STEPS: usize = 4;
    engine.count_experts(true);
    let counted = (|| {
        let work = Work { output: work.output.min(STEPS + 1), ..*work };
        submit(engine, &work)?;
        let mut counts = Vec::new();
        while let Some(step) = engine.step()? {
            let of_step = engine.runner().take_experts();
            if step.prefill_tokens == 0 && step.decode_tokens as u64 == work.batch {
                counts.extend(of_step);
            }
        }
        Ok(counts)
    })();
    engine.count_experts(false);
    counted
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

fn write_memory(row: &mut Row, passes: &[Pass]) {
    row.prefill_transient_bytes = passes.iter().map(|p| p.prefill_peak).max();
    row.decode_transient_bytes = passes.iter().filter(|p| p.decode_steps > 0).map(|p| p.decode_peak).max();
    row.lesser_owners = Phases::lesser(passes.iter().map(|p| &p.phases));
    let Some(peak) = passes.iter().filter_map(|p| p.peak.as_ref()).max_by_key(|r| r.transient_peak) else { return };
    row.slab_bytes = Some(peak.slab);
    row.resident_bytes = Some(peak.resident);
    row.transient_peak_bytes = Some(peak.transient_peak);
    row.free_bytes = Some(peak.free);
    row.fragmentation_bytes = Some(peak.fragmentation);
    row.largest_block_bytes = peak.largest.map(|(_, bytes)| bytes);
    row.largest_block_tag = peak.largest.map(|(tag, _)| tag.to_string());
    row.owners = peak.owners.iter().map(|(owner, bytes)| Owner { tag: owner.to_string(), bytes: *bytes }).collect();
}

fn write_speed(row: &mut Row, passes: &[Pass], work: &Work, timed: bool) {
    let prompt_tokens = (work.prompt as u64 * work.batch) as f64;
    let Some(first) = passes.first() else { return };
    row.prefill_steps = Some(first.prefill_steps);
    row.decode_steps = Some(first.decode_steps);
    row.preempted = passes.iter().map(|p| p.preempted).max();
    if first.prefill_floor > 0.0 {
        row.floor_prefill_tok_s = Some(prompt_tokens / first.prefill_floor);
    }
    row.floor_tpot_ms = Summary::of(&first.decode_floors).map(|s| s.median);
    if !timed {
        return;
    }
    // A repetition that generates other tokens did not compute the same thing.
    row.checked = (passes.len() > 1).then(|| passes.iter().all(|p| p.outputs() == first.outputs()));
    row.prefill_samples_ms = passes.iter().map(|p| p.prefill.as_secs_f64() * 1e3).collect();
    if let Some(prefill) = Summary::of(&row.prefill_samples_ms) {
        row.prefill_ms = Some(prefill.median);
        row.prefill_q1_ms = Some(prefill.q1);
        row.prefill_q3_ms = Some(prefill.q3);
        row.prefill_count = Some(prefill.count);
        row.prefill_tok_s = Some(prompt_tokens / (prefill.median / 1e3));
    }
    if let Some(interval) = Interval::of_median(&row.prefill_samples_ms, LEVEL, work.seed) {
        row.prefill_low_ms = Some(interval.low);
        row.prefill_high_ms = Some(interval.high);
    }
    let first_tokens: Vec<f64> = passes.iter().flat_map(|p| p.first_token_ms.iter().copied()).collect();
    row.ttft_ms = Summary::of(&first_tokens).map(|s| s.median);
    row.tpot_samples_ms = passes.iter().flat_map(|p| p.decode_ms.iter().copied()).collect();
    row.tpot_passes_ms = passes.iter().filter_map(|p| Some(Summary::of(&p.decode_ms)?.median)).collect();
    // Steps of one repetition are alike; repetitions are what is resampled.
    if let Some(interval) = Interval::of_median(&row.tpot_passes_ms, LEVEL, work.seed) {
        row.tpot_low_ms = Some(interval.low);
        row.tpot_high_ms = Some(interval.high);
    }
    if let Some(tpot) = Summary::of(&row.tpot_samples_ms) {
        row.tpot_ms = Some(tpot.median);
        row.tpot_q1_ms = Some(tpot.q1);
        row.tpot_q3_ms = Some(tpot.q3);
        row.tpot_count = Some(tpot.count);
    }
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
    const PAGE: u64 = PAGE_TOKENS as u64;
    let (pool_pages, pages) = (kv_tokens.div_ceil(PAGE), pages_needed(batch, held));
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
    let context = cell.depth.saturating_add(workload.prompt.unwrap_or(cell.chunk)).saturating_add(workload.output);
    let most = source.geometry().max_context as u64;
    if context <= most {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("a context of {context} tokens (depth + prompt + output)"),
        supported: format!("{} takes up to {most}", source.geometry().name),
    })
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
                let workload = Workload { prompt: Some(prompt), output, kv_tokens: Some(pages * 64), context: None };
                let mut runner = EngineRunner::new(model.clone(), place.clone(), values, workload);
                let mut row = Row::default();
                match runner.run(&Cell { chunk: 512, batch, depth: 0 }, &mut row) {
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
