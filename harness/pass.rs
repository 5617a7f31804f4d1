//! One pass over a cell's script: requests given to the engine when they come, every step counted.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher as _;
use std::time::Duration;

use highwater::device::Rates;
use highwater::engine::{Engine, Finish, Request, RequestId, StepOut};
use highwater::error::{Error, Result};
use highwater::mem::Report;
use highwater::num::fnv::Fnv1a;
use highwater::num::philox;
use highwater::ops::cost::step_floor_seconds;

use crate::measure::Times;
use crate::owners::Phases;
use crate::stats::Summary;
use crate::workload::{Planned, Script, When};

/// What runs a script once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Course<'a> {
    /// The requests.
    pub(crate) script: &'a Script,
    /// Tokens of each sequence that are primed, not prefilled.
    pub(crate) depth: u64,
    /// Seeds prompts, and what decode is fed.
    pub(crate) seed: u64,
    /// The card's, for floors.
    pub(crate) rates: &'a Rates,
    /// Whether the engine's device takes time; if not, arrivals are counted against the floors.
    pub(crate) timed: bool,
}

/// One pass's numbers.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    /// Wall time of the steps that held prompt tokens of the timed prefill.
    pub(crate) prefill: Duration,
    /// The least seconds those steps can take.
    pub(crate) prefill_floor: f64,
    /// Steps with prompt tokens.
    pub(crate) prefill_steps: u64,
    /// Steps without.
    pub(crate) decode_steps: u64,
    /// Sequences put back to wait.
    pub(crate) preempted: u64,
    /// Times of full decode steps.
    pub(crate) decode_ms: Vec<f64>,
    /// The least ms each can take.
    pub(crate) decode_floors: Vec<f64>,
    /// Times from a request's submission to its first token.
    pub(crate) first_token_ms: Vec<f64>,
    /// Gaps between tokens of a sequence while another's prompt was computed.
    pub(crate) stalled_ms: Vec<f64>,
    /// Gaps while none was.
    pub(crate) steady_ms: Vec<f64>,
    /// The largest transient peak of steps with prompt tokens, in bytes.
    pub(crate) prefill_peak: u64,
    /// The same of steps without.
    pub(crate) decode_peak: u64,
    /// The pool after the largest step of either phase.
    pub(crate) phases: Phases,
    /// The pool after the largest step of each stage.
    pub(crate) stages: Vec<Option<Report>>,
    /// Who still holds bytes of the arena after the last step, where nobody should.
    pub(crate) left: Vec<(String, u64)>,
    /// The step each request came before.
    pub(crate) came_at: Vec<u64>,
    /// The tokens sampled for each request, in the order requests came.
    tokens: BTreeMap<RequestId, Vec<u32>>,
}

/// A request in the engine.
struct Running {
    /// Its place in the script.
    at: usize,
    came: Duration,
    /// Its last token's ms and step.
    last: Option<(f64, u64)>,
}

/// What is being run.
#[derive(Default)]
struct Live {
    clock: Duration,
    step: u64,
    decoded: u64,
    requests: HashMap<RequestId, Running>,
    /// The last two requests whose prompts were computed, and the step.
    prompts: [Option<(RequestId, u64)>; 2],
    stage: usize,
}

/// Runs the script from an engine without requests.
pub(crate) fn run(engine: &mut Engine, course: &Course) -> Result<Pass> {
    engine.clear();
    let script = course.script;
    let mut pass = Pass { stages: vec![None; script.stages.len().max(1)], ..Pass::default() };
    let mut live = Live::default();
    let mut next = 0;
    loop {
        while let Some(planned) = script.requests.get(next).filter(|planned| due(planned, &live)) {
            submit(engine, course, planned, next, &mut live, &mut pass)?;
            next += 1;
        }
        if let Some(step) = engine.step()? {
            let floor = step_floor_seconds(&step.metered, course.rates);
            live.clock += if course.timed { step.elapsed } else { Duration::from_secs_f64(floor) };
            pass.count(&step, script, floor, &mut live)?;
            live.step += 1;
            continue;
        }
        // Nothing to do until the next request comes: time is not spent waiting for it.
        let Some(planned) = script.requests.get(next) else { break };
        match planned.when {
            When::Step(step) => live.step = live.step.max(step),
            When::Ms(ms) => live.clock = live.clock.max(Duration::from_secs_f64(ms / 1e3)),
            When::Idle | When::Decoded(_) => {}
        }
        submit(engine, course, planned, next, &mut live, &mut pass)?;
        next += 1;
    }
    let left = engine.runner().device().arena_owners();
    pass.left = left.into_iter().map(|(owner, bytes)| (owner.to_string(), bytes)).collect();
    Ok(pass)
}

/// Whether a request has come. The engine being idle is not seen here: the loop submits then, whatever is next.
fn due(planned: &Planned, live: &Live) -> bool {
    match planned.when {
        When::Step(step) => step <= live.step,
        When::Ms(ms) => ms <= live.clock.as_secs_f64() * 1e3,
        When::Decoded(steps) => steps <= live.decoded,
        When::Idle => false,
    }
}

fn submit(
    engine: &mut Engine,
    course: &Course,
    planned: &Planned,
    at: usize,
    live: &mut Live,
    pass: &mut Pass,
) -> Result<()> {
    let decodable = engine.runner().model().geometry().decodable;
    let prompt = ids(course.seed, at as u64, planned.prompt, decodable);
    let feed = Some(course.seed ^ (at as u64 + 1));
    let request = Request { depth: course.depth as usize, feed, ..Request::greedy(prompt, planned.output as usize) };
    let id = engine.submit(request)?;
    live.requests.insert(id, Running { at, came: live.clock, last: None });
    live.stage = planned.stage;
    pass.came_at.push(live.step);
    pass.tokens.insert(id, Vec::new());
    Ok(())
}

