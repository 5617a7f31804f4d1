//! Rows by index: the embedding of a step's tokens, and the rows that are sampled.
//!
//! An index outside its table is an error on the CPU arm and a row of NaN on a GPU, which cannot give one (the plan device
//! has no indices to look at).

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Batch, Cx, launch, reference};
use crate::tensor::Tensor;

/// The rows of `table` `[V, H]` (bf16 or f32) for the step's token ids, as `[T, H]` activations. No scale. Where an id is
/// outside `0..V`: an error that names the row and the id, or a row of NaN on a GPU.
pub fn embed(cx: &Cx, table: &Tensor, batch: &Batch) -> Result<Tensor> {
    const OP: &str = "embed";
    let err = |what: String| Err(Error::shape(OP, what));
    let (tokens, ids) = (batch.tokens(), &batch.inputs.tokens);
    let &[_, hidden] = table.shape() else {
        return err(format!("the table is {:?}, must be [vocabulary, hidden]", table.shape()));
    };
    if tokens == 0 || tokens > ids.len() || ids.dtype() != DType::I32 {
        return err(format!("{tokens} rows, {} ids of {}; must be 1 row or more, an i32 each", ids.len(), ids.dtype()));
    }
    if !matches!(
        (table.dtype(), cx.numerics.activations),
        (DType::F32, DType::F32) | (DType::Bf16, DType::F32 | DType::Bf16)
    ) {
        return err(format!(
            "the table is {}, activations are {}; must be a bf16 table, or both f32",
            table.dtype(),
            cx.numerics.activations
        ));
    }
    let mut out = cx.activation(OP, "embedding", &[tokens, hidden])?;
    cx.note(OP, cost(tokens, hidden, table.dtype(), out.dtype(), true));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::rows::gather(OP, "the vocabulary", table, ids, &mut out)?,
        Arm::Cuda(cuda) => launch::rows::gather(cuda, OP, table, ids, &mut out)?,
        Arm::Plan => {}
    }
    Ok(out)
}

/// Rows `rows[0..n]` of `x` `[T, H]`, in that order, repeats allowed, as `[n, H]` of the same type named `out`. An error
/// where `n` is 0 or more than there are indices; where an index is outside `0..T`, an error that names the row and T, or a
/// row of NaN on a GPU.
pub fn gather(cx: &Cx, x: &Tensor, rows: &Tensor, n: usize, out: &'static str) -> Result<Tensor> {
    const OP: &str = "gather";
    let err = |what: String| Err(Error::shape(OP, what));
    let &[_, hidden] = x.shape() else {
        return err(format!("x is {:?}, must be [T, hidden]", x.shape()));
    };
    if n == 0 || n > rows.len() || rows.dtype() != DType::I32 {
        return err(format!(
            "{n} rows of {} indices of {}; must be 1 row or more, an i32 each",
            rows.len(),
            rows.dtype()
        ));
    }
    let mut y = cx.alloc(OP, out, x.dtype(), &[n, hidden])?;
    cx.note(OP, cost(n, hidden, x.dtype(), x.dtype(), false));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::rows::gather(OP, "the window", x, rows, &mut y)?,
        Arm::Cuda(cuda) => launch::rows::gather(cuda, OP, x, rows, &mut y)?,
        Arm::Plan => {}
    }
    Ok(y)
}

/// `n` rows of `hidden` elements read as `from` and written as `to`, and their indices; `resident` where the rows are a
/// weight's.
pub fn cost(n: usize, hidden: usize, from: DType, to: DType, resident: bool) -> Cost {
    let elements = (n * hidden) as u64;
    let (read, written) = (elements * from.bytes(), elements * to.bytes() + n as u64 * DType::I32.bytes());
    Cost {
        flops: 0,
        resident_bytes: if resident { read } else { 0 },
        activation_bytes: if resident { written } else { read + written },
        unit: Unit::F32,
    }
}

/// A shape that tests and benches share.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What is special about it.
    pub name: &'static str,
    /// Rows of the table.
    pub table: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Indices.
    pub n: usize,
    /// The table's type.
    pub dtype: DType,
}

/// One row, an odd row length, more indices than rows, both types.
pub fn cases() -> Vec<Case> {
    let case = |name, table, hidden, n, dtype| Case { name, table, hidden, n, dtype };
    vec![
        case("one", 1, 1, 1, DType::F32),
        case("odd", 7, 33, 5, DType::F32),
        case("repeats", 3, 17, 64, DType::Bf16),
        case("step", 500, 1024, 129, DType::Bf16),
    ]
}
