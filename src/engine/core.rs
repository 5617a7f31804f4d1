//! The engine: continuous batching of prefill pieces and decodes under a token budget, every step proven to fit before
//! its first launch.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::checkpoint::Source;
use crate::device::{Arch, Arm, Device, DeviceSpec};
use crate::engine::cache::Free;
use crate::engine::fault::Fault;
use crate::engine::request::{Finish, Logits, Record, Request, RequestId};
use crate::engine::runner::{PromptRows, Runner, SampledRow, StepPlan, StepResult};
use crate::engine::schedule::{self, Policy, View};
use crate::engine::sizing::{self, KvBudget, Sizing};
use crate::error::{Error, Result, mib};
use crate::mem::Report;
use crate::model::Probe;
use crate::num::philox;
use crate::ops::batch::{PAGE_TOKENS, Placement};
use crate::ops::cost::Metered;
use crate::ops::{Limits, Numerics, Span};

/// Proven step shapes kept before all are forgotten.
const REMEMBERED_SHAPES: usize = 4096;

/// What an engine is built with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// The types values are kept in.
    pub numerics: Numerics,
    /// Prompt rows of a step at most, over all sequences.
    pub chunk: usize,
    /// The largest step; raised to what a full chunk beside a full batch of decodes needs.
    pub limits: Limits,
    /// The KV pool.
    pub kv: KvBudget,
    /// Whether decodes go on beside prompts.
    pub policy: Policy,
    /// Seeds what primes a request's depth.
    pub seed: u64,
    /// Whether decode steps on a card run as captured graphs.
    pub graphs: bool,
    /// A known regression, if this engine is to have one.
    pub fault: Option<Fault>,
}

/// What one step did.
#[derive(Debug)]
pub struct StepOut {
    /// One entry per request that took part.
    pub records: Vec<Record>,
    /// Prompt rows computed.
    pub prefill_tokens: usize,
    /// Decode rows computed.
    pub decode_tokens: usize,
    /// Time from the first launch to the last result on the host; zero work on the plan device.
    pub elapsed: Duration,
    /// Sequences put back to wait because the KV pool ran out.
    pub preempted: usize,
    /// The pool after the step: resident, the step's peak and who held it.
    pub memory: Report,
    /// Costs by op.
    pub metered: Vec<Metered>,
}

/// A loaded model that serves requests.
#[derive(Debug)]
pub struct Engine {
    options: Options,
    sizing: Sizing,
    source: Source,
    runner: Runner,
    /// The same on the plan device, where each step runs first; `None` if the engine itself is on the plan device.
    twin: Option<Runner>,
    /// Steps that were seen to fit, and the bytes they were planned to take.
    proven: HashMap<Shape, Planned>,
    free: Free,
    next_id: u64,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
}

/// What decides a step's allocations.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Shape {
    decodes: usize,
    prompts: Vec<(usize, bool)>,
    samples: usize,
    scored: Vec<usize>,
    top: u32,
}

#[derive(Debug)]
struct Sequence {
    id: RequestId,
    request: Request,
    /// The prompt and what was generated.
    tokens: Vec<u32>,
    /// Generated tokens with their counts, for penalties; kept only where a penalty is set.
    counts: Vec<(u32, u32)>,
    /// Tokens in the cache, primed ones included.
    computed: usize,
    /// Log-probabilities already reported cover rows up to here.
    scored: usize,
    slot: Option<i32>,
    pages: Vec<i32>,
}

