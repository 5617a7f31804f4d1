//! Seeded values for weights and state: element i of a stream is a function of (key, i) alone, so that any split over
//! rows, threads or devices writes the same bits.

use std::ops::Range;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Cx, reference, with_elem};
use crate::tensor::Tensor;

/// The op's name.
const OP: &str = "fill";

/// A shape every test and bench runs.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it is for.
    pub name: &'static str,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
}

/// The shapes worth trying: lone elements, rows that straddle a generator block, a matrix.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (name, rows, cols) in [
            ("one element", 1, 1),
            ("one row", 1, 257),
            ("rows that straddle a block", 7, 3),
            ("one column", 33, 1),
            ("a matrix", 96, 320),
        ] {
            cases.push(Case { name, rows, cols, dtype });
        }
    }
    cases
}

/// The cost of writing `elements` values.
pub fn cost(elements: usize, dtype: DType) -> Cost {
    // Ten rounds of two products and six other integer operations, over four elements, and one scaling.
    const FLOPS_PER_ELEMENT: u64 = 22;
    let elements = elements as u64;
    Cost {
        flops: elements * FLOPS_PER_ELEMENT,
        resident_bytes: elements * dtype.bytes(),
        activation_bytes: 0,
        unit: Unit::F32,
    }
}

/// Writes near-normal values of `mean` and `std` to rows `rows` of `dst`: value = mean + std x n, where n is element
/// `first_element` + (offset from the first element of `rows`) of the stream `key`, that is word `i % 4` of Philox
/// block `i / 4` through [`normal4`](crate::num::philox::normal4). Rounded to nearest even in `dst`'s type.
///
/// `dst` is f32 or bf16; a range outside its rows or a value that is not finite is an error.
pub fn normal(
    cx: &Cx,
    dst: &mut Tensor,
    rows: Range<usize>,
    key: [u32; 2],
    first_element: u64,
    mean: f32,
    std: f32,
) -> Result<()> {
    if !mean.is_finite() || !std.is_finite() || std < 0.0 {
        return Err(Error::shape(OP, format!("mean {mean}, std {std}: both must be finite, std not negative")));
    }
    let range = elements(dst, &rows, first_element)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, dst.dtype(), T => {
            reference::fill::normal(&mut dst.host_mut::<T>()?[range], key, first_element, mean, std);
            Ok(())
        }),
        Arm::Plan => Ok(()),
    }
}

/// Writes the natural logarithm of values uniform in (`low`, `high`] to rows `rows` of `dst`, numbered as in [`normal`]:
/// the usual start of a GDN layer's `A_log`. 0 <= low < high, both finite.
pub fn log_uniform(
    cx: &Cx,
    dst: &mut Tensor,
    rows: Range<usize>,
    key: [u32; 2],
    first_element: u64,
    low: f32,
    high: f32,
) -> Result<()> {
    // The smallest value drawn is low + (high - low) / 2^24, which must be a normal number for its logarithm.
    if !(low >= 0.0 && high.is_finite() && high - low > 1e-30) {
        return Err(Error::shape(OP, format!("uniform between {low} and {high}: must be 0 <= low < high, finite")));
    }
    let range = elements(dst, &rows, first_element)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, dst.dtype(), T => {
            reference::fill::log_uniform(&mut dst.host_mut::<T>()?[range], key, first_element, low, high);
            Ok(())
        }),
        Arm::Plan => Ok(()),
    }
}

/// Writes `value` to rows `rows` of `dst` (f32 or bf16).
pub fn constant(cx: &Cx, dst: &mut Tensor, rows: Range<usize>, value: f32) -> Result<()> {
    let range = elements(dst, &rows, 0)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, dst.dtype(), T => {
            reference::fill::constant(&mut dst.host_mut::<T>()?[range], value);
            Ok(())
        }),
        Arm::Plan => Ok(()),
    }
}

/// The elements of `rows`, once the range, the type and the stream's end are checked.
fn elements(dst: &Tensor, rows: &Range<usize>, first_element: u64) -> Result<Range<usize>> {
    if rows.start > rows.end || rows.end > dst.rows() {
        return Err(Error::shape(
            OP,
            format!("rows {}..{} of a tensor of shape {:?}", rows.start, rows.end, dst.shape()),
        ));
    }
    with_elem!(OP, dst.dtype(), T => { let _: Option<T> = None; Ok(()) })?;
    let cols = dst.cols();
    let range = rows.start * cols..rows.end * cols;
    if first_element.checked_add(range.len() as u64).is_none() {
        return Err(Error::shape(OP, format!("element {first_element} + {} is past the stream's end", range.len())));
    }
    Ok(range)
}
