//! How much of a slab each part takes, found by running the worst legal steps on the plan device before the KV pool is
//! sized. There is no second, hand-written formula.

use std::sync::Arc;

use serde::Serialize;

use crate::checkpoint::Source;
use crate::device::{Device, DeviceSpec};
use crate::engine::cache;
use crate::engine::fault::Fault;
use crate::engine::runner::{LOGIT_BLOCK_ROWS, PromptRows, Runner, SampledRow, StepPlan};
use crate::error::{BudgetError, Error, OutOfMemory, Result};
use crate::mem::Owner;
use crate::model::StateScope;
use crate::ops::batch::{PAGE_TOKENS, Placement};
use crate::ops::sampler::SampleRow;
use crate::ops::{Limits, Numerics, Span};

/// A slab no model fills: sizes are found on it, then compared with the real one.
const ENDLESS_BYTES: u64 = 1 << 60;

/// How the KV pool is sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvBudget {
    /// Room for so many tokens, so that a change elsewhere cannot hide in it.
    Tokens(u64),
    /// What everything else leaves, at most what all sequences can use.
    Fill,
}

/// The slab, divided. All in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sizing {
    /// The slab.
    pub slab: u64,
    /// Parameters.
    pub weights: u64,
    /// KV pages.
    pub kv: u64,
    /// State slots: recurrent state and conv windows.
    pub state: u64,
    /// The step's small inputs.
    pub inputs: u64,
    /// The transient arena: the largest of [`Sizing::corners`].
    pub arena: u64,
    /// KV pages, the reserved one included.
    pub pages: u64,
    /// State slots, the reserved one included.
    pub slots: u64,
    /// Tokens the KV pool holds.
    pub kv_tokens: u64,
    /// Each schedule that can be the worst, with its transient peak.
    pub corners: Vec<(&'static str, u64)>,
    /// Who holds the arena at the worst of them: largest first, sums to [`Sizing::arena`].
    pub owners: Vec<(Owner, u64)>,
}

impl Sizing {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.state + self.inputs + self.arena
    }

    /// The terms in the order they are reserved.
    pub fn terms(&self) -> Vec<(String, u64)> {
        [
            ("weights", self.weights),
            ("kv", self.kv),
            ("state", self.state),
            ("inputs", self.inputs),
            ("transient", self.arena),
        ]
        .map(|(name, bytes)| (name.to_string(), bytes))
        .to_vec()
    }
}

/// A step of `decodes` sequences near the end of their context and prompts of the given (rows, cached tokens).
fn step(limits: Limits, decodes: usize, prompts: &[(usize, usize)], score: bool) -> StepPlan {
    let mut plan = StepPlan { decodes, ..StepPlan::default() };
    let mut start = 0;
    let lengths = (0..decodes).map(|_| (1, limits.context - 1)).chain(prompts.iter().copied());
    for (len, context) in lengths {
        plan.spans.push(Span { start, len, context });
        let pages = vec![cache::PADDING; (context + len).div_ceil(PAGE_TOKENS)];
        plan.places.push(Placement { slot_in: 1, slot_out: 1, pages });
        start += len;
        plan.samples.push(SampledRow { row: start as i32 - 1, params: SampleRow::default(), logits: false });
    }
    plan.tokens = vec![0; start];
    if score {
        plan.prompts.push(PromptRows { first: 0, targets: vec![0; start.min(2 * LOGIT_BLOCK_ROWS)], logits: false });
    }
    plan
}

/// The schedules that can be worst under `limits`, each legal under them.
pub fn corners(limits: Limits) -> Vec<(&'static str, StepPlan)> {
    let Limits { step_tokens, batch, context } = limits;
    let chunk = step_tokens.min(context);
    let decodes = batch.min(step_tokens);
    let mut list = vec![
        ("one long prompt", step(limits, 0, &[(chunk, 0)], false)),
        ("the last chunk at full context", step(limits, 0, &[(chunk, context - chunk)], false)),
        ("one long prompt, every row scored", step(limits, 0, &[(chunk, 0)], true)),
    ];
    // As many sequences as fit, each as short as they can be with the whole budget used.
    let many = decodes;
    let (each, longer) = (step_tokens / many, step_tokens % many);
    let short: Vec<(usize, usize)> = (0..many).map(|i| ((each + usize::from(i < longer)).min(context), 0)).collect();
    list.push(("many short prompts", step(limits, 0, &short, false)));
    list.push(("many one-token prompts", step(limits, 0, &vec![(1, 0); many], false)));
    if context > 1 {
        list.push(("a full decode batch", step(limits, decodes, &[], false)));
        if batch > 1 && step_tokens > 1 {
            let held = decodes.min(batch - 1).min(step_tokens - 1);
            let rest = (step_tokens - held).min(context);
            list.push(("decodes beside a prompt", step(limits, held, &[(rest, context - rest)], true)));
        }
    }
    list
}