impl Sequence {
    fn known(&self) -> usize {
        self.request.depth + self.tokens.len()
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    fn view(&self) -> View {
        let (computed, known, depth) = (self.computed, self.known(), self.request.depth);
        View { computed, known, depth, decoding: self.generated() > 0 && known - computed == 1 && computed > 0 }
    }
}

/// A sequence's part of the step being built.
struct Part {
    index: usize,
    rows: usize,
    decode: bool,
}

impl Engine {
    /// Sizes the device's slab, loads the parameters and allocates the pools. `progress` is called with (bytes loaded,
    /// bytes in all).
    pub fn load(
        device: &Arc<Device>,
        source: Source,
        options: Options,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine> {
        let options = normal(options)?;
        let slab = device.report().slab;
        let sizing = sizing::size(device.spec(), slab, &source, options.numerics, options.limits, options.kv)?;
        within_host_memory(device, &sizing)?;
        let mut runner = Runner::load(device, &source, options.numerics, progress)?;
        runner.allocate(options.limits, sizing.pages as usize, sizing.slots as usize)?;
        runner.set_graphs(options.graphs);
        let twin = if device.has_data() { Some(twin(&runner, &source, options, &sizing)?) } else { None };
        let free = Free::new(sizing.pages as usize, sizing.slots as usize);
        Ok(Engine {
            options,
            sizing,
            source,
            runner,
            twin,
            proven: HashMap::new(),
            free,
            next_id: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
        })
    }

    /// Drops every request and divides the slab anew; the parameters stay. Where the new limits do not fit, the engine
    /// keeps its old pools and says why.
    pub fn resize(&mut self, options: Options) -> Result<()> {
        if options.numerics != self.options.numerics {
            return Err(Error::Unsupported {
                what: "other numerics on a loaded engine".into(),
                supported: "load the model again".into(),
            });
        }
        let options = normal(options)?;
        let (spec, slab) = (self.runner.device().spec(), self.sizing.slab);
        let sizing = sizing::size(spec, slab, &self.source, options.numerics, options.limits, options.kv)?;
        within_host_memory(self.runner.device(), &sizing)?;
        self.clear();
        for runner in [Some(&mut self.runner), self.twin.as_mut()].into_iter().flatten() {
            runner.allocate(options.limits, sizing.pages as usize, sizing.slots as usize)?;
        }
        self.free = Free::new(sizing.pages as usize, sizing.slots as usize);
        self.proven.clear();
        self.runner.set_graphs(options.graphs);
        self.options = options;
        self.sizing = sizing;
        Ok(())
    }

    /// Drops every request, and seeds this fault from the next step on; the parameters and pools stay.
    pub fn set_fault(&mut self, fault: Option<Fault>) {
        self.clear();
        if self.options.fault.and_then(Fault::in_step) != fault.and_then(Fault::in_step) {
            self.proven.clear();
        }
        self.options.fault = fault;
    }

    /// How the slab is divided.
    pub fn sizing(&self) -> &Sizing {
        &self.sizing
    }

    /// What the engine was built with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Whether each step's distinct experts are counted: see [`Runner::count_experts`].
    pub fn count_experts(&mut self, count: bool) {
        self.runner.count_experts(count);
    }

    /// The model and its device.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// Requests not finished yet.
    pub fn unfinished(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Takes a request, or says why it can never be served.
    pub fn submit(&mut self, mut request: Request) -> Result<RequestId> {
        let geometry = self.source.geometry();
        let bad = |param, what: String| Err(Error::Request { param, what });
        if request.prompt.is_empty() {
            return bad("prompt", "no tokens; at least one is needed".into());
        }
        if let Some((i, id)) = request.prompt.iter().enumerate().find(|(_, id)| **id as usize >= geometry.vocab) {
            return bad("prompt", format!("token {i} is {id}; ids go from 0 to {}", geometry.vocab - 1));
        }
        if request.max_tokens == 0 {
            return bad("max_tokens", "0 tokens; at least 1 is needed".into());
        }
        request.sampling.check(geometry.decodable)?;
        let context = self.options.limits.context;
        let held = request.depth.saturating_add(request.prompt.len());
        // The last token generated is never written to the cache.
        let (room, pool) = (context.saturating_sub(held), (self.sizing.kv_tokens as usize + 1).saturating_sub(held));
        if room.min(pool) == 0 {
            return bad(
                "prompt",
                format!(
                    "{} tokens after a depth of {} leave no room for one more: the context is {context} tokens, the KV \
                     pool holds {}",
                    request.prompt.len(),
                    request.depth,
                    self.sizing.kv_tokens
                ),
            );
        }
        request.max_tokens = request.max_tokens.min(room).min(pool);
        request.sampling.prompt_ids = distinct(&request.prompt, request.sampling.repetition_penalty != 1.0);
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Sequence {
            id,
            tokens: request.prompt.clone(),
            counts: Vec::new(),
            computed: 0,
            scored: 0,
            slot: None,
            pages: Vec::new(),
            request,
        });
        Ok(id)
    }

    /// Forgets a request; its pages and slot are free at once. False where there is none of that number.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if let Some(i) = self.running.iter().position(|s| s.id == id) {
            let sequence = self.running.remove(i);
            self.release(sequence);
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|s| s.id != id);
        self.waiting.len() < before
    }

