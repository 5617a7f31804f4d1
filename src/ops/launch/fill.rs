//! Seeded values: a thread makes 8 windows of 16 bytes, of which the first block's may begin before the range.

use super::grids::{MAX_Y, THREADS, blocks, blocks_y, flag};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::num::DType;
use crate::ops::fill::{Code, Primed};
use crate::tensor::Tensor;
use std::ops::Range;

const OP: &str = "fill";
/// Windows of 16 bytes that a thread of kernels/fill.cu makes.
const WINDOWS: usize = 8;

const fn kernel(entry: &'static str) -> Kernel {
    Kernel::new("fill", entry).no_fma()
}

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![kernel("normal_bf16")]
}

/// Launches `kernel` on elements `range` of `dst`: its address and length come before `args`.
fn launch(cuda: &Cuda, kernel: Kernel, dst: &Tensor, range: &Range<usize>, args: &[Arg]) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    // One more than the bytes fill: the range may begin inside a window.
    let windows = (range.len() as u64 * dst.dtype().bytes()).div_ceil(16) as usize + 1;
    let grid = Grid::new([blocks(OP, windows, THREADS * WINDOWS)?, 1, 1], THREADS as u32);
    let head = [dst.arg_at(range.start), Arg::I64(range.len() as i64)];
    cuda.launch(kernel, grid, &[&head, args].concat())
}

/// `mean + std n`, rounded to bf16 first where `bf16_first`.
pub(crate) fn normal(
    cuda: &Cuda,
    dst: &mut Tensor,
    range: &Range<usize>,
    key: [u32; 2],
    first: u64,
    (mean, std): (f32, f32),
    bf16_first: bool,
) -> Result<()> {
    let [k0, k1] = key.map(Arg::U32);
    let args = [k0, k1, Arg::U64(first), Arg::F32(mean), Arg::F32(std), flag(bf16_first)];
    launch(cuda, kernel(entry!(dst.dtype(), "normal")), dst, range, &args)
}

/// `ln` of values uniform in (`low`, `high`].
pub(crate) fn log_uniform(
    cuda: &Cuda,
    dst: &mut Tensor,
    range: &Range<usize>,
    key: [u32; 2],
    first: u64,
    low: f32,
    high: f32,
) -> Result<()> {
    let [k0, k1] = key.map(Arg::U32);
    let args = [k0, k1, Arg::U64(first), Arg::F32(low), Arg::F32(high - low)];
    launch(cuda, kernel(entry!(dst.dtype(), "log_uniform")), dst, range, &args)
}

/// One value everywhere.
pub(crate) fn constant(cuda: &Cuda, dst: &mut Tensor, range: &Range<usize>, value: f32) -> Result<()> {
    launch(cuda, kernel(entry!(dst.dtype(), "constant")), dst, range, &[Arg::F32(value)])
}

/// Codes from the start of the stream.
pub(crate) fn codes(cuda: &Cuda, dst: &mut Tensor, range: &Range<usize>, key: [u32; 2], code: Code) -> Result<()> {
    let entry = match code {
        Code::E4m3 => "codes_e4m3",
        Code::E2m1 => "codes_e2m1",
        Code::ScaleE4m3 => "codes_scale_e4m3",
    };
    launch(cuda, kernel(entry), dst, range, &key.map(Arg::U32))
}

/// f32 scales from the start of the stream; `unit` is 2^(exponent - 7).
pub(crate) fn scales(cuda: &Cuda, dst: &mut Tensor, range: &Range<usize>, key: [u32; 2], unit: f32) -> Result<()> {
    debug_assert_eq!(dst.dtype(), DType::F32);
    let [k0, k1] = key.map(Arg::U32);
    launch(cuda, kernel("scales_f32"), dst, range, &[k0, k1, Arg::F32(unit)])
}

/// The rows of the targets as `PrimeTarget`s of kernels/fill.cu: fourteen 32-bit words each.
pub(crate) fn table(targets: &[Primed]) -> Vec<u32> {
    let mut words = Vec::with_capacity(targets.len() * 14);
    let mut from = 0;
    for Primed { dst, rows, key, std, scale } in targets {
        let kind = match dst.dtype() {
            DType::F32 => 0,
            DType::Bf16 => 1,
            _ => 2,
        };
        for long in [dst.buffer().address(), dst.cols() as u64, from, rows.len() as u64] {
            words.extend([long as u32, (long >> 32) as u32]);
        }
        words.extend([key[0], key[1], std.to_bits(), scale.to_bits(), kind, 0]);
        from += rows.len() as u64;
    }
    words
}

/// Draws the rows that `table` names.
pub(crate) fn prime(cuda: &Cuda, targets: &[Primed], table: &Tensor, rows: &Tensor) -> Result<()> {
    let bytes = targets.iter().map(|t| t.dst.cols() as u64 * t.dst.dtype().bytes()).max().unwrap_or(0);
    let x = blocks(OP, bytes.div_ceil(16) as usize + 1, THREADS * WINDOWS)?;
    let y = targets.iter().map(|t| t.rows.len()).max().unwrap_or(0).min(MAX_Y) as u32;
    let z = blocks_y(OP, targets.len(), 1)?;
    cuda.launch(kernel("prime"), Grid::new([x, y, z], THREADS as u32), &[table.arg(), rows.arg()])
}
