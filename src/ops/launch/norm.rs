//! Norms: a block a row, or a few lanes a head.

use super::grids::{THREADS, WARP, blocks, flag, int, long, per16, row_threads};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::ops::norm::Gate;
use crate::tensor::{Tensor, View};

const OP: &str = "norm";
/// Threads of a block of the gated norm: heads are short, and small blocks reach more of the card.
const GATED_THREADS: usize = 128;

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new(OP, "rms_bf16")]
}

/// Units of work of a row: runs of 16 bytes, or elements where they are no whole runs.
fn units(x: &Tensor, width: usize) -> usize {
    let run = per16(x.dtype());
    if width.is_multiple_of(run) { width / run } else { width }
}

/// A block for each row of `x`.
fn per_row(x: &Tensor) -> Result<Grid> {
    Ok(Grid::new([blocks(OP, x.rows(), 1)?, 1, 1], row_threads(units(x, x.cols()))))
}

/// `y = x rsqrt(mean(x^2) + eps) (1 + w)`.
pub(crate) fn rms(cuda: &Cuda, x: &Tensor, w: &Tensor, eps: f32, y: &mut Tensor) -> Result<()> {
    let args = [x.arg(), w.arg(), y.arg(), int(OP, x.cols())?, Arg::F32(eps)];
    cuda.launch(Kernel::new(OP, entry!(x.dtype(), "rms")), per_row(x)?, &args)
}

/// `residual += delta`, then [`rms`] of it.
pub(crate) fn add_rms(
    cuda: &Cuda,
    residual: &mut Tensor,
    delta: &Tensor,
    w: &Tensor,
    eps: f32,
    y: &mut Tensor,
) -> Result<()> {
    let args = [residual.arg(), delta.arg(), w.arg(), y.arg(), int(OP, residual.cols())?, Arg::F32(eps)];
    cuda.launch(Kernel::new(OP, entry!(residual.dtype(), "add_rms")), per_row(residual)?, &args)
}

/// [`rms`], quantised by a scale per row.
pub(crate) fn rms_fp8(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    eps: f32,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<()> {
    let args = [x.arg(), w.arg(), codes.arg(), scales.arg(), int(OP, x.cols())?, Arg::F32(eps)];
    cuda.launch(Kernel::new(OP, entry!(x.dtype(), "rms_fp8")), per_row(x)?, &args)
}

/// `residual += delta`, then [`rms_fp8`] of it.
pub(crate) fn add_rms_fp8(
    cuda: &Cuda,
    residual: &mut Tensor,
    delta: &Tensor,
    w: &Tensor,
    eps: f32,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<()> {
    let (width, eps) = (int(OP, residual.cols())?, Arg::F32(eps));
    let args = [residual.arg(), delta.arg(), w.arg(), codes.arg(), scales.arg(), width, eps];
    cuda.launch(Kernel::new(OP, entry!(residual.dtype(), "add_rms_fp8")), per_row(residual)?, &args)
}

/// `residual += delta`.
pub(crate) fn add(cuda: &Cuda, residual: &mut Tensor, delta: &Tensor) -> Result<()> {
    let per_block = THREADS * per16(residual.dtype());
    let grid = Grid::new([blocks(OP, residual.len(), per_block)?, 1, 1], THREADS as u32);
    let args = [residual.arg(), delta.arg(), long(residual.len())];
    cuda.launch(Kernel::new(OP, entry!(residual.dtype(), "add")), grid, &args)
}

/// `y = round(o rsqrt(mean(o^2) + eps) w) gate(z)` over heads of `w.len()`.
pub(crate) fn gated(cuda: &Cuda, o: &Tensor, z: View, w: &Tensor, eps: f32, gate: Gate, y: &mut Tensor) -> Result<()> {
    let width = w.len();
    let (rows, heads) = (o.rows(), o.cols() / width);
    let lanes = units(o, width).clamp(1, WARP).next_power_of_two();
    let grid = Grid::new([blocks(OP, rows * heads * lanes, GATED_THREADS)?, 1, 1], GATED_THREADS as u32);
    let args = [
        o.arg(),
        z.arg(),
        w.arg(),
        y.arg(),
        long(rows),
        int(OP, heads)?,
        int(OP, width)?,
        long(z.pitch()),
        Arg::F32(eps),
        flag(gate == Gate::Silu),
        Arg::I32(lanes as i32),
    ];
    cuda.launch(Kernel::new(OP, entry!(o.dtype(), "gated")), grid, &args)
}
