//! Products of many bf16 rows with NVFP4 weights on Hopper: the shape and the launch of kernels/nvfp4_hopper.cu.

use super::grids::{flag, int};
use super::hopper::Matrix;
use crate::device::DeviceSpec;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;
use crate::ops::weight::NVFP4_GROUP;

const OP: &str = "linear";
/// The file's stem, and its entry.
pub(super) const MODULE: &str = "nvfp4_hopper";
/// The fewest rows of x that it takes.
const FEWEST_TOKENS: usize = 65;
/// Columns of W of a stage, in whose multiples it multiplies.
const BLOCK_K: usize = 256;
/// Bytes of a row of x, or of codes, in a stage.
const ROW_BYTES: usize = 128;
/// Rows of W of a tile.
const ROWS: usize = 128;
/// Bytes of all stages of x, at most; stages of W.
const X_BYTES: usize = 160 << 10;
const W_STAGES: usize = 2;
/// Tokens that each of two warp groups stores at a time.
const STORED: usize = 64;
/// One warp group copies, two multiply.
const THREADS: u32 = 384;
/// Tokens of the smallest tile.
const SMALLEST: usize = 128;
/// Tokens of a tile, and what of the time of the largest one takes, measured on an H200.
const TILES: [(usize, f64); 3] = [(256, 1.0), (192, 0.87), (SMALLEST, 0.73)];

/// Whether it multiplies so many rows of x with `rows` rows of W: of what it can, what keeps a third of the multiprocessors
/// busy. With fewer, tiles that split K among warps win on an H200.
pub(crate) fn takes(spec: &DeviceSpec, tokens: usize, rows: usize, cols: usize) -> bool {
    let tiles = tokens.div_ceil(SMALLEST).saturating_mul(rows.div_ceil(ROWS));
    tokens >= FEWEST_TOKENS && cols.is_multiple_of(BLOCK_K) && tiles.saturating_mul(3) >= spec.sms as usize
}

/// The tokens of a tile that make the rounds of all tiles shortest.
pub(super) fn tile(spec: &DeviceSpec, tokens: usize, rows: usize) -> usize {
    let time = |(tile, time): (usize, f64)| {
        let rounds = (tokens.div_ceil(tile) * rows.div_ceil(ROWS)).div_ceil(spec.sms as usize);
        (rounds as f64 * time, tile)
    };
    let [first, rest @ ..] = TILES.map(time);
    rest.into_iter().fold(first, |best, next| if next.0 < best.0 { next } else { best }).1
}

/// The kernel with tiles of so many tokens.
fn kernel(tile: usize) -> Kernel {
    Kernel::new(MODULE, MODULE).define("TOKENS", tile as i32)
}

/// Under every tile.
pub(super) fn kernels() -> [Kernel; 3] {
    TILES.map(|(tile, _)| kernel(tile))
}

/// Bytes of dynamic shared memory: `Shared` of the kernel.
fn shared(tile: usize) -> usize {
    let x_stages = X_BYTES / (tile * ROW_BYTES);
    let w_stage = ROWS * (ROW_BYTES + BLOCK_K / NVFP4_GROUP);
    let barriers = 2 * (x_stages + W_STAGES) * size_of::<u64>();
    x_stages * tile * ROW_BYTES + W_STAGES * w_stage + 2 * STORED * ROW_BYTES + barriers
}

/// An NVFP4 weight: codes, scales of groups, globals of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weight {
    pub(super) codes: Arg,
    pub(super) scales: Arg,
    pub(super) globals: Arg,
    pub(super) divides: bool,
}

/// y (bf16, `pitch` elements a row) = x Wᵀ times `x_scale`, with `n` rows of W and `k` columns, in tiles from [`tile`].
pub(super) fn product(
    cuda: &Cuda,
    spec: &DeviceSpec,
    (x, x_scale): (&Matrix, f32),
    w: &Weight,
    (y, pitch): (Arg, usize),
    (n, k): (usize, usize),
    tile: usize,
) -> Result<()> {
    let of_w = |codes, cols| Matrix { codes, rows: n, pitch: cols };
    let maps = [
        x.map(cuda, 2 * k, [tile, ROW_BYTES])?,
        of_w(w.codes, k / 2).map(cuda, k / 2, [ROWS, ROW_BYTES])?,
        of_w(w.scales, k / NVFP4_GROUP).map(cuda, k / NVFP4_GROUP, [ROWS, BLOCK_K / NVFP4_GROUP])?,
    ];
    let tiles = x.rows.div_ceil(tile).saturating_mul(n.div_ceil(ROWS));
    let grid = Grid::new([tiles.min(spec.sms as usize) as u32, 1, 1], THREADS).shared(shared(tile) as u32);
    let scales = [Arg::F32(x_scale), w.globals, flag(w.divides)];
    let rest = [y, Arg::I64(pitch as i64), int(OP, x.rows)?, int(OP, n)?, int(OP, k)?];
    cuda.launch(kernel(tile), grid, &[&maps[..], &scales, &rest].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cards;
    use crate::ops::launch::tiles::shared_limit;

    #[test]
    fn every_tile_fits_a_block_and_is_the_best_somewhere() {
        let spec = cards::find("h200").unwrap();
        for (tile, _) in TILES {
            assert!(shared(tile) <= shared_limit(spec.arch), "{tile}");
        }
        for (tokens, rows, best) in
            [(8192, 34_816, 256), (512, 34_816, 256), (384, 34_816, 192), (1024, 5120, 192), (128, 5120, 128)]
        {
            assert_eq!(tile(&spec, tokens, rows), best, "{tokens} x {rows}");
        }
    }

    #[test]
    fn few_tiles_are_left_to_others() {
        let spec = cards::find("h200").unwrap();
        for (tokens, rows, cols, taken) in [
            (64, 34_816, 5120, false),
            (65, 34_816, 5120, true),
            (128, 5120, 17_408, false),
            (129, 5120, 17_408, true),
            (512, 1024, 2048, false),
            (1024, 1024, 2048, true),
            (1024, 1024, 2112, false),
        ] {
            assert_eq!(takes(&spec, tokens, rows, cols), taken, "{tokens} x {rows} x {cols}");
        }
    }
}
