//! What goes into the engine and what comes out of a step.

use crate::ops::sampler::{SampleRow, Token};

/// A request's number, given by [`crate::engine::Engine::submit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One sequence to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Tokens already in the cache before the prompt: primed with seeded values, never computed.
    pub depth: usize,
    /// Tokens to generate at most; cut to what the context and the KV pool can hold.
    pub max_tokens: usize,
    /// Seeds what is fed back in place of the sampled tokens: random ids, so that a model without trained weights does not
    /// settle on one token (or, with experts, on few of them). What was sampled is still reported.
    pub feed: Option<u64>,
    /// How to sample. `step`, `prompt_ids` and `output_counts` are the engine's to fill.
    pub sampling: SampleRow,
    /// Ids that end the sequence (the model's own unless `ignore_eos`).
    pub stop: Vec<u32>,
    /// Go on past the model's end-of-sequence ids.
    pub ignore_eos: bool,
    /// Report the log-probability of every prompt token after the first.
    pub prompt_logprobs: bool,
    /// Which rows' raw logits to report.
    pub logits: Logits,
}

/// Which rows' raw logits a request reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Logits {
    /// None.
    #[default]
    None,
    /// The rows that are sampled.
    Sampled,
    /// Every row of the prompt.
    Prompt,
}

impl Request {
    /// A greedy request without stop ids.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Request {
        Request {
            prompt,
            depth: 0,
            max_tokens,
            feed: None,
            sampling: SampleRow::default(),
            stop: Vec::new(),
            ignore_eos: true,
            prompt_logprobs: false,
            logits: Logits::None,
        }
    }

    /// Whether rows of the prompt are scored.
    pub(super) fn scores(&self) -> bool {
        self.prompt_logprobs || self.logits == Logits::Prompt
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// A stop id.
    Stop,
    /// `max_tokens`.
    Length,
    /// The request failed; the engine goes on.
    Failed(String),
}

/// What one step did for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The request.
    pub request: RequestId,
    /// Prompt tokens computed in this step.
    pub prefilled: usize,
    /// Log-probabilities of the prompt tokens this step's rows predict, where asked for, in prompt order.
    pub prompt_logprobs: Vec<f32>,
    /// Raw logits `[rows, V]` of the rows asked for, in order.
    pub logits: Vec<f32>,
    /// The token sampled, if the step reached the end of the sequence so far; id 0 on the plan device, which has no
    /// data.
    pub token: Option<Token>,
    /// Set in a request's last record.
    pub finish: Option<Finish>,
}
