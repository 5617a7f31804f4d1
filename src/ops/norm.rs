//! Root-mean-square norms, alone and fused with the residual add and with the quantisation of the result, and the gated
//! norm after a GDN layer.
//!
//! `rms` and `add_rms` are the zero-centred norm of the Qwen3.5 family, `y = x * rsqrt(mean(x^2) + eps) * (1 + w)`;
//! `gated` takes its weight as it is. Arithmetic is f32; activations are rounded where they are stored, or would be.

use serde::Serialize;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::Unit;
use crate::ops::quantise::{Form, Quantised};
use crate::ops::{Cost, Cx, check, launch, reference};
use crate::tensor::{Tensor, View};
use crate::with_elem;

const RMS: &str = "rms";
const ADD_RMS: &str = "add_rms";
const RMS_FP8: &str = "rms_fp8";
const ADD_RMS_FP8: &str = "add_rms_fp8";
const ADD: &str = "add";
const GATED: &str = "gated_norm";

/// What the gated norm is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// z * sigmoid(z).
    Silu,
    /// sigmoid(z).
    Sigmoid,
}

/// Which of the norms a case or a cost is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// [`rms`].
    Rms,
    /// [`add_rms`].
    AddRms,
    /// [`rms_fp8`].
    RmsFp8,
    /// [`add_rms_fp8`].
    AddRmsFp8,
    /// [`add`].
    Add,
    /// [`gated`].
    Gated(Gate),
}

/// One shape of the tests and benches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The op.
    pub kind: Kind,
    /// Rows.
    pub rows: usize,
    /// Heads of a row ([`Kind::Gated`]; 1 otherwise).
    pub heads: usize,
    /// Elements that are normed together.
    pub width: usize,
    /// The activations' type.
    pub dtype: DType,
}

/// The shapes tests and benches share.
pub fn cases() -> Vec<Case> {
    let case = |name, kind, rows, heads, width, dtype| Case { name, kind, rows, heads, width, dtype };
    let silu = Kind::Gated(Gate::Silu);
    vec![
        case("rms_one_row", Kind::Rms, 1, 1, 1024, DType::Bf16),
        case("rms_odd", Kind::Rms, 3, 1, 37, DType::F32),
        case("rms_one_column", Kind::Rms, 5, 1, 1, DType::F32),
        case("rms_27b", Kind::Rms, 256, 1, 5120, DType::Bf16),
        case("add_rms_one_row", Kind::AddRms, 1, 1, 2048, DType::F32),
        case("add_rms_odd", Kind::AddRms, 7, 1, 513, DType::Bf16),
        case("add_rms_27b", Kind::AddRms, 256, 1, 5120, DType::Bf16),
        case("rms_fp8_odd", Kind::RmsFp8, 3, 1, 37, DType::F32),
        case("add_rms_fp8_one_row", Kind::AddRmsFp8, 1, 1, 2048, DType::F32),
        case("add_rms_fp8_27b", Kind::AddRmsFp8, 256, 1, 5120, DType::Bf16),
        case("add_odd", Kind::Add, 3, 1, 1001, DType::Bf16),
        case("add_27b", Kind::Add, 256, 1, 5120, DType::Bf16),
        case("gated_one_row", silu, 1, 16, 128, DType::Bf16),
        case("gated_odd", silu, 5, 3, 7, DType::F32),
        case("gated_sigmoid", Kind::Gated(Gate::Sigmoid), 9, 2, 32, DType::F32),
        case("gated_27b", silu, 256, 48, 128, DType::Bf16),
    ]
}

/// The least work of one call on `rows` rows of `heads x width` elements.
pub fn cost(kind: Kind, rows: usize, heads: usize, width: usize, dtype: DType) -> Cost {
    let elements = (rows * heads * width) as u64;
    // A code an element and a scale a row.
    let quantised = elements + rows as u64 * DType::F32.bytes();
    // (operations per element, activations read and written per element, f32 weights, other bytes)
    let (flops, moves, weights, others) = match kind {
        Kind::Rms => (5, 2, width, 0),
        Kind::AddRms => (6, 4, width, 0),
        Kind::RmsFp8 => (8, 1, width, quantised),
        Kind::AddRmsFp8 => (9, 3, width, quantised),
        Kind::Add => (1, 3, 0, 0),
        Kind::Gated(_) => (9, 3, width, 0),
    };
    Cost {
        flops: flops * elements,
        resident_bytes: 4 * weights as u64,
        activation_bytes: moves * elements * dtype.bytes() + others,
        unit: Unit::F32,
    }
}

