//! The sampling parameters of one row, and which of them are refused.

use crate::error::{Error, Result};

/// Most biased ids of a row.
pub const MAX_BIASES: usize = 1024;
/// Most alternatives reported for a row.
pub const MAX_LOGPROBS: usize = 20;
/// Lists take places in steps of this many, so that a step's bytes change rarely as its outputs grow.
pub const LIST_STEP: usize = 256;
/// Temperatures below this are greedy.
pub const GREEDY_BELOW: f32 = 1e-5;

/// How one row's token is drawn. The default is greedy with everything else off.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// Divides the logits; below 1e-5 the row is greedy.
    pub temperature: f32,
    /// Keeps the k largest; 0 is off, and so is anything from the vocabulary's size on.
    pub top_k: u32,
    /// Keeps the fewest most likely tokens of this much probability; 1 is off.
    pub top_p: f32,
    /// Keeps tokens of at least this fraction of the largest probability; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of prompt and output tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each output token; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of each output token as often as it is there; 0 is off.
    pub frequency_penalty: f32,
    /// (id, value added to its logit), each id once.
    pub bias: Vec<(u32, f32)>,
    /// The prompt's distinct ids; read only where `repetition_penalty` is on.
    pub prompt_ids: Vec<u32>,
    /// (id, times in the output); read only where a penalty is on.
    pub output_counts: Vec<(u32, u32)>,
    /// The request's seed.
    pub seed: u64,
    /// The place of the token in the request's output. Same seed and step, same random numbers.
    pub step: u64,
    /// How many of the most likely tokens to report.
    pub logprobs: u32,
}

impl Default for SampleRow {
    fn default() -> SampleRow {
        SampleRow {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            bias: Vec::new(),
            prompt_ids: Vec::new(),
            output_counts: Vec::new(),
            seed: 0,
            step: 0,
            logprobs: 0,
        }
    }
}

impl SampleRow {
    /// The largest logit, nothing else on.
    pub fn greedy() -> SampleRow {
        SampleRow::default()
    }

    /// Whether the row takes the largest logit.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW || self.top_k == 1
    }

    /// Whether the repetition penalty is on, so that `prompt_ids` is read.
    pub fn repeats(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() > 0.0
    }

    /// Whether the tokens of the output change how the next is drawn, so that `output_counts` is read.
    pub fn penalises(&self) -> bool {
        let on = |value: f32| value.abs() > 0.0;
        self.repeats() || on(self.presence_penalty) || on(self.frequency_penalty)
    }

    /// Places this row takes in the list of lanes changed before the draw, a multiple of [`LIST_STEP`] and an upper
    /// bound of their number. With `logprobs` and the logits' shape it decides the bytes of a call. It counts the output's
    /// tokens and not which they are, so that a device that draws none takes the same bytes.
    pub fn edits(&self) -> usize {
        let prompt = if self.repeats() { self.prompt_ids.len() } else { 0 };
        let drawn: u64 = self.output_counts.iter().map(|(_, count)| u64::from(*count)).sum();
        let output = if self.penalises() { drawn as usize } else { 0 };
        (self.bias.len() + prompt + output).next_multiple_of(LIST_STEP)
    }

    /// Refuses parameters out of range as [`Error::Request`] with the parameter's API name, the value and the range;
    /// ids are those below `decodable`.
    pub fn check(&self, decodable: usize) -> Result<()> {
        let refuse = |param, what: String| Err(Error::Request { param, what });
        // Each test is written so that NaN fails it.
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", format!("{} is not a finite number of at least 0", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", format!("{} is not above 0 and at most 1 (1 keeps every token)", self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", format!("{} is not between 0 and 1", self.min_p));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return refuse("repetition_penalty", format!("{} is not finite and above 0", self.repetition_penalty));
        }
        for (param, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !(-2.0..=2.0).contains(&value) {
                return refuse(param, format!("{value} is not between -2 and 2"));
            }
        }
        if self.logprobs as usize > MAX_LOGPROBS {
            return refuse("logprobs", format!("{} is more than {MAX_LOGPROBS}", self.logprobs));
        }
        if self.bias.len() > MAX_BIASES {
            return refuse("logit_bias", format!("{} ids, at most {MAX_BIASES} are taken", self.bias.len()));
        }
        for &(id, bias) in &self.bias {
            if id as usize >= decodable {
                return refuse("logit_bias", format!("id {id} is no token, ids run from 0 to {}", decodable - 1));
            }
            if !(-100.0..=100.0).contains(&bias) {
                return refuse("logit_bias", format!("the value {bias} of id {id} is not between -100 and 100"));
            }
        }
        let mut ids: Vec<u32> = self.bias.iter().map(|b| b.0).collect();
        ids.sort_unstable();
        if let Some([twice, ..]) = ids.windows(2).find(|w| w[0] == w[1]) {
            return refuse("logit_bias", format!("id {twice} is given twice"));
        }
        Ok(())
    }
}