/// The prompt of request `i`: seeded ids below `decodable`, different for each request.
fn ids(seed: u64, i: u64, tokens: u64, decodable: usize) -> Vec<u32> {
    let key = philox::stream_key(seed, &format!("prompt.{i}"));
    (0..tokens as u32)
        .map(|at| ((u64::from(philox::philox4x32(key, [at, 0, 0, 0])[0]) * decodable as u64) >> 32) as u32)
        .collect()
}

impl Pass {
    fn count(&mut self, step: &StepOut, script: &Script, floor: f64, live: &mut Live) -> Result<()> {
        self.preempted += step.preempted as u64;
        let ms = step.elapsed.as_secs_f64() * 1e3;
        for record in step.records.iter().filter(|record| record.prefilled > 0) {
            match &mut live.prompts {
                [Some((id, at)), _] if *id == record.request => *at = live.step,
                [latest, before] => {
                    *before = *latest;
                    *latest = Some((record.request, live.step));
                }
            }
        }
        self.phases.see(step.prefill_tokens > 0, &step.memory);
        if step.prefill_tokens > 0 {
            self.prefill_steps += 1;
            self.prefill_peak = self.prefill_peak.max(step.memory.transient_peak);
            let timed = |id| live.requests.get(id).is_some_and(|running| script.requests[running.at].timed);
            if step.records.iter().any(|record| record.prefilled > 0 && timed(&record.request)) {
                self.prefill += step.elapsed;
                self.prefill_floor += floor;
            }
        } else {
            self.decode_steps += 1;
            self.decode_peak = self.decode_peak.max(step.memory.transient_peak);
            if script.full.is_none_or(|rows| step.decode_tokens as u64 == rows) {
                live.decoded += 1;
                self.decode_ms.push(ms);
                self.decode_floors.push(floor * 1e3);
            }
        }
        let peak = &mut self.stages[live.stage];
        if peak.as_ref().is_none_or(|peak| step.memory.transient_peak > peak.transient_peak) {
            *peak = Some(step.memory.clone());
        }
        for record in &step.records {
            if let Some(Finish::Failed(why)) = &record.finish {
                return Err(Error::Request { param: "cell", what: why.clone() });
            }
            if let Some(token) = &record.token {
                self.tokens.entry(record.request).or_default().push(token.id);
                self.token(record.request, script, live);
            }
            if record.finish.is_some() {
                live.requests.remove(&record.request);
            }
        }
        Ok(())
    }

    /// Counts a token of `id`, which the present step sampled.
    fn token(&mut self, id: RequestId, script: &Script, live: &mut Live) {
        let now_ms = live.clock.as_secs_f64() * 1e3;
        let Some(Running { at, came, last }) = live.requests.get_mut(&id) else { return };
        match last.replace((now_ms, live.step)) {
            None if script.requests[*at].timed => self.first_token_ms.push(now_ms - came.as_secs_f64() * 1e3),
            Some((then_ms, then)) if script.mixes() => {
                let stalled = live.prompts.iter().flatten().any(|(other, at)| *other != id && *at > then);
                let gaps = if stalled { &mut self.stalled_ms } else { &mut self.steady_ms };
                gaps.push(now_ms - then_ms);
            }
            None | Some(_) => {}
        }
    }

    /// Its prefill, and the median of its decode steps.
    pub(crate) fn times(&self) -> Times {
        Times {
            prefill_ms: (!self.prefill.is_zero()).then_some(self.prefill.as_secs_f64() * 1e3),
            tpot_ms: Summary::of(&self.decode_ms).map(|steps| steps.median),
        }
    }

    /// The largest step of all.
    pub(crate) fn peak(&self) -> Option<&Report> {
        // The first of equals, as the pool itself keeps it.
        self.stages.iter().flatten().reduce(|a, b| if b.transient_peak > a.transient_peak { b } else { a })
    }

    /// FNV-1a of the tokens sampled, each request's in the order requests came.
    pub(crate) fn output_hash(&self) -> String {
        let mut hash = Fnv1a::default();
        for tokens in self.tokens.values() {
            hash.write(&(tokens.len() as u64).to_le_bytes());
            for token in tokens {
                hash.write(&token.to_le_bytes());
            }
        }
        format!("fnv1a64:{:016x}", hash.finish())
    }
}

/// Distinct experts of each MoE layer in the first full decode steps of one more pass, which is not timed.
pub(crate) fn count_experts(engine: &mut Engine, course: &Course) -> Result<Vec<usize>> {
    /// Decode steps that are looked at.
    const STEPS: usize = 4;
    engine.count_experts(true);
    let counted = (|| {
        engine.clear();
        let (mut live, mut pass) = (Live::default(), Pass::default());
        // Those that come with the first request decode together with it.
        for (at, planned) in course.script.requests.iter().enumerate() {
            if at > 0 && !due(planned, &live) {
                break;
            }
            submit(engine, course, planned, at, &mut live, &mut pass)?;
        }
        let (mut counts, mut seen) = (Vec::new(), 0);
        while let Some(step) = engine.step()?.filter(|_| seen < STEPS) {
            let of_step = engine.runner().take_experts();
            if step.prefill_tokens == 0 && course.script.full.is_none_or(|rows| step.decode_tokens as u64 == rows) {
                counts.extend(of_step);
                seen += 1;
            }
        }
        engine.clear();
        Ok(counts)
    })();
    engine.count_experts(false);
    counted
}
