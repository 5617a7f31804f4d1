//! `y = x Wᵀ` in f32.
//!
//! Every output element is one dot product in the order of [`lanes`](super::lanes): neither the number of rows, nor the
//! threads, nor the blocking enters. From [`PACKED_ROWS`] rows on, weights are widened once per panel of rows and the
//! products run in tiles; scratch is heap, bounded by [`PANEL_ROWS`] packed rows and by one block per thread.

use rayon::prelude::*;

use super::lanes::{LANES, Lanes, dot, multiply, pack, tree};
use crate::error::Result;
use crate::tensor::{Elem, Rows, Tensor, View};
use crate::with_elem;

const OP: &str = "linear";
/// Outputs a thread takes at a time.
const BLOCK_OUTPUTS: usize = 16;
/// Inputs of one block, in lanes: 16 outputs by 512 inputs are 32 KiB.
const BLOCK_DEPTH: usize = 32;
/// Rows that share one widening of the weights.
const PANEL_ROWS: usize = 64;
/// Fewer rows than this are not worth the packing.
const PACKED_ROWS: usize = 4;

/// Writes `x` times the transpose of `w` to `y`; the op has checked the shapes.
pub fn linear(x: View, w: &Tensor, y: &mut Tensor) -> Result<()> {
    let (inputs, outputs) = (w.cols(), y.cols());
    with_elem!(OP, x.dtype(), X => with_elem!(OP, w.dtype(), W => with_elem!(OP, y.dtype(), Y => {
        rows::<X, W, Y>(x.host()?, w.host()?, inputs, outputs, y.host_mut()?);
        Ok(())
    })))
}

/// As [`linear`], on rows: `y` is `[tokens, outputs]`, `w` is `[outputs, inputs]`.
pub(super) fn rows<X: Elem, W: Elem, Y: Elem>(x: Rows<X>, w: &[W], inputs: usize, outputs: usize, y: &mut [Y]) {
    let tokens = y.len() / outputs;
    if tokens < PACKED_ROWS {
        for (t, y) in y.chunks_mut(outputs).enumerate() {
            let x = x.row(t);
            y.par_chunks_mut(BLOCK_OUTPUTS).zip(w.par_chunks(BLOCK_OUTPUTS * inputs)).for_each(|(y, w)| {
                for (y, w) in y.iter_mut().zip(w.chunks(inputs)) {
                    *y = Y::from_f32(dot(x, w));
                }
            });
        }
        return;
    }
    let depth = inputs.div_ceil(LANES);
    let mut packed = vec![[0.0; LANES]; tokens.min(PANEL_ROWS) * depth];
    for (panel, y) in y.chunks_mut(PANEL_ROWS * outputs).enumerate() {
        let tokens = y.len() / outputs;
        packed.par_chunks_mut(depth).take(tokens).enumerate().for_each(|(t, packed)| {
            pack(x.row(panel * PANEL_ROWS + t), packed);
        });
        let x: Vec<&[Lanes]> = packed.chunks(depth).take(tokens).collect();
        columns(y, outputs).into_par_iter().zip(w.par_chunks(BLOCK_OUTPUTS * inputs)).for_each_init(
            || (vec![[0.0; LANES]; PANEL_ROWS * BLOCK_OUTPUTS], vec![[0.0; LANES]; BLOCK_OUTPUTS * BLOCK_DEPTH]),
            |(sums, weights), (mut y, w)| block(&x, w, inputs, &mut y, sums, weights),
        );
    }
}

/// The rows of `y` cut into blocks of columns: for each block, its part of every row.
fn columns<Y>(y: &mut [Y], cols: usize) -> Vec<Vec<&mut [Y]>> {
    let rows = y.len() / cols;
    let mut blocks: Vec<Vec<&mut [Y]>> = (0..cols.div_ceil(BLOCK_OUTPUTS)).map(|_| Vec::with_capacity(rows)).collect();
    for row in y.chunks_mut(cols) {
        for (block, part) in blocks.iter_mut().zip(row.chunks_mut(BLOCK_OUTPUTS)) {
            block.push(part);
        }
    }
    blocks
}

/// A panel of packed rows against one block of weight rows, `BLOCK_DEPTH` lanes of both at a time.
fn block<W: Elem, Y: Elem>(
    x: &[&[Lanes]],
    w: &[W],
    inputs: usize,
    y: &mut [&mut [Y]],
    sums: &mut [Lanes],
    weights: &mut [Lanes],
) {
    let outputs = w.len() / inputs;
    let sums = &mut sums[..x.len() * outputs];
    sums.fill([0.0; LANES]);
    for from in (0..inputs).step_by(BLOCK_DEPTH * LANES) {
        let to = inputs.min(from + BLOCK_DEPTH * LANES);
        let depth = (to - from).div_ceil(LANES);
        for (w, weights) in w.chunks(inputs).zip(weights.chunks_mut(depth)) {
            pack(&w[from..to], weights);
        }
        let x: Vec<&[Lanes]> = x.iter().map(|x| &x[from / LANES..][..depth]).collect();
        let w: Vec<&[Lanes]> = weights.chunks(depth).take(outputs).collect();
        multiply(&x, &w, sums);
    }
    for (y, sums) in y.iter_mut().zip(sums.chunks(outputs)) {
        for (y, sums) in y.iter_mut().zip(sums) {
            *y = Y::from_f32(tree(sums));
        }
    }
}