    /// Forgets every request.
    pub fn clear(&mut self) {
        self.waiting.clear();
        for sequence in std::mem::take(&mut self.running) {
            self.release(sequence);
        }
    }

    fn release(&mut self, mut sequence: Sequence) {
        self.free.release(&mut sequence.pages, sequence.slot);
    }

    /// Runs one step. `None` where nothing waits. An error with an out-of-memory inside refused the step before its
    /// first launch and changed no request; any failure later fails that step's requests, in their records.
    pub fn step(&mut self) -> Result<Option<StepOut>> {
        self.step_probed(None)
    }

    /// As [`Engine::step`], showing each layer's residual rows to `probe`.
    pub fn step_probed(&mut self, probe: Option<Probe>) -> Result<Option<StepOut>> {
        let running = self.running.len();
        let (parts, preempted) = self.pick();
        if parts.is_empty() {
            return Ok(None);
        }
        let plan = self.build(&parts);
        let planned = match self.prove(&plan) {
            Ok(planned) => planned,
            Err(refused) => {
                self.readmit(running.saturating_sub(preempted));
                return Err(refused);
            }
        };
        let start = Instant::now();
        let ran = self
            .prime(running.saturating_sub(preempted))
            .and_then(|()| self.runner.run(&plan, self.options.fault.and_then(Fault::in_step), None, probe));
        if self.options.fault == Some(Fault::SlowKernel) {
            // A sleep is never shorter than the system's timer, which is more than 3 % of a short step.
            let end = start.elapsed().mul_f64(1.03);
            while start.elapsed() < end {
                std::hint::spin_loop();
            }
        }
        let elapsed = start.elapsed();
        let memory = self.runner.report();
        let ran = ran.and_then(|result| self.as_planned(planned, &memory).map(|()| result));
        let (records, metered) = match ran {
            Ok(mut result) => {
                let metered = std::mem::take(&mut result.metered);
                (self.commit(&parts, &plan, result), metered)
            }
            // The plan device launches nothing: what did not fit changed no request.
            Err(err) if self.twin.is_none() => {
                self.readmit(running.saturating_sub(preempted));
                return Err(err);
            }
            Err(err) => (self.fail(&parts, &err), Vec::new()),
        };
        let count = |decode: bool| parts.iter().filter(|p| p.decode == decode).map(|p| p.rows).sum();
        Ok(Some(StepOut {
            records,
            prefill_tokens: count(false),
            decode_tokens: count(true),
            elapsed,
            preempted,
            memory,
            metered,
        }))
    }

    /// An error where a step took other bytes than its plan: every fit and every gate rests on their being equal.
    fn as_planned(&self, planned: Option<Planned>, memory: &Report) -> Result<()> {
        let (Some(planned), taken) = (planned, Planned::of(memory)) else { return Ok(()) };
        // Guard bands, and what such a fault leaves behind, are bytes that no plan has.
        let unplanned = self.runner.device().is_guarded() || self.options.fault.is_some_and(Fault::outlives_its_step);
        if taken == planned || unplanned {
            return Ok(());
        }
        let owner = memory
            .owners
            .first()
            .map_or(String::new(), |(owner, bytes)| format!("; {owner} holds the most, {bytes} B"));
        let what = format!("took {taken}, and {planned} were planned{owner}");
        Err(Error::shape("step", what))
    }

    /// Chooses the step's sequences and gives them pages; admits and preempts as the pool allows.
    fn pick(&mut self) -> (Vec<Part>, usize) {
        let mut preempted = 0;
        loop {
            let newcomers = !self.waiting.is_empty() && self.running.len() < self.options.limits.batch;
            let prefilling = newcomers || self.running.iter().any(|s| !s.view().decoding);
            let mut parts = self.try_pick(self.options.policy == Policy::PrefillFirst && prefilling);
            if parts.is_empty() {
                // Prompts that wait for pages must not hold back the decodes that will free some.
                parts = self.try_pick(false);
            }
            if !parts.is_empty() || self.running.is_empty() {
                return (parts, preempted);
            }
            // Every running sequence waits for a page: the one admitted last gives its pages back and starts over.
            self.preempt();
            preempted += 1;
        }
    }

