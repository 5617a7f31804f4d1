//! State slots on the CPU arm: which block a sequence starts from and which it leaves its state in.

use crate::error::{Error, Result};
use crate::ops::Batch;
use crate::tensor::Elem;

/// Splits `state` (slots of `stride` elements) into the block each of the batch's sequences writes, `None` for an inert
/// one. On return a block holds the sequence's initial state: zero for a fresh sequence, else a copy of the slot read.
///
/// Only the sequences in `range` are looked at. A slot may be read by many; a slot that one sequence writes and another
/// reads or writes has no defined value on a device that runs them together, so it is an error here.
pub(crate) fn split<'a, S: Elem>(
    op: &'static str,
    state: &'a mut [S],
    stride: usize,
    batch: &Batch,
    range: std::ops::Range<usize>,
) -> Result<Vec<Option<&'a mut [S]>>> {
    let slot_in = &batch.inputs.slot_in.host::<i32>()?[range.clone()];
    let slot_out = &batch.inputs.slot_out.host::<i32>()?[range.clone()];
    let spans = &batch.spans[range.clone()];
    let slots = state.len() / stride;
    let valid = |i: usize, what: &str, slot: i32| {
        usize::try_from(slot).ok().filter(|&s| s < slots).ok_or_else(|| {
            Error::shape(op, format!("sequence {} {what} slot {slot}, there are {slots}", range.start + i))
        })
    };
    let mut writer = vec![None; slots];
    for (i, (&from, &to)) in slot_in.iter().zip(slot_out).enumerate().filter(|(_, (from, _))| **from >= 0) {
        valid(i, "reads", from)?;
        let to = valid(i, "writes", to)?;
        if let Some(other) = writer[to].replace(i) {
            return Err(Error::shape(
                op,
                format!("sequences {} and {} both write slot {to}", range.start + other, range.start + i),
            ));
        }
    }
    for (i, (&from, span)) in slot_in.iter().zip(spans).enumerate().filter(|(_, (from, _))| **from >= 0) {
        let Some(other) = writer[valid(i, "reads", from)?].filter(|&other| other != i && span.context > 0) else {
            continue;
        };
        return Err(Error::shape(
            op,
            format!("sequence {} writes slot {from}, which sequence {} reads", range.start + other, range.start + i),
        ));
    }
    for (i, span) in spans.iter().enumerate().filter(|&(i, _)| slot_in[i] >= 0) {
        let (from, to) = (valid(i, "reads", slot_in[i])?, valid(i, "writes", slot_out[i])?);
        if span.context == 0 {
            state[to * stride..][..stride].fill(S::from_f32(0.0));
        } else if from != to {
            state.copy_within(from * stride..(from + 1) * stride, to * stride);
        }
    }
    let mut blocks: Vec<Option<&mut [S]>> = state.chunks_exact_mut(stride).map(Some).collect();
    slot_in
        .iter()
        .zip(slot_out)
        .enumerate()
        .map(|(i, (&from, &to))| if from < 0 { Ok(None) } else { Ok(blocks[valid(i, "writes", to)?].take()) })
        .collect()
}
