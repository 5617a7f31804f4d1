//! What the sequences of a cell do: which requests come when, how long they are, and what the engine must hold for them.
//!
//! A workload and a cell make a [`Script`], which `pass` runs. Nothing runs here.
//!
//! - `fixed`: equal prompts, all at once; phases apart, so that prefill and decode are timed alone.
//! - `ladder`: prompts of very different lengths one after another on one engine, the first two lengths again at the end: an
//!   engine that leaks or fragments takes more for them the second time.
//! - `many-short`: prompts of fewer than 64 tokens, as long as lets all of them into one step: the recurrence works in
//!   chunks of 64 tokens, so its buffers grow with the number of sequences.
//! - `concurrent-prefill`: prompts that share one step, each as long as that allows, and one token each: prefill alone.
//! - `mixed`: prompts that arrive while the batch decodes, served in the same steps as the decodes.
//! - `trace:FILE`: requests of a file (`trace`), served as they arrive.

use std::hash::{Hash, Hasher};

use anyhow::{Context, Result, ensure};
use highwater::engine::Policy;
use highwater::error::Error;
use highwater::ops::batch::PAGE_TOKENS;

use crate::axis::Cell;
use crate::measure::Rules;
use crate::trace::{Arrival, Trace};

/// Prompts of a ladder before `--ladder-scale` divides them: the lengths at which engines were seen to pass a probe at
/// the largest shape and to die on a repeat.
const LADDER_TOKENS: [u64; 6] = [2048, 6144, 12_288, 24_576, 2048, 12_288];
/// A short prompt has fewer tokens than the recurrence's chunk.
const SHORT_TOKENS: u64 = 63;
/// Prompt of the sequences that decode while others arrive.
const STEADY_PROMPT_TOKENS: u64 = 16;
/// Prompts that arrive while they decode.
const INJECTED: u64 = 3;
/// The fewest decode steps between two of those.
const BETWEEN_STEPS: u64 = 2;

/// What a cell's sequences do.
#[derive(Clone, Copy, PartialEq, Default)]
pub(crate) enum Kind {
    /// Equal prompts at once.
    #[default]
    Fixed,
    /// A ladder of prompts, one after another.
    Ladder,
    /// Prompts of fewer than 64 tokens.
    ManyShort,
    /// Prompts in one step.
    ConcurrentPrefill,
    /// Prompts into running decode.
    Mixed,
    /// The requests of a file, which lives as long as the process, as the command line that named it does.
    Trace(&'static Trace),
}

// By its name, which holds a hash of a trace's content: cells are told apart by this.
impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

// Arrivals are finite: a trace is equal to itself.
impl Eq for Kind {}

impl Hash for Kind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl Kind {
    /// Every name `--workload` takes; of traces the prefix.
    pub(crate) const NAMES: [&str; 6] = ["fixed", "ladder", "many-short", "concurrent-prefill", "mixed", "trace:FILE"];

    /// The workload of that name; reads the file of a trace.
    pub(crate) fn parse(name: &str) -> Result<Kind> {
        Ok(match name {
            "fixed" => Kind::Fixed,
            "ladder" => Kind::Ladder,
            "many-short" => Kind::ManyShort,
            "concurrent-prefill" => Kind::ConcurrentPrefill,
            "mixed" => Kind::Mixed,
            _ => {
                let file = name.strip_prefix("trace:").filter(|file| !file.is_empty());
                let file = file.with_context(|| {
                    format!("there is no workload `{name}`; the workloads are {}", Kind::NAMES.join(", "))
                })?;
                Kind::Trace(Box::leak(Box::new(Trace::read(file.as_ref())?)))
            }
        })
    }

