//! KV pages and state slots: which are free, and the state tensors behind them.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::mem::End;
use crate::model::{LayerState, StateDecl, StateScope};
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::{Tensor, byte_size};

/// The page and the slot that padding rows of a captured graph use; no sequence is ever given them.
pub const PADDING: i32 = 0;

/// Pages that hold `tokens`, with the reserved one.
pub fn pages_for(tokens: u64) -> u64 {
    tokens.div_ceil(PAGE_TOKENS as u64) + 1
}

/// Bytes of all state tensors of one scope, for `units` pages or slots, padded as the pool pads.
pub fn state_bytes(decls: &[StateDecl], scope: StateScope, units: u64) -> u64 {
    let tokens = if scope == StateScope::PerToken { PAGE_TOKENS as u64 } else { 1 };
    decls
        .iter()
        .filter(|d| d.scope == scope)
        .map(|d| (d.unit_bytes() * tokens * units).next_multiple_of(crate::mem::ALIGN_BYTES))
        .sum()
}

/// Allocates the state tensors at the persistent end, a layer's pair after the other's. `scales` are each layer's of K and V,
/// for pages of codes.
pub fn allocate(
    device: &Arc<Device>,
    decls: &[StateDecl],
    scales: &[(f32, f32)],
    pages: usize,
    slots: usize,
) -> Result<Vec<LayerState>> {
    let tensor = |decl: &StateDecl| -> Result<Tensor> {
        let units = if decl.scope == StateScope::PerToken { pages } else { slots };
        let shape = decl.tensor_shape(units);
        let buffer = device.alloc(End::Persistent, decl.tag, byte_size(decl.dtype, &shape)?)?;
        Tensor::new(buffer, decl.dtype, &shape)
    };
    decls
        .as_chunks::<2>()
        .0
        .iter()
        .zip(scales)
        .map(|([a, b], &(k_scale, v_scale))| {
            Ok(match a.scope {
                StateScope::PerToken => {
                    LayerState::Attention(KvPages { k: tensor(a)?, v: tensor(b)?, k_scale, v_scale })
                }
                StateScope::PerSequence => LayerState::Gdn { conv: tensor(a)?, recurrent: tensor(b)? },
            })
        })
        .collect()
}

/// Free pages and slots, taken lowest first so that the same requests get the same ones.
#[derive(Debug)]
pub struct Free {
    pages: Vec<i32>,
    slots: Vec<i32>,
}

impl Free {
    /// All but the reserved page and slot.
    pub fn new(pages: usize, slots: usize) -> Free {
        Free { pages: (PADDING + 1..pages as i32).rev().collect(), slots: (PADDING + 1..slots as i32).rev().collect() }
    }

    /// Free pages.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Free slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Takes a slot.
    pub fn take_slot(&mut self) -> Option<i32> {
        self.slots.pop()
    }

    /// Makes `held` long enough for `tokens`; takes nothing and answers false where there are too few pages.
    pub fn grow(&mut self, held: &mut Vec<i32>, tokens: usize) -> bool {
        let more = tokens.div_ceil(PAGE_TOKENS).saturating_sub(held.len());
        if more > self.pages.len() {
            return false;
        }
        held.extend((0..more).filter_map(|_| self.pages.pop()));
        true
    }

    /// Gives a sequence's pages and slot back.
    pub fn release(&mut self, pages: &mut Vec<i32>, slot: Option<i32>) {
        self.pages.append(pages);
        self.pages.sort_unstable_by(|a, b| b.cmp(a));
        if let Some(slot) = slot {
            self.slots.push(slot);
            self.slots.sort_unstable_by(|a, b| b.cmp(a));
        }
    }
}
