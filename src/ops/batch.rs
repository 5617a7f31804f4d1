//! The ragged batch of one step: which rows belong to which sequence, and where its state lives.

use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::mem::{End, Layer, Tag};
use crate::num::DType;
use crate::ops::Limits;
use crate::tensor::{Tensor, byte_size};

/// Tokens of one KV page.
pub const PAGE_TOKENS: usize = 64;

/// One sequence's part of a step: rows `start..start + len`, after `context` tokens already in its cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First row.
    pub start: usize,
    /// Rows.
    pub len: usize,
    /// Tokens of this sequence in the cache before this step; 0 means a fresh sequence, whose state counts as zero.
    pub context: usize,
}

/// Where a sequence keeps what outlives a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The state slot read; -1 makes the sequence inert (graph padding).
    pub slot_in: i32,
    /// The state slot written.
    pub slot_out: i32,
    /// Its KV pages, in order, enough for `context + len` tokens.
    pub pages: Vec<i32>,
}

/// The step's small inputs on the device: allocated once at load, for the limits, since a graph bakes their addresses.
#[derive(Debug)]
pub struct StepInputs {
    limits: Limits,
    /// Token ids, i32 `[step_tokens]`.
    pub tokens: Tensor,
    /// Positions in their sequences, i32 `[step_tokens]`.
    pub positions: Tensor,
    /// The KV slot of each row, page x 64 + offset, i32 `[step_tokens]`.
    pub kv_slots: Tensor,
    /// First row of each sequence and the end of the last, i32 `[batch + 1]`.
    pub starts: Tensor,
    /// Cached tokens of each sequence before the step, i32 `[batch]`.
    pub contexts: Tensor,
    /// State slots read, i32 `[batch]`.
    pub slot_in: Tensor,
    /// State slots written, i32 `[batch]`.
    pub slot_out: Tensor,
    /// KV pages of each sequence, i32 `[batch, pages of the largest context]`.
    pub page_table: Tensor,
    /// Rows to sample, i32 `[step_tokens]`.
    pub rows: Tensor,
}

impl StepInputs {
    /// Allocates the inputs at the persistent end.
    pub fn new(device: &Arc<Device>, limits: Limits) -> Result<StepInputs> {
        let ints = |buffer: &'static str, shape: &[usize]| -> Result<Tensor> {
            let bytes = byte_size(DType::I32, shape)?;
            let block = device.alloc(End::Persistent, Tag::new(Layer::Inputs, "step", buffer), bytes)?;
            Tensor::new(block, DType::I32, shape)
        };
        let (tokens, batch) = (limits.step_tokens, limits.batch);
        Ok(StepInputs {
            limits,
            tokens: ints("tokens", &[tokens])?,
            positions: ints("positions", &[tokens])?,
            kv_slots: ints("kv_slots", &[tokens])?,
            starts: ints("starts", &[batch + 1])?,
            contexts: ints("contexts", &[batch])?,
            slot_in: ints("slot_in", &[batch])?,
            slot_out: ints("slot_out", &[batch])?,
            page_table: ints("page_table", &[batch, limits.context.div_ceil(PAGE_TOKENS)])?,
            rows: ints("rows", &[tokens])?,
        })
    }

    /// The limits the inputs were allocated for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Checks a step on the host and copies its numbers to the device. `tokens` are all rows' ids in span order;
    /// `rows` are the sampled rows. Nothing is copied on the plan device; the checks run all the same.
    pub fn upload(&mut self, spans: &[Span], places: &[Placement], tokens: &[i32], rows: &[i32]) -> Result<()> {
        self.check(spans, places, tokens, rows)?;
        if !self.tokens.buffer().device().has_data() {
            return Ok(());
        }
        let pages_per_row = self.page_table.cols();
        self.tokens.write(0, tokens)?;
        self.rows.write(0, rows)?;
        let (mut starts, mut contexts) = (vec![0], Vec::with_capacity(spans.len()));
        let (mut slot_in, mut slot_out) = (Vec::with_capacity(spans.len()), Vec::with_capacity(spans.len()));
        let (mut positions, mut kv_slots) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(tokens.len()));
        let mut table = vec![0; spans.len() * pages_per_row];
        for (i, (span, place)) in spans.iter().zip(places).enumerate() {
            starts.push((span.start + span.len) as i32);
            contexts.push(span.context as i32);
            slot_in.push(place.slot_in);
            slot_out.push(place.slot_out);
            table[i * pages_per_row..][..place.pages.len()].copy_from_slice(&place.pages);
            for position in span.context..span.context + span.len {
                positions.push(position as i32);
                kv_slots
                    .push(place.pages[position / PAGE_TOKENS] * PAGE_TOKENS as i32 + (position % PAGE_TOKENS) as i32);
            }
        }
        self.starts.write(0, &starts)?;
        self.contexts.write(0, &contexts)?;
        self.slot_in.write(0, &slot_in)?;
        self.slot_out.write(0, &slot_out)?;
        self.page_table.write(0, &table)?;
        self.positions.write(0, &positions)?;
        self.kv_slots.write(0, &kv_slots)?;
        Ok(())
    }

    fn check(&self, spans: &[Span], places: &[Placement], tokens: &[i32], rows: &[i32]) -> Result<()> {
        let err = |what: String| Err(Error::shape("step", what));
        let Limits { step_tokens, batch, context } = self.limits;
        if spans.len() != places.len() || spans.len() > batch {
            return err(format!("{} spans, {} placements, at most {batch}", spans.len(), places.len()));
        }
        let mut next = 0;
        for (i, (span, place)) in spans.iter().zip(places).enumerate() {
            let end = span.context.saturating_add(span.len);
            if span.start != next || span.len == 0 || end > context {
                return err(format!("span {i} is {span:?}; must start at row {next} and end within {context} tokens"));
            }
            if place.pages.len() < end.div_ceil(PAGE_TOKENS) || place.pages.len() > self.page_table.cols() {
                return err(format!(
                    "span {i} of {end} tokens has {} pages of {PAGE_TOKENS} tokens",
                    place.pages.len()
                ));
            }
            next += span.len;
        }
        if next != tokens.len() || next > step_tokens {
            return err(format!("spans hold {next} rows, {} tokens given, at most {step_tokens}", tokens.len()));
        }
        if let Some(row) = rows.iter().find(|&&r| r < 0 || r as usize >= next) {
            return err(format!("sampled row {row} is outside the window of {next} rows"));
        }
        if rows.len() > step_tokens {
            return err(format!("{} sampled rows, at most {step_tokens}", rows.len()));
        }
        Ok(())
    }
}

/// A step as the ops see it: the host's spans, and the same on the device.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The sequences; the first `decodes` are single rows that continue a sequence.
    pub spans: &'a [Span],
    /// How many leading spans are decodes (one row each, context > 0): they take the decode kernels.
    pub decodes: usize,
    /// The device's copy.
    pub inputs: &'a StepInputs,
}

impl<'a> Batch<'a> {
    /// All rows.
    pub fn tokens(&self) -> usize {
        self.spans.last().map_or(0, |s| s.start + s.len)
    }

    /// The spans that take the prefill kernels.
    pub fn prefills(&self) -> &'a [Span] {
        &self.spans[self.decodes..]
    }
}
