//! One token of the gated delta rule per sequence: the recurrence itself.
//!
//! Per value head, with S its state `[dk, dv]`:
//! `S *= exp(g); delta = beta * (v - S^T k); S += k (x) delta; o = S^T q`.
//! The decay comes first, the prediction is read from the decayed state, the output from the updated one. q and k are
//! made unit vectors (1e-6 under the root), q is scaled by dk^-0.5; value head h uses key head h / (value heads / key
//! heads).

use serde::Serialize;

use crate::device::Arm;
use crate::error::Result;
use crate::num::DType;
use crate::ops::activation::Gates;
use crate::ops::cost::Unit;
use crate::ops::gdn_prefill::{GdnDims, check_operands, state_bytes};
use crate::ops::{Batch, Cost, Cx, Span, launch, reference};
use crate::tensor::Tensor;
use crate::with_elem;

const OP: &str = "gdn_decode";

/// One shape of the tests and benches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Heads.
    pub dims: GdnDims,
    /// Sequences.
    pub batch: usize,
    /// The activations' type.
    pub dtype: DType,
    /// The state's type.
    pub state: DType,
}

/// The shapes tests and benches share.
pub fn cases() -> Vec<Case> {
    let case = |name, dims, batch, dtype, state| Case { name, dims, batch, dtype, state };
    vec![
        case("odd", GdnDims::new(1, 3, 5, 7), 3, DType::F32, DType::F32),
        case("tiny", GdnDims::new(2, 4, 32, 32), 5, DType::F32, DType::F32),
        case("0.8b_b1", GdnDims::new(16, 16, 128, 128), 1, DType::Bf16, DType::F32),
        case("27b_b1", GdnDims::new(16, 48, 128, 128), 1, DType::Bf16, DType::F32),
        case("27b_b8_bf16", GdnDims::new(16, 48, 128, 128), 8, DType::Bf16, DType::Bf16),
    ]
}

/// The least work of one call on `spans` of one row each.
pub fn cost(dims: GdnDims, spans: &[Span], dtype: DType, state: DType) -> Cost {
    let GdnDims { value_heads, key_dim, value_dim, .. } = dims;
    let rows = spans.iter().map(|s| s.len).sum::<usize>() as u64;
    let row_bytes = (dims.channels() + dims.out_width()) as u64 * dtype.bytes() + 8 * value_heads as u64;
    Cost {
        // Decay 1, prediction 2, update 2, output 2 per state element.
        flops: rows * 7 * (value_heads * key_dim * value_dim) as u64,
        resident_bytes: state_bytes(dims, spans, state),
        activation_bytes: rows * row_bytes,
        unit: Unit::F32,
    }
}

/// The recurrence over the batch's decodes: writes those rows of `out` `[T, value_heads*value_dim]` and their states.
///
/// conv `[T, dims.channels()]` rows are (q, k, v) after the convolution; the numerics' state type keeps state
/// `[slots, value_heads, key_dim, value_dim]`. A fresh sequence's state counts as zero; slot_in -1 gives a zero row and
/// changes no slot.
pub fn recurrent(
    cx: &Cx,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
) -> Result<()> {
    check_operands(OP, cx, conv, gates, state, dims, &batch, out)?;
    if batch.decodes == 0 {
        return Ok(());
    }
    let spans = &batch.spans[..batch.decodes];
    cx.note(OP, cost(dims, spans, conv.dtype(), state.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, conv.dtype(), E => with_elem!(OP, state.dtype(), S => {
            let states = reference::slots::split::<S>(
                OP, state.host_mut()?, dims.state_len(), &batch,
                0..batch.decodes,
            )?;
            let (g, beta) = (gates.g.host()?, gates.beta.host()?);
            reference::gdn_decode::recurrent::<E, S>(conv.host()?, g, beta, states, dims, out.host_mut()?);
            Ok(())
        })),
        Arm::Cuda(cuda) => launch::gdn_decode::recurrent(cuda, conv, gates, state, dims, batch, out),
        Arm::Plan => Ok(()),
    }
}
