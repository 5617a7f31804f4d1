//! `y = x Wᵀ`: a projection with the weight as checkpoints keep it, `[outputs, inputs]`, and no bias.
//!
//! Sums are f32 whatever the operands' types; the result is rounded once, to the output's type. No workspace: the
//! vendor library's constant workspace is not an op's, and the other kernels need none.

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Cx, reference};
use crate::tensor::{Tensor, View};

const OP: &str = "linear";

/// The shape of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of `x`: tokens.
    pub tokens: usize,
    /// Rows of the weight: output features.
    pub outputs: usize,
    /// Columns of the weight: input features.
    pub inputs: usize,
    /// The type of `x`.
    pub x: DType,
    /// The type of the weight.
    pub w: DType,
    /// The type of the result.
    pub out: DType,
}

/// `x` `[T, K]` times the transpose of `w` `[N, K]`, as `[T, N]` activations named `out`. `w` is bf16 or f32, and `x` f32
/// or as `w`; an error where the inner dimensions or the types disagree.
pub fn linear(cx: &Cx, x: View, w: &Tensor, out: &'static str) -> Result<Tensor> {
    linear_as(cx, x, w, out, cx.numerics.activations)
}

/// As [`linear`], with the result in `dtype` (f32 or bf16), e.g. that of the logits.
pub fn linear_as(cx: &Cx, x: View, w: &Tensor, out: &'static str, dtype: DType) -> Result<Tensor> {
    let shape = check(x, w, dtype)?;
    let mut y = cx.alloc(OP, out, dtype, &[shape.tokens, shape.outputs])?;
    cx.note(OP, cost(&shape));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::linear::linear(x, w, &mut y)?,
        Arm::Plan => {}
    }
    Ok(y)
}

/// One read of the weight, of `x`, and one write of the result; two operations per weight and row.
pub fn cost(shape: &Shape) -> Cost {
    let (t, n, k) = (shape.tokens as u64, shape.outputs as u64, shape.inputs as u64);
    let tensor_cores = shape.x == DType::Bf16 && shape.w == DType::Bf16;
    Cost {
        flops: 2 * t * n * k,
        resident_bytes: n * k * shape.w.bytes(),
        activation_bytes: t * k * shape.x.bytes() + t * n * shape.out.bytes(),
        unit: if tensor_cores { Unit::Bf16 } else { Unit::F32 },
    }
}

fn check(x: View, w: &Tensor, out: DType) -> Result<Shape> {
    let err = |what: String| Err(Error::shape(OP, what));
    let (tokens, inputs) = (x.rows(), x.cols());
    if x.from() + inputs > x.pitch() {
        return err(format!("x is columns {}..{} of a tensor of {}", x.from(), x.from() + inputs, x.pitch()));
    }
    let &[outputs, k] = w.shape() else {
        return err(format!("w is {:?}, must be [outputs, inputs]", w.shape()));
    };
    if k != inputs || tokens * outputs * k == 0 {
        return err(format!(
            "x is [{tokens}, {inputs}], w is [{outputs}, {k}]; must be [T, K] and [N, K], none of them 0"
        ));
    }
    if !matches!((x.dtype(), w.dtype()), (DType::F32, DType::F32 | DType::Bf16) | (DType::Bf16, DType::Bf16)) {
        return err(format!("x is {}, w is {}; must be f32 with f32 or bf16, or both bf16", x.dtype(), w.dtype()));
    }
    if !matches!(out, DType::F32 | DType::Bf16) {
        return err(format!("the result is to be {out}, must be f32 or bf16"));
    }
    Ok(Shape { tokens, outputs, inputs, x: x.dtype(), w: w.dtype(), out })
}

/// A shape that tests and benches share.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What is special about it.
    pub name: &'static str,
    /// The shape.
    pub shape: Shape,
}

/// One row, many rows, dimensions that no vector width divides, and projections of the small published models.
pub fn cases() -> Vec<Case> {
    use DType::{Bf16, F32};
    let case =
        |name, tokens, outputs, inputs, x, w, out| Case { name, shape: Shape { tokens, outputs, inputs, x, w, out } };
    vec![
        case("one", 1, 1, 1, F32, F32, F32),
        case("odd", 3, 5, 7, F32, F32, F32),
        case("odd-bf16", 9, 17, 33, Bf16, Bf16, Bf16),
        case("gate", 5, 1, 257, F32, Bf16, F32),
        case("tall", 131, 3, 1030, Bf16, Bf16, F32),
        case("wide", 2, 1031, 48, F32, Bf16, F32),
        case("decode", 1, 1024, 1024, Bf16, Bf16, Bf16),
        case("decode-f32", 1, 1024, 1024, F32, F32, F32),
        case("batch", 8, 1024, 1024, Bf16, Bf16, Bf16),
        case("prefill", 256, 1024, 1024, Bf16, Bf16, Bf16),
        case("prefill-f32", 256, 1024, 1024, F32, F32, F32),
        case("down", 64, 1024, 3584, F32, Bf16, F32),
    ]
}