/// `x * rsqrt(mean(x^2) + eps) * (1 + w)` over each row: x `[T, H]`, w f32 `[H]`; gives `[T, H]` activations.
pub fn rms(cx: &Cx, x: &Tensor, w: &Tensor, eps: f32, out: &'static str) -> Result<Tensor> {
    let (rows, width) = check::matrix(RMS, "x", x)?;
    check::tensor(RMS, "x", x, cx.numerics.activations, &[rows, width])?;
    check::tensor(RMS, "w", w, DType::F32, &[width])?;
    positive(RMS, eps)?;
    let mut y = cx.activation(RMS, out, &[rows, width])?;
    cx.note(RMS, cost(Kind::Rms, rows, 1, width, x.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(RMS, x.dtype(), E => {
            reference::norm::rms::<E>(x.host()?, w.host()?, eps, y.host_mut()?);
            Ok(y)
        }),
        Arm::Cuda(cuda) => {
            launch::norm::rms(cuda, x, w, eps, &mut y)?;
            Ok(y)
        }
        Arm::Plan => Ok(y),
    }
}

/// `residual += delta`, stored as activations, then [`rms`] of the stored rows: both `[T, H]`; gives `[T, H]`.
pub fn add_rms(
    cx: &Cx,
    residual: &mut Tensor,
    delta: &Tensor,
    w: &Tensor,
    eps: f32,
    out: &'static str,
) -> Result<Tensor> {
    let (rows, width) = check::matrix(ADD_RMS, "residual", residual)?;
    check::tensor(ADD_RMS, "residual", residual, cx.numerics.activations, &[rows, width])?;
    check::tensor(ADD_RMS, "delta", delta, cx.numerics.activations, &[rows, width])?;
    check::tensor(ADD_RMS, "w", w, DType::F32, &[width])?;
    positive(ADD_RMS, eps)?;
    let mut y = cx.activation(ADD_RMS, out, &[rows, width])?;
    cx.note(ADD_RMS, cost(Kind::AddRms, rows, 1, width, delta.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(ADD_RMS, delta.dtype(), E => {
            reference::norm::add::<E>(residual.host_mut()?, delta.host()?);
            reference::norm::rms::<E>(residual.host()?, w.host()?, eps, y.host_mut()?);
            Ok(y)
        }),
        Arm::Cuda(cuda) => {
            launch::norm::add_rms(cuda, residual, delta, w, eps, &mut y)?;
            Ok(y)
        }
        Arm::Plan => Ok(y),
    }
}

/// [`quantise`](crate::ops::quantise::quantise) of [`rms`] by a scale per row, codes and scales to the bit, without the
/// activations between: x `[T, H]`, w f32 `[H]`; gives codes `[T, H]` and scales `[T, 1]`.
pub fn rms_fp8(cx: &Cx, x: &Tensor, w: &Tensor, eps: f32) -> Result<Quantised> {
    let (rows, width) = check::matrix(RMS_FP8, "x", x)?;
    check::tensor(RMS_FP8, "x", x, cx.numerics.activations, &[rows, width])?;
    check::tensor(RMS_FP8, "w", w, DType::F32, &[width])?;
    positive(RMS_FP8, eps)?;
    let (mut codes, mut scales) = per_row(cx, RMS_FP8, rows, width)?;
    cx.note(RMS_FP8, cost(Kind::RmsFp8, rows, 1, width, x.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(RMS_FP8, x.dtype(), E => {
            reference::norm::rms_fp8::<E>(x.host()?, w.host()?, eps, codes.host_mut()?, scales.host_mut()?);
            Ok(())
        })?,
        Arm::Cuda(cuda) => launch::norm::rms_fp8(cuda, x, w, eps, &mut codes, &mut scales)?,
        Arm::Plan => {}
    }
    Ok(Quantised { codes, scales: Some(scales), form: Form::Fp8Token })
}

/// `residual += delta`, stored as activations, then [`rms_fp8`] of the stored rows: both `[T, H]`.
pub fn add_rms_fp8(cx: &Cx, residual: &mut Tensor, delta: &Tensor, w: &Tensor, eps: f32) -> Result<Quantised> {
    let (rows, width) = check::matrix(ADD_RMS_FP8, "residual", residual)?;
    check::tensor(ADD_RMS_FP8, "residual", residual, cx.numerics.activations, &[rows, width])?;
    check::tensor(ADD_RMS_FP8, "delta", delta, cx.numerics.activations, &[rows, width])?;
    check::tensor(ADD_RMS_FP8, "w", w, DType::F32, &[width])?;
    positive(ADD_RMS_FP8, eps)?;
    let (mut codes, mut scales) = per_row(cx, ADD_RMS_FP8, rows, width)?;
    cx.note(ADD_RMS_FP8, cost(Kind::AddRmsFp8, rows, 1, width, delta.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(ADD_RMS_FP8, delta.dtype(), E => {
            reference::norm::add::<E>(residual.host_mut()?, delta.host()?);
            reference::norm::rms_fp8::<E>(residual.host()?, w.host()?, eps, codes.host_mut()?, scales.host_mut()?);
            Ok(())
        })?,
        Arm::Cuda(cuda) => launch::norm::add_rms_fp8(cuda, residual, delta, w, eps, &mut codes, &mut scales)?,
        Arm::Plan => {}
    }
    Ok(Quantised { codes, scales: Some(scales), form: Form::Fp8Token })
}

/// Codes and scales of rows quantised by a scale each.
fn per_row(cx: &Cx, op: &'static str, rows: usize, width: usize) -> Result<(Tensor, Tensor)> {
    Ok((cx.alloc(op, "codes", DType::U8, &[rows, width])?, cx.alloc(op, "scales", DType::F32, &[rows, 1])?))
}

/// `residual += delta`, stored as activations: both `[T, H]`.
pub fn add(cx: &Cx, residual: &mut Tensor, delta: &Tensor) -> Result<()> {
    let (rows, width) = check::matrix(ADD, "residual", residual)?;
    check::tensor(ADD, "residual", residual, cx.numerics.activations, &[rows, width])?;
    check::tensor(ADD, "delta", delta, cx.numerics.activations, &[rows, width])?;
    cx.note(ADD, cost(Kind::Add, rows, 1, width, delta.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(ADD, delta.dtype(), E => {
            reference::norm::add::<E>(residual.host_mut()?, delta.host()?);
            Ok(())
        }),
        Arm::Cuda(cuda) => launch::norm::add(cuda, residual, delta),
        Arm::Plan => Ok(()),
    }
}

/// The norm of a GDN layer's output, gated: per head of `dv` elements `y = (o * rsqrt(mean(o^2) + eps) * w)`, rounded
/// to activations, times the gate of z. o `[T, heads*dv]`, z the same, w f32 `[dv]`; gives `[T, heads*dv]`.
pub fn gated(cx: &Cx, o: &Tensor, z: View, w: &Tensor, eps: f32, gate: Gate) -> Result<Tensor> {
    let (rows, cols) = check::matrix(GATED, "o", o)?;
    let width = w.len();
    if w.shape().len() != 1 || width == 0 || cols % width != 0 {
        return Err(Error::shape(GATED, format!("w is {:?}, must be [dv] with dv a divisor of {cols}", w.shape())));
    }
    check::tensor(GATED, "w", w, DType::F32, &[width])?;
    check::tensor(GATED, "o", o, cx.numerics.activations, &[rows, cols])?;
    check::view(GATED, "z", &z, cx.numerics.activations, rows, cols)?;
    positive(GATED, eps)?;
    let mut y = cx.activation(GATED, "y", &[rows, cols])?;
    cx.note(GATED, cost(Kind::Gated(gate), rows, cols / width, width, o.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(GATED, o.dtype(), E => {
            reference::norm::gated::<E>(o.host()?, z.host()?, w.host()?, eps, gate, y.host_mut()?);
            Ok(y)
        }),
        Arm::Cuda(cuda) => {
            launch::norm::gated(cuda, o, z, w, eps, gate, &mut y)?;
            Ok(y)
        }
        Arm::Plan => Ok(y),
    }
}

fn positive(op: &'static str, eps: f32) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(());
    }
    Err(Error::shape(op, format!("eps is {eps}, must be finite and not negative")))
}