    /// What rows call it.
    pub(crate) fn name(&self) -> &str {
        match self {
            Kind::Fixed => "fixed",
            Kind::Ladder => "ladder",
            Kind::ManyShort => "many-short",
            Kind::ConcurrentPrefill => "concurrent-prefill",
            Kind::Mixed => "mixed",
            Kind::Trace(trace) => &trace.label,
        }
    }
}

/// What every cell of a sweep shares.
#[derive(Debug, Clone, Default)]
pub(crate) struct Workload {
    /// Prompt tokens after the depth; what the workload makes of the cell if `None`.
    pub(crate) prompt: Option<u64>,
    /// Tokens each sequence generates.
    pub(crate) output: u64,
    /// Tokens of the KV pool; what the cell needs if `None`.
    pub(crate) kv_tokens: Option<u64>,
    /// Tokens a sequence may hold; what the cell needs if `None`.
    pub(crate) context: Option<u64>,
    /// What a ladder's prompts are divided by; 0 and 1 leave them.
    pub(crate) ladder_scale: u64,
    /// When repetitions end.
    pub(crate) rules: Rules,
}

/// When a request is given to the engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum When {
    /// Before the step of this number, counted from 0.
    Step(u64),
    /// This many ms after the start.
    Ms(f64),
    /// Once nothing is left to do.
    Idle,
    /// Once the sequences before it have decoded this many steps without prompts.
    Decoded(u64),
}

/// A request of a script.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Planned {
    /// When it comes.
    pub(crate) when: When,
    /// Its prompt's tokens.
    pub(crate) prompt: u64,
    /// Tokens it generates.
    pub(crate) output: u64,
    /// The stage it is of.
    pub(crate) stage: usize,
    /// Whether its prompt is part of the prefill that is timed; one that only sets the scene is not.
    pub(crate) timed: bool,
}

/// The requests of a cell in the order they come, and what an engine needs for them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Script {
    /// The requests.
    pub(crate) requests: Vec<Planned>,
    /// Names of the stages, where there are several.
    pub(crate) stages: Vec<String>,
    /// Whether decodes go on beside prompts.
    pub(crate) policy: Policy,
    /// Sequences that may run together.
    pub(crate) together: u64,
    /// Rows of a full decode step, which TPOT is of; any number where none.
    pub(crate) full: Option<u64>,
    /// The most tokens a sequence holds: depth, prompt and output.
    pub(crate) context: u64,
    /// (sequences, tokens held at most by each) of all that must be in the cache at once.
    pub(crate) held: Vec<(u64, u64)>,
    /// Prompt and output of every request, where all are the same.
    pub(crate) uniform: (Option<u64>, Option<u64>),
}

impl Script {
    /// The script of a cell. A request error is a workload that the cell or the flags make impossible.
    pub(crate) fn of(workload: &Workload, cell: &Cell) -> Result<Script, Error> {
        let (chunk, batch) = (cell.chunk, cell.batch);
        let output = workload.output.max(1);
        let share = (chunk / batch.max(1)).max(1);
        match cell.workload {
            Kind::Fixed => Ok(Script::at_once(cell, workload.prompt.unwrap_or(chunk), output)),
            Kind::ManyShort => {
                let prompt = workload.prompt.unwrap_or(share.min(SHORT_TOKENS));
                if prompt > SHORT_TOKENS {
                    let what = format!("{prompt} tokens; many-short takes prompts of up to {SHORT_TOKENS}");
                    return Err(Error::Request { param: "--prompt", what });
                }
                Ok(Script::at_once(cell, prompt, output))
            }
            Kind::ConcurrentPrefill => Ok(Script::at_once(cell, workload.prompt.unwrap_or(share), 1)),
            Kind::Ladder => Ok(Script::ladder(workload, cell, output)),
            Kind::Mixed => Script::mixed(workload, cell, output),
            Kind::Trace(trace) => Ok(Script::trace(trace, cell)),
        }
    }

    fn at_once(cell: &Cell, prompt: u64, output: u64) -> Script {
        let request = Planned { when: When::Step(0), prompt, output, stage: 0, timed: true };
        let context = cell.depth.saturating_add(prompt).saturating_add(output);
        Script {
            requests: vec![request; cell.batch as usize],
            stages: Vec::new(),
            policy: Policy::PrefillFirst,
            together: cell.batch,
            full: Some(cell.batch),
            context,
            held: vec![(cell.batch, context.saturating_sub(1))],
            uniform: (Some(prompt), Some(output)),
        }
    }

