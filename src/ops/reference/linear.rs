//! `y = x Wᵀ` in f32.
//!
//! Summation order, for every output element alike: lane `l` of 16 adds the products of inputs `l, l+16, l+32, …` in that
//! order, from zero; then lanes `l` and `l+8` are added, then `l` and `l+4`, `l` and `l+2`, `l` and `l+1`. Neither the
//! number of rows, nor the threads, nor the blocking enters.

use rayon::prelude::*;

use crate::error::Result;
use crate::tensor::{Elem, Rows, Tensor, View};
use crate::with_elem;

const OP: &str = "linear";
const LANES: usize = 16;
const BLOCK_OUTPUTS: usize = 16;

/// Writes `x` times the transpose of `w` to `y`; the op has checked the shapes.
pub fn linear(x: View, w: &Tensor, y: &mut Tensor) -> Result<()> {
    let inputs = w.cols();
    with_elem!(OP, x.dtype(), X => with_elem!(OP, w.dtype(), W => with_elem!(OP, y.dtype(), Y => {
        let (x, w, n) = (x.host::<X>()?, w.host::<W>()?, y.cols());
        rows(x, w, inputs, n, y.host_mut::<Y>()?);
        Ok(())
    })))
}

fn rows<X: Elem, W: Elem, Y: Elem>(x: Rows<X>, w: &[W], inputs: usize, outputs: usize, y: &mut [Y]) {
    for (t, y) in y.chunks_mut(outputs).enumerate() {
        let x = x.row(t);
        y.par_chunks_mut(BLOCK_OUTPUTS).zip(w.par_chunks(BLOCK_OUTPUTS * inputs)).for_each(|(y, w)| {
            for (y, w) in y.iter_mut().zip(w.chunks(inputs)) {
                *y = Y::from_f32(dot(x, w));
            }
        });
    }
}

fn dot<X: Elem, W: Elem>(x: &[X], w: &[W]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (x, w) in x.chunks(LANES).zip(w.chunks(LANES)) {
        for ((lane, x), w) in lanes.iter_mut().zip(x).zip(w) {
            *lane += x.to_f32() * w.to_f32();
        }
    }
    tree(&lanes)
}

/// The 16 lanes' sum, halving.
pub(super) fn tree(lanes: &[f32; LANES]) -> f32 {
    let mut sums = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            sums[l] += sums[l + half];
        }
        half /= 2;
    }
    sums[0]
}