    /// Primes the depth of the sequences admitted by this step, those from `first` on.
    fn prime(&mut self, first: usize) -> Result<()> {
        for sequence in self.running.iter().skip(first).filter(|s| s.request.depth > 0) {
            self.runner.prime(&sequence.pages, sequence.slot.unwrap_or(-1), self.options.seed)?;
        }
        Ok(())
    }

    /// Takes back the admission of the sequences from `first` on: they wait again, in the same order.
    fn readmit(&mut self, first: usize) {
        while self.running.len() > first {
            self.preempt();
        }
    }

    /// Puts the sequence admitted last back to wait. Its tokens are computed again when its turn comes, generated ones
    /// too, in pieces as a prompt's: equal but for rounding.
    fn preempt(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            self.free.release(&mut sequence.pages, sequence.slot.take());
            sequence.computed = 0;
            self.waiting.push_front(sequence);
        }
    }

    fn try_pick(&mut self, hold: bool) -> Vec<Part> {
        let Limits { step_tokens, batch, .. } = self.options.limits;
        let views: Vec<View> = self.running.iter().map(Sequence::view).collect();
        let mut parts = Vec::new();
        let (mut left, mut starved) = (step_tokens, false);
        let mut chunk = self.options.chunk;
        for (index, rows) in schedule::schedule(&views, step_tokens, chunk, hold) {
            let sequence = &mut self.running[index];
            if self.free.grow(&mut sequence.pages, sequence.computed + rows) {
                parts.push(Part { index, rows, decode: views[index].decoding });
                left -= rows;
                chunk -= if views[index].decoding { 0 } else { rows };
            } else {
                starved = true;
            }
        }
        // A newcomer must not take the pages that a running sequence waits for, or that its prompt still needs.
        left = left.min(chunk);
        let mut promised: usize =
            self.running.iter().map(|s| Engine::pages_of_prompt(s).saturating_sub(s.pages.len())).sum();
        while left > 0 && !starved && self.running.len() < batch && self.free.slots() > 0 {
            let Some(sequence) = self.waiting.front() else { break };
            let view = View { computed: sequence.request.depth, decoding: false, ..sequence.view() };
            let rows = schedule::piece(view, left, self.options.chunk);
            let pages = Engine::pages_of_prompt(sequence);
            if rows == 0 || promised + pages > self.free.pages() {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            sequence.slot = self.free.take_slot();
            sequence.computed = sequence.request.depth;
            self.free.grow(&mut sequence.pages, sequence.computed + rows);
            promised += pages - sequence.pages.len();
            left -= rows;
            parts.push(Part { index: self.running.len(), rows, decode: false });
            self.running.push(sequence);
        }
        parts.sort_by_key(|p| !p.decode);
        parts
    }

    /// Pages that hold what is known of a sequence and, where it generates more than one token, the first of them.
    fn pages_of_prompt(sequence: &Sequence) -> usize {
        let Request { depth, prompt, max_tokens, .. } = &sequence.request;
        // The last token generated is never written to the cache.
        let at_most = depth + prompt.len() + max_tokens - 1;
        (sequence.known() + 1).min(at_most).div_ceil(PAGE_TOKENS)
    }

    fn build(&self, parts: &[Part]) -> StepPlan {
        let mut plan = StepPlan::default();
        for part in parts {
            let sequence = &self.running[part.index];
            let (start, context, depth) = (plan.tokens.len(), sequence.computed, sequence.request.depth);
            let end = context + part.rows;
            plan.decodes += usize::from(part.decode);
            plan.spans.push(Span { start, len: part.rows, context });
            let slot = sequence.slot.unwrap_or(-1);
            plan.places.push(Placement { slot_in: slot, slot_out: slot, pages: sequence.pages.clone() });
            plan.tokens.extend(sequence.tokens[context - depth..end - depth].iter().map(|&id| id as i32));
            if end == sequence.known() {
                let mut params = sequence.request.sampling.clone();
                params.step = sequence.generated() as u64;
                params.output_counts.clone_from(&sequence.counts);
                let logits = sequence.request.logits == Logits::Sampled;
                plan.samples.push(SampledRow { row: (start + part.rows) as i32 - 1, params, logits });
            }
            if sequence.request.scores() {
                // Row j of the prompt predicts token j + 1; the last row predicts what is sampled. A sequence computed
                // again after a preemption reports no row twice.
                let logits = sequence.request.logits == Logits::Prompt;
                let last = sequence.request.prompt.len() - usize::from(!logits);
                let (from, to) = ((context - depth).max(sequence.scored), (end - depth).min(last));
                if from < to {
                    let target = |j: usize| sequence.tokens.get(j + 1).copied().unwrap_or(0) as i32;
                    plan.prompts.push(PromptRows {
                        first: start + from - (context - depth),
                        targets: (from..to).map(target).collect(),
                        logits,
                    });
                }
            }
        }
        if plan.decodes == plan.spans.len() && self.runner.device().spec().arch != Arch::Host {
            plan.pad(schedule::bucket(plan.decodes, self.options.limits.batch));
        }
        plan
    }

    /// Runs the step on the plan twin: an error means it does not fit, and nothing has been launched. The bytes it is to take.
    fn prove(&mut self, plan: &StepPlan) -> Result<Option<Planned>> {
        let Some(twin) = &mut self.twin else { return Ok(None) };
        let shape = Shape {
            decodes: plan.decodes,
            prompts: plan.spans[plan.decodes..].iter().map(|s| (s.len, s.context == 0)).collect(),
            samples: plan.samples.len(),
            scored: plan.prompts.iter().map(|p| p.targets.len()).collect(),
            top: plan.samples.iter().map(|s| s.params.logprobs).max().unwrap_or(0),
        };
        // The sampler's lists have any length; steps without them are told apart by their shape.
        let listed = plan.samples.iter().any(|s| s.params.edits() > 0);
        if let Some(planned) = self.proven.get(&shape).filter(|_| !listed) {
            return Ok(Some(*planned));
        }
        twin.run(plan, self.options.fault, None, None)?;
        let planned = Planned::of(&twin.report());
        if !listed {
            if self.proven.len() >= REMEMBERED_SHAPES {
                self.proven.clear();
            }
            self.proven.insert(shape, planned);
        }
        Ok(Some(planned))
    }

    fn commit(&mut self, parts: &[Part], plan: &StepPlan, result: StepResult) -> Vec<Record> {
        let eos = self.source.geometry().eos.clone();
        let mut sampled = result.tokens.into_iter();
        let mut sampled_logits = result.logits.into_iter();
        let mut scored = result.prompts.into_iter();
        let mut records = Vec::with_capacity(parts.len());
        let mut scored_rows = plan.prompts.iter().peekable();
        for (part, span) in parts.iter().zip(&plan.spans) {
            let sequence = &mut self.running[part.index];
            sequence.computed += part.rows;
            let mut record = Record {
                request: sequence.id,
                prefilled: if part.decode { 0 } else { part.rows },
                prompt_logprobs: Vec::new(),
                logits: Vec::new(),
                token: None,
                finish: None,
            };
            if let Some(rows) = scored_rows.next_if(|p| (span.start..span.start + span.len).contains(&p.first))
                && let Some(scored) = scored.next()
            {
                sequence.scored += rows.targets.len();
                record.prompt_logprobs = scored.logprobs;
                record.logits = scored.logits;
                if !scored.finite {
                    record.finish = Some(Finish::Failed(Error::NotFinite { request: sequence.id.0 }.to_string()));
                }
            }
            if sequence.computed == sequence.known() {
                if sequence.request.logits == Logits::Sampled {
                    record.logits = sampled_logits.next().unwrap_or_default();
                }
                match sampled.next().flatten() {
                    Some(choice) => {
                        let generated = sequence.generated() as u32;
                        let vocabulary = self.source.geometry().decodable;
                        let fed = sequence.request.feed.map(|seed| fed(seed, generated, vocabulary));
                        sequence.tokens.push(fed.unwrap_or(choice.id));
                        if sequence.request.sampling.penalises() {
                            count(&mut sequence.counts, choice.id);
                        }
                        let stops = sequence.request.stop.contains(&choice.id)
                            || (!sequence.request.ignore_eos && eos.contains(&choice.id));
                        if stops {
                            record.finish = record.finish.or(Some(Finish::Stop));
                        } else if sequence.generated() >= sequence.request.max_tokens {
                            record.finish = record.finish.or(Some(Finish::Length));
                        }
                        record.token = Some(choice);
                    }
                    None => {
                        record.finish = Some(Finish::Failed(Error::NotFinite { request: sequence.id.0 }.to_string()));
                    }
                }
            }
            records.push(record);
        }
        self.retire(&records);
        records
    }

    /// Fails every request of a step that broke after its first launch.
    fn fail(&mut self, parts: &[Part], err: &Error) -> Vec<Record> {
        let records: Vec<Record> = parts
            .iter()
            .map(|part| Record {
                request: self.running[part.index].id,
                prefilled: 0,
                prompt_logprobs: Vec::new(),
                logits: Vec::new(),
                token: None,
                finish: Some(Finish::Failed(err.to_string())),
            })
            .collect();
        self.retire(&records);
        records
    }

    fn retire(&mut self, records: &[Record]) {
        for record in records.iter().filter(|r| r.finish.is_some()) {
            self.cancel(record.request);
        }
    }
}