    fn ladder(workload: &Workload, cell: &Cell, output: u64) -> Script {
        let prompts = LADDER_TOKENS.map(|tokens| (tokens / workload.ladder_scale.max(1)).max(1));
        let mut requests = Vec::new();
        for (stage, prompt) in prompts.into_iter().enumerate() {
            let first = Planned { when: When::Idle, prompt, output, stage, timed: true };
            requests.push(first);
            // The rest of the stage comes with it.
            requests.extend((1..cell.batch).map(|_| Planned { when: When::Step(0), ..first }));
        }
        let longest = prompts.into_iter().max().unwrap_or(1);
        let context = cell.depth.saturating_add(longest).saturating_add(output);
        Script {
            requests,
            stages: prompts.map(|prompt| format!("prompt {prompt}")).to_vec(),
            policy: Policy::PrefillFirst,
            together: cell.batch,
            full: Some(cell.batch),
            context,
            held: vec![(cell.batch, context.saturating_sub(1))],
            uniform: (None, Some(output)),
        }
    }

    fn mixed(workload: &Workload, cell: &Cell, output: u64) -> Result<Script, Error> {
        let prompt = workload.prompt.unwrap_or(cell.chunk);
        // The last prompt is served while the batch still decodes, and steady steps follow it.
        let between = (output - 1) / (INJECTED + 1);
        if between < BETWEEN_STEPS {
            let least = BETWEEN_STEPS * (INJECTED + 1) + 1;
            let what = format!(
                "{output} tokens; mixed needs at least {least}, to decode before, between and after {INJECTED} prompts"
            );
            return Err(Error::Request { param: "--output", what });
        }
        // Decodes go on beside pieces of prompts, their own batch's first; every sequence must outlast them.
        let lasting = output.saturating_add(steps_of(prompt, cell.chunk).saturating_mul(INJECTED)).saturating_add(
            match cell.chunk / STEADY_PROMPT_TOKENS {
                0 => cell.batch.saturating_mul(steps_of(STEADY_PROMPT_TOKENS, cell.chunk)),
                a_step => cell.batch.div_ceil(a_step),
            },
        );
        let steady =
            Planned { when: When::Step(0), prompt: STEADY_PROMPT_TOKENS, output: lasting, stage: 0, timed: false };
        let mut requests = vec![steady; cell.batch as usize];
        for i in 1..=INJECTED {
            let when = When::Decoded(i * between);
            requests.push(Planned { when, prompt, output: 1, stage: 0, timed: true });
        }
        let of = |prompt: u64, output: u64| cell.depth.saturating_add(prompt).saturating_add(output);
        let (steady, injected) = (of(STEADY_PROMPT_TOKENS, lasting), of(prompt, 1));
        Ok(Script {
            requests,
            stages: Vec::new(),
            policy: Policy::Mixed,
            together: cell.batch + 1,
            full: Some(cell.batch),
            context: steady.max(injected),
            held: vec![(cell.batch, steady - 1), (1, injected - 1)],
            uniform: (Some(prompt), Some(output)),
        })
    }

    fn trace(trace: &Trace, cell: &Cell) -> Script {
        let requests = trace.requests.iter().map(|request| Planned {
            when: match request.arrival {
                Arrival::Ms(ms) => When::Ms(ms),
                Arrival::Step(step) => When::Step(step),
            },
            prompt: request.prompt,
            output: request.output,
            stage: 0,
            timed: true,
        });
        let context = cell.depth.saturating_add(trace.longest());
        Script {
            requests: requests.collect(),
            stages: Vec::new(),
            policy: Policy::Mixed,
            together: cell.batch,
            full: None,
            context,
            // Requests wait for pages, as they do where they are served.
            held: vec![(1, context.saturating_sub(1))],
            uniform: (None, None),
        }
    }

