//! The short convolution of a GDN layer: depthwise, causal, then SiLU, over each sequence's rows and what it keeps of
//! the rows before.
//!
//! `y[t, c] = silu(round(sum_j w[c, j] * x[t - (W-1) + j, c]))`. A sequence keeps its last W-1 raw inputs (before the
//! convolution), oldest first; a fresh one starts from zeros. The sum is rounded to activations before SiLU, as the
//! published models do.

use serde::Serialize;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::Unit;
use crate::ops::{Batch, Cost, Cx, Span, check, launch, reference};
use crate::tensor::{Tensor, View};
use crate::with_elem;

const OP: &str = "conv1d";

/// One shape of the tests and benches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Channels C.
    pub channels: usize,
    /// Columns of x beyond the channels (z, in the fused projection).
    pub extra: usize,
    /// Taps W.
    pub taps: usize,
    /// The sequences: (context, rows).
    pub spans: Vec<(usize, usize)>,
    /// The activations' type.
    pub dtype: DType,
}

/// The shapes tests and benches share.
pub fn cases() -> Vec<Case> {
    let case = |name, channels, extra, taps, spans: &[(usize, usize)], dtype| Case {
        name,
        channels,
        extra,
        taps,
        spans: spans.to_vec(),
        dtype,
    };
    vec![
        case("one_token", 12, 0, 4, &[(0, 1)], DType::F32),
        case("odd_ragged", 37, 5, 4, &[(9, 1), (1, 1), (0, 2), (2, 3), (64, 70)], DType::F32),
        case("two_taps", 5, 3, 2, &[(0, 4), (3, 1)], DType::Bf16),
        case("27b_decode_64", 10240, 6144, 4, &[(100, 1); 64], DType::Bf16),
        case("27b_prefill_512", 10240, 6144, 4, &[(0, 512)], DType::Bf16),
    ]
}

/// The least work of one call: `spans` sequences of `channels` channels and `taps` taps.
pub fn cost(spans: &[Span], channels: usize, taps: usize, dtype: DType) -> Cost {
    let rows: usize = spans.iter().map(|s| s.len).sum();
    let read = spans.iter().filter(|s| s.context > 0).count();
    let state = (channels * (taps - 1)) as u64 * dtype.bytes();
    Cost {
        flops: (rows * channels * (2 * taps + 4)) as u64,
        resident_bytes: 4 * (channels * taps) as u64 + state * (read + spans.len()) as u64,
        activation_bytes: 2 * (rows * channels) as u64 * dtype.bytes(),
        unit: Unit::F32,
    }
}

/// The convolution of every sequence of the step: x the `[T, C]` channels of the fused projection, w f32 `[C, W]`,
/// state `[slots, C, W-1]` activations (W of at least 2); gives `[T, C]` activations.
///
/// A sequence reads `slot_in` (nothing, if it is fresh) and writes `slot_out`. One with slot_in -1 is inert: its rows
/// are zero, no slot changes. A slot outside the state is an error; on a GPU, which cannot give one, the sequence's rows are
/// NaN and no slot changes.
pub fn causal(cx: &Cx, x: View, w: &Tensor, state: &mut Tensor, batch: Batch) -> Result<Tensor> {
    let (channels, taps) = check::matrix(OP, "w", w)?;
    if taps < 2 {
        return Err(Error::shape(OP, format!("w is {:?}, must have 2 taps or more", w.shape())));
    }
    let act = cx.numerics.activations;
    let rows = x.rows();
    check::tensor(OP, "w", w, DType::F32, &[channels, taps])?;
    check::view(OP, "x", &x, act, rows, channels)?;
    check::tensor(OP, "state", state, act, &[state.rows(), channels, taps - 1])?;
    check::batch(OP, &batch, rows)?;
    let mut y = cx.activation(OP, "y", &[rows, channels])?;
    cx.note(OP, cost(batch.spans, channels, taps, act));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, act, E => {
            let state = reference::slots::split::<E>(
                OP, state.host_mut()?, channels * (taps - 1), &batch, 0..batch.spans.len(),
            )?;
            reference::conv1d::causal::<E>(x.host()?, w.host()?, taps, state, batch.spans, y.host_mut()?);
            Ok(y)
        }),
        Arm::Cuda(cuda) => {
            let sms = cx.device.spec().sms as usize;
            launch::conv1d::causal(cuda, sms, x, w, state, &batch, &mut y)?;
            Ok(y)
        }
        Arm::Plan => Ok(y),
    }
}