/// Sizes a slab for `limits`. Fails with [`Error::Budget`] where it is too small: each term in bytes, the first
/// allocation that would not fit, and the nearest setting that does.
pub fn size(
    spec: &DeviceSpec,
    slab: u64,
    source: &Source,
    numerics: Numerics,
    limits: Limits,
    kv: KvBudget,
) -> Result<Sizing> {
    check(source, limits)?;
    let mut endless = endless(spec, source, numerics)?;
    let sizing = divide(&mut endless, slab, limits, kv, None)?;
    if sizing.total() <= slab && sizing.kv_tokens >= minimum_kv_tokens(kv, limits) {
        return Ok(sizing);
    }
    let sizing = match kv {
        // What it takes at least, not what would be left of it.
        KvBudget::Fill => divide(&mut endless, slab, limits, KvBudget::Tokens(minimum_kv_tokens(kv, limits)), None)?,
        KvBudget::Tokens(_) => sizing,
    };
    let nearest = nearest(&mut endless, slab, limits, kv)?;
    let first = first_failure(spec, slab, source, numerics, limits, &sizing)?;
    Err(Error::from(BudgetError { slab, terms: sizing.terms(), first: first.map(Box::new), nearest }))
}

fn check(source: &Source, limits: Limits) -> Result<()> {
    let geometry = source.geometry();
    let bad = |param, what: String| Err(Error::Request { param, what });
    if limits.step_tokens == 0 || limits.step_tokens > 1 << 20 {
        return bad("--chunk", format!("{} tokens; from 1 to {}", limits.step_tokens, 1 << 20));
    }
    if limits.batch == 0 || limits.batch > 1 << 14 {
        return bad("--batch", format!("{} sequences; from 1 to {}", limits.batch, 1 << 14));
    }
    if limits.context < 2 || limits.context > geometry.max_context {
        let most = geometry.max_context;
        return bad("--context", format!("{} tokens; {} takes from 2 to {most}", limits.context, geometry.name));
    }
    Ok(())
}

/// A pool that fills the rest must hold one sequence at its full context.
fn minimum_kv_tokens(kv: KvBudget, limits: Limits) -> u64 {
    match kv {
        KvBudget::Tokens(_) => 0,
        KvBudget::Fill => limits.context as u64,
    }
}

/// The model on a slab that nothing fills.
fn endless(spec: &DeviceSpec, source: &Source, numerics: Numerics) -> Result<Runner> {
    Runner::load(&Device::plan(spec.clone(), ENDLESS_BYTES), source, numerics, &mut |_, _| {})
}

/// A model whose sizes are asked for again and again: its parameters are declared once.
#[derive(Debug)]
pub struct Sizer<'a> {
    source: &'a Source,
    endless: Runner,
}

impl Sizer<'_> {
    /// Declares the parameters of `source` for the tactics of `spec`, whose memory plays no part.
    pub fn new<'a>(spec: &DeviceSpec, source: &'a Source, numerics: Numerics) -> Result<Sizer<'a>> {
        Ok(Sizer { source, endless: endless(spec, source, numerics)? })
    }

    /// What `limits` take with a KV pool of `kv_tokens`, as [`size`] finds it, whether or not any card has as much: the
    /// slab of the result is its total. With a fault, every corner is run with it.
    pub fn size(&mut self, limits: Limits, kv_tokens: u64, fault: Option<Fault>) -> Result<Sizing> {
        check(self.source, limits)?;
        let sizing = divide(&mut self.endless, 0, limits, KvBudget::Tokens(kv_tokens), fault)?;
        Ok(Sizing { slab: sizing.total(), ..sizing })
    }
}