    /// The same requests, each at the step it came before in an earlier run: repetitions then compute the same thing,
    /// whatever the clock says.
    pub(crate) fn at_steps(&self, steps: &[u64]) -> Script {
        let at = |(request, step): (&Planned, &u64)| Planned { when: When::Step(*step), ..*request };
        Script { requests: self.requests.iter().zip(steps).map(at).collect(), ..self.clone() }
    }

    /// Whether arrivals depend on the clock.
    pub(crate) fn by_clock(&self) -> bool {
        self.requests.iter().any(|request| matches!(request.when, When::Ms(_)))
    }

    /// Whether decodes run beside prompts, so that gaps between tokens are worth telling apart.
    pub(crate) fn mixes(&self) -> bool {
        self.policy == Policy::Mixed
    }

    /// Prompt tokens of the prefill that is timed.
    pub(crate) fn timed_prompt_tokens(&self) -> u64 {
        self.requests.iter().filter(|r| r.timed).map(|r| r.prompt).sum()
    }

    /// Tokens of a KV pool in which nothing waits: what must be held at once, and for a trace every sequence that may run
    /// at its longest.
    pub(crate) fn kv_tokens(&self) -> u64 {
        const PAGE: u64 = PAGE_TOKENS as u64;
        let pages = |tokens: u64| tokens.div_ceil(PAGE).max(1);
        let held: u64 = match self.full {
            Some(_) => self.held.iter().fold(0, |sum, (n, held)| n.saturating_mul(pages(held + 1)).saturating_add(sum)),
            None => self.together.saturating_mul(pages(self.context)),
        };
        held.saturating_mul(PAGE)
    }

    /// Whether a sequence holds no more than `most` tokens, the model's own limit.
    pub(crate) fn within(&self, most: u64, model: &str) -> Result<(), Error> {
        if self.context <= most {
            return Ok(());
        }
        let advice = if self.stages.is_empty() { "" } else { "; --ladder-scale divides a ladder's prompts" };
        Err(Error::Unsupported {
            what: format!("a context of {} tokens (depth + prompt + output)", self.context),
            supported: format!("{model} takes up to {most}{advice}"),
        })
    }
}

/// Steps a prompt takes alone: pieces end on multiples of 64 tokens, or of the chunk where that is smaller.
fn steps_of(prompt: u64, chunk: u64) -> u64 {
    let piece = if chunk < SHORT_TOKENS + 1 { chunk } else { chunk - chunk % (SHORT_TOKENS + 1) };
    prompt.div_ceil(piece.max(1))
}

