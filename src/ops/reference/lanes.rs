//! Sums along a row in f32, in 16 lanes: one order for every op that has such a sum.
//!
//! Lane `l` adds the products `l, l+16, l+32, …` in that order, from zero; then lanes `l` and `l+8` are added, then `l` and
//! `l+4`, `l` and `l+2`, `l` and `l+1`. The order depends on nothing else: [`dot`] and [`multiply`] give the same bits.

use crate::tensor::Elem;

/// Lanes of one sum.
pub(super) const LANES: usize = 16;
/// One value per lane.
pub(super) type Lanes = [f32; LANES];
/// Left rows of a full tile.
pub(super) const TILE_ROWS: usize = 4;
/// Right rows of a tile of [`TILE_ROWS`].
const TILE_COLS: usize = 2;
/// Right rows of a tile of one left row: as many chains of additions as hide their latency.
const ROW_COLS: usize = 4;
/// Lanes in registers at a time: a tile's sums fill half of the sixteen 128-bit registers of baseline x86-64.
const GROUP: usize = 4;

/// Widens `from` to f32 in whole lanes, the last padded with zeros.
pub(super) fn pack<E: Elem>(from: &[E], to: &mut [Lanes]) {
    for (from, to) in from.chunks(LANES).zip(to) {
        if from.len() < LANES {
            *to = [0.0; LANES];
        }
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }
}

/// The dot product of two rows of one length.
pub(super) fn dot<X: Elem, W: Elem>(x: &[X], w: &[W]) -> f32 {
    let mut sums = [0.0; LANES];
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    let (w_blocks, w_rest) = w.as_chunks::<LANES>();
    for (x, w) in x_blocks.iter().zip(w_blocks) {
        for l in 0..LANES {
            sums[l] += x[l].to_f32() * w[l].to_f32();
        }
    }
    for ((sum, x), w) in sums.iter_mut().zip(x_rest).zip(w_rest) {
        *sum += x.to_f32() * w.to_f32();
    }
    tree(&sums)
}

/// The sum of squares.
pub(super) fn sum_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

/// Adds the products of every row of `x` with every row of `w`, all packed to one length, to `sums[row of x][row of w]`.
pub(super) fn multiply(x: &[&[Lanes]], w: &[&[Lanes]], sums: &mut [Lanes]) {
    let cols = w.len();
    for (x, sums) in x.chunks(TILE_ROWS).zip(sums.chunks_mut(TILE_ROWS * cols)) {
        if let Ok(x) = <[&[Lanes]; TILE_ROWS]>::try_from(x) {
            strip::<TILE_ROWS, TILE_COLS>(x, w, sums);
        } else {
            for (&x, sums) in x.iter().zip(sums.chunks_mut(cols)) {
                strip::<1, ROW_COLS>([x], w, sums);
            }
        }
    }
}

fn strip<const R: usize, const C: usize>(x: [&[Lanes]; R], w: &[&[Lanes]], sums: &mut [Lanes]) {
    let cols = w.len();
    let (blocks, rest) = w.as_chunks::<C>();
    for (i, &block) in blocks.iter().enumerate() {
        tile(x, block, &mut sums[i * C..], cols);
    }
    for (i, &w) in rest.iter().enumerate() {
        tile(x, [w], &mut sums[blocks.len() * C + i..], cols);
    }
}

/// `R` rows by `C`, four lanes at a time through the whole depth; the sum of (r, c) is at `r * pitch + c`.
#[inline(never)] // the sums stay in registers only where the compiler sees nothing else
fn tile<const R: usize, const C: usize>(x: [&[Lanes]; R], w: [&[Lanes]; C], sums: &mut [Lanes], pitch: usize) {
    let depth = w[0].len();
    let (x, w) = (x.map(|x| &x[..depth]), w.map(|w| &w[..depth]));
    for lanes in (0..LANES).step_by(GROUP).map(|l| l..l + GROUP) {
        let mut acc = [[[0.0f32; GROUP]; C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c].copy_from_slice(&sums[r * pitch + c][lanes.clone()]);
            }
        }
        for k in 0..depth {
            for r in 0..R {
                let x = &x[r][k][lanes.clone()];
                for c in 0..C {
                    let w = &w[c][k][lanes.clone()];
                    for l in 0..GROUP {
                        acc[r][c][l] += x[l] * w[l];
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                sums[r * pitch + c][lanes.clone()].copy_from_slice(&acc[r][c]);
            }
        }
    }
}

/// The 16 lanes' sum, halving.
pub(super) fn tree(sums: &Lanes) -> f32 {
    let mut sums = *sums;
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            sums[l] += sums[l + half];
        }
        half /= 2;
    }
    sums[0]
}
