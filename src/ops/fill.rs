//! Seeded values for weights and state: element i of a stream is a function of (key, i) alone, so that any split over
//! rows, threads or devices writes the same bits.
//!
//! Quantised codes are the same near-normal integers n = (sum of the four bytes of word i) - 510, standard deviation
//! 147.8, rounded to the code's own grid in integer arithmetic: see [`Code`].

use std::ops::Range;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Cx, launch, reference, with_elem};
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
    draw(cx, dst, rows, key, first_element, mean, std, false)
}

/// [`normal`], each value rounded to bf16 first and kept in `dst`'s type: what a bf16 checkpoint holds, read as f32.
pub fn normal_bf16(
    cx: &Cx,
    dst: &mut Tensor,
    rows: Range<usize>,
    key: [u32; 2],
    first_element: u64,
    mean: f32,
    std: f32,
) -> Result<()> {
    draw(cx, dst, rows, key, first_element, mean, std, true)
}

/// Both of the above; `bf16_first` tells them apart.
fn draw(
    cx: &Cx,
    dst: &mut Tensor,
    rows: Range<usize>,
    key: [u32; 2],
    first_element: u64,
    mean: f32,
    std: f32,
    bf16_first: bool,
) -> Result<()> {
    if !mean.is_finite() || !std.is_finite() || std < 0.0 {
        return Err(Error::shape(OP, format!("mean {mean}, std {std}: both must be finite, std not negative")));
    }
    let range = elements(dst, &rows, first_element)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(OP, dst.dtype(), T => {
            let values = &mut dst.host_mut::<T>()?[range];
            if bf16_first {
                reference::fill::normal_bf16(values, key, first_element, mean, std);
            } else {
                reference::fill::normal(values, key, first_element, mean, std);
            }
            Ok(())
        }),
        Arm::Cuda(cuda) => launch::fill::normal(cuda, dst, &range, key, first_element, (mean, std), bf16_first),
        Arm::Plan => Ok(()),
    }
}

/// Rows of one tensor of state, to be drawn by [`prime`].
#[derive(Debug)]
pub struct Primed<'a> {
    /// f32, bf16, or u8: e4m3 codes under `scale`.
    pub dst: &'a mut Tensor,
    /// Rows of `dst`; the j-th takes elements from j x columns on of the stream.
    pub rows: &'a [i32],
    /// The stream.
    pub key: [u32; 2],
    /// Standard deviation.
    pub std: f32,
    /// What codes are multiplied by; 1 for floats.
    pub scale: f32,
}

/// Writes near-normal values of mean 0 to rows of many tensors: as [`normal`] of each row, in one launch on a card. A row
/// outside its tensor is an error.
pub fn prime(cx: &Cx, targets: &mut [Primed]) -> Result<()> {
    for target in &*targets {
        let rows = target.dst.rows();
        if let Some(row) = target.rows.iter().find(|row| usize::try_from(**row).map_or(true, |row| row >= rows)) {
            return Err(Error::shape(OP, format!("row {row} of a tensor of shape {:?}", target.dst.shape())));
        }
        if !matches!(target.dst.dtype(), DType::F32 | DType::Bf16 | DType::U8) {
            return Err(Error::shape(OP, format!("{} cannot be primed, must be f32, bf16 or u8", target.dst.dtype())));
        }
        cx.note(OP, cost(target.rows.len() * target.dst.cols(), target.dst.dtype()));
    }
    match cx.device.arm() {
        Arm::Cpu(_) => targets.iter_mut().try_for_each(reference::fill::prime),
        Arm::Cuda(cuda) => {
            let rows: Vec<i32> = targets.iter().flat_map(|target| target.rows).copied().collect();
            if rows.is_empty() {
                return Ok(());
            }
            let rows = cx.ints(OP, "rows", &rows)?;
            let table = launch::fill::table(targets);
            let mut buffer = cx.alloc(OP, "targets", DType::U8, &[table.len() * size_of::<u32>()])?;
            buffer.write(0, &table)?;
            launch::fill::prime(cuda, targets, &buffer, &rows)
        }
        Arm::Plan => Ok(()),
    }
}

