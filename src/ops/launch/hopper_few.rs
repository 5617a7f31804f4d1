//! FP8 products of few rows on Hopper: the shape and the launch of kernels/fp8_hopper_few.cu.

use super::grids::int;
use super::hopper::{Matrix, Scales};
use super::tiles::shared_limit;
use crate::device::DeviceSpec;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;

const OP: &str = "linear";
/// The file's stem, and its entry.
pub(super) const MODULE: &str = "fp8_hopper_few";
/// The most rows of x it takes.
pub(super) const MOST_TOKENS: usize = 128;
/// Bytes along K of a box, as the kernel has them.
const TILE_K: usize = 128;
/// Rows of W of one product.
const PRODUCT_ROWS: usize = 64;
/// Rows of W are copied in groups of so many: the unit of the swizzle.
const ROW_UNIT: usize = 8;
/// Four warps multiply, one copies.
const THREADS: u32 = 160;
/// More stages than this keep no more bytes in flight than a multiprocessor gets.
const MOST_STAGES: usize = 16;

/// How a product is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Columns of a product, at least the tokens.
    tokens: usize,
    /// Rows of W that a block takes at a time.
    rows: usize,
    /// Of the ring.
    stages: usize,
    blocks: usize,
}

impl Cut {
    fn row_tiles(&self) -> usize {
        self.rows.div_ceil(PRODUCT_ROWS)
    }

    pub(super) fn kernel(&self) -> Kernel {
        let (tokens, row_tiles) = (self.tokens as i32, self.row_tiles() as i32);
        Kernel::new(MODULE, MODULE).define("TOKENS", tokens).define("ROW_TILES", row_tiles)
    }

    /// `box_bytes` of the kernel.
    fn box_bytes(&self) -> usize {
        (self.rows + self.tokens) * TILE_K
    }

    /// `stage_bytes` of the kernel.
    fn stage_bytes(&self) -> usize {
        if self.tokens <= 16 { 4 * self.box_bytes() } else { 2 * self.box_bytes() }
    }

    /// Bytes of the sums and barriers behind the ring; the last product of the last box reads past it too.
    fn behind(&self) -> usize {
        let pitch = (self.rows + 11) / 16 * 16 + 4;
        let sums = self.tokens * pitch * size_of::<f32>() + 2 * MOST_STAGES * size_of::<u64>();
        sums.max((self.row_tiles() * PRODUCT_ROWS * TILE_K).saturating_sub(self.box_bytes()))
    }

    fn shared(&self) -> usize {
        self.stages * self.stage_bytes() + self.behind()
    }
}

/// Most rows of W of a block at a time: so that two stages have room, and the sums stay in registers.
fn most_rows(tokens: usize) -> usize {
    match tokens {
        ..=16 => 3 * PRODUCT_ROWS,
        17..=64 => 4 * PRODUCT_ROWS,
        _ => PRODUCT_ROWS,
    }
}

/// The cut that gives every multiprocessor as many rows of W, in as few rounds as hold them.
pub(super) fn cut(spec: &DeviceSpec, tokens: usize, rows: usize) -> Cut {
    let (sms, columns) = (spec.sms as usize, tokens.next_power_of_two().max(8));
    let rounds = rows.div_ceil(sms * most_rows(columns));
    let rows_at_once = rows.div_ceil(sms * rounds).next_multiple_of(ROW_UNIT);
    let blocks = rows.div_ceil(rows_at_once).min(sms);
    let mut cut = Cut { tokens: columns, rows: rows_at_once, stages: 0, blocks };
    let room = shared_limit(spec.arch).saturating_sub(cut.behind());
    cut.stages = (room / cut.stage_bytes()).min(MOST_STAGES);
    cut
}

/// y (bf16, `pitch` elements a row) = x Wᵀ under scales, with `n` rows of W and `k` columns, and at most [`MOST_TOKENS`] of x.
pub(super) fn product(
    cuda: &Cuda,
    spec: &DeviceSpec,
    [x, w]: &[Matrix; 2],
    scales: &Scales,
    (y, pitch): (Arg, usize),
    (n, k): (usize, usize),
) -> Result<()> {
    let cut = cut(spec, x.rows, n);
    let grid = Grid::new([cut.blocks as u32, 1, 1], THREADS).shared(cut.shared() as u32);
    let (pitch, one) = (Arg::I64(pitch as i64), Arg::F32(scales.x_of_all));
    let sizes = [x.rows, n, k, cut.rows, cut.stages];
    let sizes = sizes.into_iter().map(|size| int(OP, size)).collect::<Result<Vec<_>>>()?;
    let head =
        [x.map(cuda, k, [cut.tokens, TILE_K])?, w.map(cuda, k, [cut.rows, TILE_K])?, y, pitch, scales.x, one, scales.w];
    cuda.launch(cut.kernel(), grid, &[&head[..], &sizes].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cards;

    #[test]
    fn every_cut_covers_the_rows_and_fits_a_block() {
        let h200 = cards::find("h200").unwrap();
        for sms in [1, 2, 114, 132] {
            let spec = DeviceSpec { sms, ..h200.clone() };
            for tokens in [1, 7, 8, 9, 16, 17, 33, 64, 65, 128] {
                for rows in [1, 8, 130, 5120, 34_816, 248_320] {
                    let cut = cut(&spec, tokens, rows);
                    let what = format!("{tokens} x {rows} on {sms}: {cut:?}");
                    assert!(cut.tokens >= tokens && cut.tokens >= 8 && cut.rows.is_multiple_of(ROW_UNIT), "{what}");
                    assert!(cut.rows <= most_rows(cut.tokens) && cut.rows <= 256, "{what}");
                    assert!(cut.stages >= 2 && cut.shared() <= shared_limit(spec.arch), "{what}");
                    assert!(cut.blocks <= sms as usize && cut.blocks * cut.rows <= rows + sms as usize * 8, "{what}");
                }
            }
        }
    }

    #[test]
    fn wide_and_narrow_layers_keep_nearly_every_multiprocessor_busy() {
        let spec = cards::find("h200").unwrap();
        for tokens in [1, 64] {
            for rows in [34_816, 5120, 16_384, 14_336] {
                let cut = cut(&spec, tokens, rows);
                let tiles = rows.div_ceil(cut.rows);
                let last = tiles % spec.sms as usize;
                assert!(cut.blocks >= 120 && (last == 0 || last >= 120), "{tokens} x {rows}: {cut:?}, {tiles} tiles");
            }
        }
    }
}
