//! What a sequence keeps between steps, as a list the cache allocates without knowing the model.

use crate::checkpoint::{Geometry, Mixer};
use crate::mem::{Layer, Tag};
use crate::num::DType;
use crate::ops::Numerics;
use crate::ops::batch::PAGE_TOKENS;

/// Whether a piece of state grows with the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateScope {
    /// Paged: `[pages, 64, ...]`.
    PerToken,
    /// One slot per sequence: `[slots, ...]`.
    PerSequence,
}

/// One tensor of state, over all sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDecl {
    /// Who owns it in reports.
    pub tag: Tag,
    /// Paged or slotted.
    pub scope: StateScope,
    /// Element type.
    pub dtype: DType,
    /// Dimensions of one token or one sequence.
    pub shape: Vec<usize>,
}

impl StateDecl {
    /// Bytes of one token (paged) or one sequence (slotted), without padding.
    pub fn unit_bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.bytes()
    }

    /// The whole tensor's shape for `units` pages or slots.
    pub fn tensor_shape(&self, units: usize) -> Vec<usize> {
        let mut shape = vec![units];
        if self.scope == StateScope::PerToken {
            shape.push(PAGE_TOKENS);
        }
        shape.extend(&self.shape);
        shape
    }
}

/// The family's state, two tensors a layer in layer order: K and V pages of an attention layer, the conv window and the
/// recurrent state of a GDN layer.
pub(super) fn declare(geometry: &Geometry, numerics: Numerics) -> Vec<StateDecl> {
    let mut list = Vec::with_capacity(2 * geometry.layers.len());
    for mixer in &geometry.layers {
        match mixer {
            Mixer::Attention => {
                for buffer in ["k", "v"] {
                    list.push(StateDecl {
                        tag: Tag::new(Layer::Cache, "kv", buffer),
                        scope: StateScope::PerToken,
                        dtype: numerics.kv,
                        shape: vec![geometry.kv_heads, geometry.head_dim],
                    });
                }
            }
            Mixer::Gdn => {
                let gdn = &geometry.gdn;
                list.push(StateDecl {
                    tag: Tag::new(Layer::Cache, "state", "conv"),
                    scope: StateScope::PerSequence,
                    dtype: numerics.activations,
                    shape: vec![gdn.conv_channels(), gdn.conv_kernel - 1],
                });
                list.push(StateDecl {
                    tag: Tag::new(Layer::Cache, "state", "recurrent"),
                    scope: StateScope::PerSequence,
                    dtype: numerics.state,
                    shape: vec![gdn.value_heads, gdn.key_dim, gdn.value_dim],
                });
            }
        }
    }
    list
}
