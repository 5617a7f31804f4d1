//! FP8 products of many rows on Hopper: the launches of kernels/fp8_hopper.cu.

use super::grids::int;
use crate::device::DeviceSpec;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;

const OP: &str = "linear";
/// The file's stem, and its entry.
pub(super) const MODULE: &str = "fp8_hopper";
/// Rows of x, rows of W and bytes along K of a tile, and the stages of its ring, as the kernel has them.
const TILE_M: usize = 128;
const TILE_N: usize = 256;
const TILE_K: usize = 128;
const STAGES: usize = 4;
/// One warp group copies, two multiply.
const THREADS: u32 = 384;

/// The kernel, sums kept in the tensor cores' accumulators.
pub(super) const fn kernel() -> Kernel {
    Kernel::new(MODULE, MODULE).define("PROMOTE", 0)
}

/// Rows of codes; `pitch` bytes from one to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix {
    pub(super) codes: Arg,
    pub(super) rows: usize,
    pub(super) pitch: usize,
}

impl Matrix {
    /// Its first `cols` bytes a row, in boxes of so many rows and bytes.
    pub(super) fn map(&self, cuda: &Cuda, cols: usize, boxed: [usize; 2]) -> Result<Arg> {
        cuda.tensor_map(self.codes, [self.rows as u64, cols as u64], self.pitch as u64, boxed.map(|size| size as u32))
    }
}

/// A scale for each row of x (or, where that is null, one for all), and one for each row of W.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales {
    pub(super) x: Arg,
    pub(super) x_of_all: f32,
    pub(super) w: Arg,
}

/// y (bf16, `pitch` elements a row) = x Wᵀ under scales, with `n` rows of W and `k` columns.
pub(super) fn product(
    cuda: &Cuda,
    spec: &DeviceSpec,
    [x, w]: &[Matrix; 2],
    scales: &Scales,
    (y, pitch): (Arg, usize),
    (n, k): (usize, usize),
) -> Result<()> {
    let stage = (TILE_M + TILE_N) * TILE_K;
    let shared = STAGES * (stage + 2 * size_of::<u64>()) + 2 * TILE_N * size_of::<f32>();
    let tiles = x.rows.div_ceil(TILE_M).saturating_mul(n.div_ceil(TILE_N));
    let grid = Grid::new([tiles.min(spec.sms as usize) as u32, 1, 1], THREADS).shared(shared as u32);
    let (pitch, one) = (Arg::I64(pitch as i64), Arg::F32(scales.x_of_all));
    let sizes = [int(OP, x.rows)?, int(OP, n)?, int(OP, k)?];
    let head =
        [x.map(cuda, k, [TILE_M, TILE_K])?, w.map(cuda, k, [TILE_N, TILE_K])?, y, pitch, scales.x, one, scales.w];
    cuda.launch(kernel(), grid, &[&head[..], &sizes].concat())
}
