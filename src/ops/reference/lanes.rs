//! Sums along a row in f32, in 16 lanes: one order for every op that has such a sum.
//!
//! Lane `l` adds the products `l, l+16, l+32, …` in that order, from zero; then lanes `l` and `l+8` are added, then `l` and
//! `l+4`, `l` and `l+2`, `l` and `l+1`. The order depends on nothing else: [`dot`] and [`multiply`] give the same bits.

use crate::tensor::Elem;

/// Lanes of one sum.
pub(super) const LANES: usize = 16;
/// One value per lane.
pub(super) type Lanes = [f32; LANES];
/// Left rows that callers take together; no more than a matter of scratch.
pub(super) const TILE_ROWS: usize = 4;

/// Widens `from` to f32 in whole lanes, the last padded with zeros.
pub(super) fn pack<E: Elem>(from: &[E], to: &mut [Lanes]) {
    let (blocks, rest) = from.as_chunks::<LANES>();
    let (whole, last) = to.split_at_mut(blocks.len().min(to.len()));
    for (from, to) in blocks.iter().zip(whole) {
        for l in 0..LANES {
            to[l] = from[l].to_f32();
        }
    }
    if let (Some(to), false) = (last.first_mut(), rest.is_empty()) {
        *to = [0.0; LANES];
        for (to, from) in to.iter_mut().zip(rest) {
            *to = from.to_f32();
        }
    }
}

/// The dot product of two rows of one length.
pub(super) fn dot<X: Elem, W: Elem>(x: &[X], w: &[W]) -> f32 {
    let mut sums = [0.0; LANES];
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    let (w_blocks, w_rest) = w.as_chunks::<LANES>();
    single(x_blocks, w_blocks, &mut sums);
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
    for (x, sums) in x.iter().zip(sums.chunks_mut(w.len())) {
        let (pairs, last) = w.as_chunks::<2>();
        let (sums, last_sum) = sums.as_chunks_mut::<2>();
        for ([a, b], sums) in pairs.iter().zip(sums) {
            pair(x, a, b, sums);
        }
        for (w, sum) in last.iter().zip(last_sum) {
            single(x, w, sum);
        }
    }
}

/// One row by two: their sums are eight of the sixteen 128-bit registers of baseline x86-64, and the row is read once.
#[inline(never)] // the sums stay in registers only where the compiler sees nothing else
fn pair(x: &[Lanes], a: &[Lanes], b: &[Lanes], sums: &mut [Lanes; 2]) {
    let [mut p, mut q] = *sums;
    for ((x, a), b) in x.iter().zip(a).zip(b) {
        for l in 0..LANES {
            p[l] += x[l] * a[l];
            q[l] += x[l] * b[l];
        }
    }
    *sums = [p, q];
}

#[inline(never)] // as above
fn single<X: Elem, W: Elem>(x: &[[X; LANES]], w: &[[W; LANES]], sum: &mut Lanes) {
    let mut p = *sum;
    for (x, w) in x.iter().zip(w) {
        for l in 0..LANES {
            p[l] += x[l].to_f32() * w[l].to_f32();
        }
    }
    *sum = p;
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