/// Divides the slab; the result's total may exceed it.
fn divide(endless: &mut Runner, slab: u64, limits: Limits, kv: KvBudget, fault: Option<Fault>) -> Result<Sizing> {
    endless.release();
    let decls = endless.model().state();
    let weights = endless.report().resident;
    let slots = limits.batch as u64 + 1;
    let state = cache::state_bytes(&decls, StateScope::PerSequence, slots);
    // Sizes of what follows do not depend on the number of pages: one page is enough to run the corners on.
    endless.allocate(limits, 1, slots as usize)?;
    let inputs = endless.report().resident - weights - state - cache::state_bytes(&decls, StateScope::PerToken, 1);
    let (mut measured, mut arena, mut owners) = (Vec::new(), 0, Vec::new());
    let mut measure = |name, plan: &StepPlan, bound| -> Result<()> {
        endless.run(plan, fault, bound, None)?;
        let report = endless.report();
        measured.push((name, report.transient_peak));
        if report.transient_peak > arena {
            (arena, owners) = (report.transient_peak, report.owners);
        }
        Ok(())
    };
    for (name, plan) in corners(limits) {
        measure(name, &plan, None)?;
    }
    measure("every workspace at its upper bound", &bound_step(limits), Some(limits))?;
    endless.release();

    let pages = match kv {
        KvBudget::Tokens(tokens) => cache::pages_for(tokens),
        KvBudget::Fill => {
            let rest = slab.saturating_sub(weights + state + inputs + arena);
            // Padding is per tensor, so whole pages may fit a few more than this; the pool is filled to within one page.
            let page = cache::state_bytes(&decls, StateScope::PerToken, 1);
            let left = rest.checked_div(page).unwrap_or(u64::MAX);
            // More than every sequence at its full context is never used.
            let usable = limits.batch as u64 * cache::pages_for(limits.context as u64);
            left.clamp(1, usable)
        }
    };
    let kv = cache::state_bytes(&decls, StateScope::PerToken, pages);
    let kv_tokens = (pages - 1) * PAGE_TOKENS as u64;
    Ok(Sizing { slab, weights, kv, state, inputs, arena, pages, slots, kv_tokens, corners: measured, owners })
}

/// All rows, all sequences, prefill and decode kernels both, rows scored: as few prompts as can hold the rows that the
/// decodes leave.
fn bound_step(limits: Limits) -> StepPlan {
    let Limits { step_tokens, batch, context } = limits;
    let rows = step_tokens.min(batch.saturating_mul(context));
    let sequences = batch.min(rows);
    let decodes_at_most = if context > 1 { sequences - 1 } else { 0 };
    // p prompts hold the rows beside the other sequences' single ones when rows - (sequences - p) <= p * context.
    let prompts = (rows - sequences).div_ceil((context - 1).max(1)).max(sequences - decodes_at_most);
    let decodes = sequences - prompts;
    let (each, longer) = ((rows - decodes) / prompts, (rows - decodes) % prompts);
    let lengths: Vec<(usize, usize)> = (0..prompts).map(|i| (each + usize::from(i < longer), 0)).collect();
    step(limits, decodes, &lengths, true)
}

/// The nearest smaller setting that fits: a shorter chunk, else a smaller batch, else a smaller KV pool.
fn nearest(endless: &mut Runner, slab: u64, limits: Limits, kv: KvBudget) -> Result<Option<String>> {
    let mut fits = |limits: Limits, kv: KvBudget| -> Result<bool> {
        let sizing = divide(endless, slab, limits, kv, None)?;
        Ok(sizing.total() <= slab && sizing.kv_tokens >= minimum_kv_tokens(kv, limits))
    };
    let mut chunk = limits.step_tokens;
    while chunk > 1 {
        chunk = if chunk.is_power_of_two() { chunk / 2 } else { 1 << chunk.ilog2() };
        if fits(Limits { step_tokens: chunk, ..limits }, kv)? {
            return Ok(Some(format!("--chunk {chunk} fits")));
        }
    }
    let mut batch = limits.batch;
    while batch > 1 {
        batch = if batch.is_power_of_two() { batch / 2 } else { 1 << batch.ilog2() };
        if fits(Limits { batch, ..limits }, kv)? {
            return Ok(Some(format!("--batch {batch} fits")));
        }
    }
    if let KvBudget::Tokens(_) = kv {
        for limits in [limits, Limits { step_tokens: 1.max(limits.step_tokens.min(512)), batch: 1, ..limits }] {
            let filled = divide(endless, slab, limits, KvBudget::Fill, None)?;
            if filled.total() <= slab && filled.kv_tokens >= PAGE_TOKENS as u64 {
                return Ok(Some(format!(
                    "--kv-tokens {} fits at --chunk {} --batch {}",
                    filled.kv_tokens, limits.step_tokens, limits.batch
                )));
            }
        }
    }
    Ok(None)
}

/// Allocates and runs the same on the real slab, to name the first buffer that does not fit.
fn first_failure(
    spec: &DeviceSpec,
    slab: u64,
    source: &Source,
    numerics: Numerics,
    limits: Limits,
    sizing: &Sizing,
) -> Result<Option<OutOfMemory>> {
    let device: Arc<Device> = Device::plan(spec.clone(), slab);
    let run = || -> Result<()> {
        let mut runner = Runner::load(&device, source, numerics, &mut |_, _| {})?;
        runner.allocate(limits, sizing.pages as usize, sizing.slots as usize)?;
        for (_, plan) in corners(limits) {
            runner.run(&plan, None, None, None)?;
        }
        runner.run(&bound_step(limits), None, Some(limits), None)?;
        Ok(())
    };
    match run() {
        Err(Error::OutOfMemory(oom)) => Ok(Some(*oom)),
        Err(other) => Err(other),
        Ok(()) => Ok(None),
    }
}