/// Checks the chunk, and makes steps large enough that decodes never take a prompt's rows.
fn normal(mut options: Options) -> Result<Options> {
    if options.chunk == 0 {
        return Err(Error::Request { param: "--chunk", what: "0 tokens; at least 1 is needed".into() });
    }
    let (chunk, batch) = (options.chunk, options.limits.batch);
    let needed = match options.policy {
        Policy::Mixed => chunk.saturating_add(batch),
        Policy::PrefillFirst => chunk.max(batch),
    };
    options.limits.step_tokens = options.limits.step_tokens.max(needed);
    Ok(options)
}

/// The cpu slab is reserved lazily, so a card larger than this machine can stand on it; what will be written must fit.
fn within_host_memory(device: &Device, sizing: &Sizing) -> Result<()> {
    let Arm::Cpu(_) = device.arm() else { return Ok(()) };
    let (needed, has) = (sizing.total(), DeviceSpec::host().total_bytes);
    if needed <= has {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{needed} B ({}) on the cpu device of a machine with {has} B ({})", mib(needed), mib(has)),
        supported: "--device plan needs no memory for values".into(),
    })
}

/// What a step takes of the slab, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Planned {
    resident: u64,
    transient: u64,
}

impl Planned {
    fn of(report: &Report) -> Planned {
        Planned { resident: report.resident, transient: report.transient_peak }
    }
}