/// The workloads of `--workload`, each once, `fixed` where none is given.
pub(crate) fn kinds(names: &[String]) -> Result<Vec<Kind>> {
    let mut kinds: Vec<Kind> = Vec::new();
    for name in names {
        let kind = Kind::parse(name)?;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    ensure!(kinds.len() <= 64, "{} workloads; a sweep takes up to 64", kinds.len());
    if kinds.is_empty() {
        kinds.push(Kind::Fixed);
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceRequest;

    fn script(workload: Kind, chunk: u64, batch: u64, prompt: Option<u64>, output: u64) -> Script {
        let flags = Workload { prompt, output, ladder_scale: 64, ..Workload::default() };
        Script::of(&flags, &Cell { workload, ..Cell::fixed(chunk, batch, 70) }).unwrap()
    }

    #[test]
    fn prompts_of_each_workload() {
        let prompts = |kind, chunk, batch| {
            let script = script(kind, chunk, batch, None, 12);
            script.requests.iter().map(|request| request.prompt).collect::<Vec<u64>>()
        };
        assert_eq!(prompts(Kind::Fixed, 512, 2), [512, 512]);
        assert_eq!(prompts(Kind::ManyShort, 512, 2), [63, 63]);
        assert_eq!(prompts(Kind::ManyShort, 100, 3), [33, 33, 33]);
        // More sequences than rows: one row each, over several steps.
        assert_eq!(prompts(Kind::ManyShort, 2, 3), [1, 1, 1]);
        assert_eq!(prompts(Kind::ConcurrentPrefill, 512, 2), [256, 256]);
        assert_eq!(prompts(Kind::Ladder, 512, 1), [32, 96, 192, 384, 32, 192]);
        assert_eq!(prompts(Kind::Ladder, 512, 2)[..4], [32, 32, 96, 96]);
        assert_eq!(prompts(Kind::Mixed, 512, 2), [16, 16, 512, 512, 512]);
    }

    #[test]
    fn what_an_engine_must_hold() {
        let fixed = script(Kind::Fixed, 512, 3, Some(100), 8);
        assert_eq!((fixed.context, fixed.together, fixed.kv_tokens()), (178, 3, 3 * 192));
        assert_eq!((fixed.held, fixed.uniform), (vec![(3, 177)], (Some(100), Some(8))));
        let ladder = script(Kind::Ladder, 512, 2, None, 8);
        assert_eq!((ladder.context, ladder.kv_tokens(), ladder.stages.len()), (462, 2 * 512, 6));
        let mixed = script(Kind::Mixed, 512, 2, None, 12);
        // 12 tokens, three prompts of a step each, and the batch's own first step.
        assert_eq!((mixed.requests[0].output, mixed.together), (16, 3));
        assert_eq!((mixed.context, mixed.kv_tokens()), (70 + 512 + 1, 2 * 128 + 640));
        assert_eq!(mixed.timed_prompt_tokens(), 3 * 512);
        let piecewise = script(Kind::Mixed, 100, 2, Some(200), 12);
        // Pieces of 64 tokens: four steps a prompt.
        assert_eq!(piecewise.requests[0].output, 12 + 3 * 4 + 1);
    }

    #[test]
    fn a_trace_by_the_clock_can_be_run_by_steps() {
        let requests = [(0.0, 5, 3), (7.5, 9, 2)].map(|(ms, prompt, output)| TraceRequest {
            arrival: Arrival::Ms(ms),
            prompt,
            output,
        });
        let trace: &'static Trace =
            Box::leak(Box::new(Trace { label: "trace:x@1".into(), requests: requests.to_vec() }));
        let by_clock = script(Kind::Trace(trace), 64, 4, None, 12);
        assert!(by_clock.by_clock() && by_clock.mixes() && by_clock.full.is_none());
        assert_eq!((by_clock.context, by_clock.kv_tokens()), (81, 4 * 128));
        let by_steps = by_clock.at_steps(&[0, 3]);
        assert!(!by_steps.by_clock());
        assert_eq!(by_steps.requests[1], Planned { when: When::Step(3), ..by_clock.requests[1] });
        assert_eq!(Kind::Trace(trace), Kind::Trace(trace));
    }

    #[test]
    fn lengths_at_the_ends_of_their_ranges_are_no_panic() {
        for kind in [Kind::Fixed, Kind::Ladder, Kind::ManyShort, Kind::ConcurrentPrefill, Kind::Mixed] {
            for (chunk, batch, depth) in
                [(1, 1, 0), (1 << 20, 1 << 14, 1 << 24), (1, 1 << 14, 1 << 24), (1 << 20, 1, 0)]
            {
                for prompt in [None, Some(1), Some(1 << 24)] {
                    let flags = Workload { prompt, output: 1 << 24, ..Workload::default() };
                    let cell = Cell { chunk, batch, depth, workload: kind };
                    let Ok(script) = Script::of(&flags, &cell) else {
                        assert!(kind == Kind::ManyShort && prompt == Some(1 << 24));
                        continue;
                    };
                    assert!(script.kv_tokens() > 0 && script.requests.iter().all(|r| r.prompt > 0 && r.output > 0));
                }
            }
        }
    }

    #[test]
    fn names_are_known_each_once() {
        let found = kinds(&["ladder".into(), "fixed".into(), "ladder".into()]).unwrap();
        assert_eq!(found, [Kind::Ladder, Kind::Fixed]);
        assert_eq!(kinds(&[]).unwrap(), [Kind::Fixed]);
        for name in Kind::NAMES.iter().filter(|name| !name.starts_with("trace:")) {
            assert_eq!(Kind::parse(name).unwrap().name(), *name);
        }
    }
}
