//! Grids and arguments that several ops' launches have in common, each checked against what a launch can hold.

use crate::device::cuda::{Arg, Grid};
use crate::error::{Error, Result};
use crate::num::DType;

/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Threads of a block where nothing else decides.
pub(super) const THREADS: usize = 256;
/// The most blocks along y and z.
pub(super) const MAX_Y: usize = 65_535;

/// Elements of 16 bytes.
pub(super) fn per16(dtype: DType) -> usize {
    (16 / dtype.bytes()) as usize
}

/// Blocks along x for `items` of `per_block` each; an error past 2^31 - 1, which no step comes near.
pub(super) fn blocks(op: &'static str, items: usize, per_block: usize) -> Result<u32> {
    let blocks = items.div_ceil(per_block);
    i32::try_from(blocks).map(|b| b as u32).map_err(|_| too_large(op, blocks, "blocks"))
}

/// As [`blocks`], along y.
pub(super) fn blocks_y(op: &'static str, items: usize, per_block: usize) -> Result<u32> {
    let blocks = items.div_ceil(per_block);
    if blocks <= MAX_Y { Ok(blocks as u32) } else { Err(too_large(op, blocks, "blocks along y")) }
}

/// A number as a kernel's `int`.
pub(super) fn int(op: &'static str, value: usize) -> Result<Arg> {
    i32::try_from(value).map(Arg::I32).map_err(|_| too_large(op, value, "elements along one dimension"))
}

/// A number as a kernel's `int64_t`.
pub(super) fn long(value: usize) -> Arg {
    Arg::I64(value as i64)
}

/// A truth as a kernel's `int`.
pub(super) fn flag(value: bool) -> Arg {
    Arg::I32(i32::from(value))
}

fn too_large(op: &'static str, value: usize, what: &str) -> Error {
    Error::Unsupported { what: format!("{op} with {value} {what}"), supported: "fewer on a card".into() }
}

/// `rows` of `units` units of work as `row_share` of kernels/lib/vector.cuh cuts them: the grid, and the kernel's `shift`.
pub(super) fn row_share(op: &'static str, rows: usize, units: usize) -> Result<(Grid, Arg)> {
    let threads = units.clamp(1, THREADS).next_power_of_two();
    let x = blocks(op, rows, THREADS / threads)?;
    // Where y ends, a thread takes more units.
    let y = units.div_ceil(threads).min(MAX_Y) as u32;
    Ok((Grid::new([x, y, 1], THREADS as u32), Arg::I32(threads.trailing_zeros() as i32)))
}

/// Threads for one row of `units` units of work: whole warps, two units a thread where there are enough.
pub(super) fn row_threads(units: usize) -> u32 {
    const MOST: usize = 1024;
    units.div_ceil(2).next_multiple_of(WARP).clamp(WARP, MOST) as u32
}