impl std::fmt::Display for Planned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} B resident and {} B in passing", self.resident, self.transient)
    }
}

fn twin(runner: &Runner, source: &Source, options: Options, sizing: &Sizing) -> Result<Runner> {
    let device = Device::plan(runner.device().spec().clone(), sizing.slab);
    let mut twin = Runner::load(&device, source, options.numerics, &mut |_, _| {})?;
    twin.allocate(options.limits, sizing.pages as usize, sizing.slots as usize)?;
    Ok(twin)
}

/// The random id fed back as a sequence's token `index`.
fn fed(seed: u64, index: u32, vocabulary: usize) -> u32 {
    let key = philox::stream_key(seed, "feed");
    ((u64::from(philox::philox4x32(key, [index, 0, 0, 0])[0]) * vocabulary as u64) >> 32) as u32
}

/// The distinct ids of a prompt in ascending order, where anything looks at them.
fn distinct(prompt: &[u32], wanted: bool) -> Vec<u32> {
    if !wanted {
        return Vec::new();
    }
    let mut ids = prompt.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Counts one more of `id` in a list kept in ascending order of ids.
fn count(counts: &mut Vec<(u32, u32)>, id: u32) {
    match counts.binary_search_by_key(&id, |(id, _)| *id) {
        Ok(i) => counts[i].1 += 1,
        Err(i) => counts.insert(i, (id, 1)),
    }
}