/// What the bytes of a quantised weight are drawn as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// An e4m3 code a byte: n / 2 rounded to nearest even, so at most 256 in magnitude and never a NaN.
    E4m3,
    /// Two e2m1 codes a byte, element 2j in the low nibble of byte j: n / 44 rounded to nearest even, at most 6.
    E2m1,
    /// A positive e4m3 scale a byte: code 0x6C + (word >> 28), that is 96 to 352.
    ScaleE4m3,
}

impl Code {
    /// Elements of the stream that one byte takes.
    pub fn elements(self) -> u64 {
        match self {
            Code::E4m3 | Code::ScaleE4m3 => 1,
            Code::E2m1 => 2,
        }
    }
}

/// Writes codes to rows `rows` of `dst` (u8): byte j of those rows takes the elements of the stream `key` that start at
/// `code.elements() x j`.
pub fn codes(cx: &Cx, dst: &mut Tensor, rows: Range<usize>, key: [u32; 2], code: Code) -> Result<()> {
    if dst.dtype() != DType::U8 {
        return Err(Error::shape(OP, format!("codes into {}, must be u8", dst.dtype())));
    }
    let range = span(dst, &rows)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            reference::fill::codes(&mut dst.host_mut::<u8>()?[range], key, 0, code);
            Ok(())
        }
        Arm::Cuda(cuda) => launch::fill::codes(cuda, dst, &range, key, code),
        Arm::Plan => Ok(()),
    }
}

/// Writes positive scales to rows `rows` of `dst` (f32): element j is (1 + m / 128) x 2^`exponent` with m = word >> 25
/// of element j of the stream `key`, a value that bf16 holds exactly. `exponent` from -100 to 100.
pub fn scales(cx: &Cx, dst: &mut Tensor, rows: Range<usize>, key: [u32; 2], exponent: i32) -> Result<()> {
    if dst.dtype() != DType::F32 || !(-100..=100).contains(&exponent) {
        let what = format!("scales x 2^{exponent} into {}, must be f32 and -100 to 100", dst.dtype());
        return Err(Error::shape(OP, what));
    }
    let range = span(dst, &rows)?;
    cx.note(OP, cost(range.len(), dst.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            reference::fill::scales(&mut dst.host_mut::<f32>()?[range], key, 0, exponent);
            Ok(())
        }
        Arm::Cuda(cuda) => launch::fill::scales(cuda, dst, &range, key, reference::fill::pow2(exponent - 7)),
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
        Arm::Cuda(cuda) => launch::fill::log_uniform(cuda, dst, &range, key, first_element, low, high),
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
        Arm::Cuda(cuda) => launch::fill::constant(cuda, dst, &range, value),
        Arm::Plan => Ok(()),
    }
}

/// The elements of `rows`, once the range, the type and the stream's end are checked.
fn elements(dst: &Tensor, rows: &Range<usize>, first_element: u64) -> Result<Range<usize>> {
    with_elem!(OP, dst.dtype(), T => { let _: Option<T> = None; Ok(()) })?;
    let range = span(dst, rows)?;
    if first_element.checked_add(range.len() as u64).is_none() {
        return Err(Error::shape(OP, format!("element {first_element} + {} is past the stream's end", range.len())));
    }
    Ok(range)
}

/// The elements of `rows`, once they are rows of `dst`.
fn span(dst: &Tensor, rows: &Range<usize>) -> Result<Range<usize>> {
    if rows.start > rows.end || rows.end > dst.rows() {
        return Err(Error::shape(
            OP,
            format!("rows {}..{} of a tensor of shape {:?}", rows.start, rows.end, dst.shape()),
        ));
    }
    let cols = dst.cols();
    Ok(rows.start * cols..rows.end * cols)
}
