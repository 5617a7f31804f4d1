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
/// Fewer products than this are done before another thread has woken up.
const PARALLEL_PRODUCTS: usize = 1 << 18;

/// Writes `x` times the transpose of `w` to `y`; the op has checked the shapes.
pub fn linear(x: View, w: &Tensor, y: &mut Tensor) -> Result<()> {
    let (inputs, outputs) = (w.cols(), y.cols());
    with_elem!(OP, x.dtype(), X => with_elem!(OP, w.dtype(), W => with_elem!(OP, y.dtype(), Y => {
        rows::<X, W, Y>(x.host()?, w.host()?, inputs, outputs, y.host_mut()?);
        Ok(())
    })))
}

fn rows<X: Elem, W: Elem, Y: Elem>(x: Rows<X>, w: &[W], inputs: usize, outputs: usize, y: &mut [Y]) {
    let tokens = y.len() / outputs;
    let parallel = tokens * w.len() >= PARALLEL_PRODUCTS;
    if tokens < PACKED_ROWS {
        for (t, y) in y.chunks_mut(outputs).enumerate() {
            let x = x.row(t);
            let block = |(y, w): (&mut [Y], &[W])| {
                for (y, w) in y.iter_mut().zip(w.chunks(inputs)) {
                    *y = Y::from_f32(dot(x, w));
                }
            };
            if parallel {
                y.par_chunks_mut(BLOCK_OUTPUTS).zip(w.par_chunks(BLOCK_OUTPUTS * inputs)).for_each(block);
            } else {
                block((y, w));
            }
        }
        return;
    }
    let depth = inputs.div_ceil(LANES);
    let mut packed = vec![[0.0; LANES]; tokens.min(PANEL_ROWS) * depth];
    for (panel, y) in y.chunks_mut(PANEL_ROWS * outputs).enumerate() {
        let tokens = y.len() / outputs;
        for (t, packed) in packed.chunks_mut(depth).take(tokens).enumerate() {
            pack(x.row(panel * PANEL_ROWS + t), packed);
        }
        let x: Vec<&[Lanes]> = packed.chunks(depth).take(tokens).collect();
        let scratch = || Scratch {
            sums: vec![[0.0; LANES]; tokens * BLOCK_OUTPUTS],
            weights: vec![[0.0; LANES]; BLOCK_OUTPUTS * depth.min(BLOCK_DEPTH)],
        };
        let y = columns(y, outputs);
        if parallel {
            y.into_par_iter()
                .zip(w.par_chunks(BLOCK_OUTPUTS * inputs))
                .for_each_init(scratch, |scratch, (y, w)| block(&x, w, inputs, y, scratch));
        } else {
            let mut scratch = scratch();
            for (y, w) in y.into_iter().zip(w.chunks(BLOCK_OUTPUTS * inputs)) {
                block(&x, w, inputs, y, &mut scratch);
            }
        }
    }
}

/// A thread's own buffers.
struct Scratch {
    /// The lanes of each (row, output) of a block.
    sums: Vec<Lanes>,
    /// The widened weights of a block.
    weights: Vec<Lanes>,
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
fn block<W: Elem, Y: Elem>(x: &[&[Lanes]], w: &[W], inputs: usize, y: Vec<&mut [Y]>, scratch: &mut Scratch) {
    let outputs = w.len() / inputs;
    let sums = &mut scratch.sums[..x.len() * outputs];
    sums.fill([0.0; LANES]);
    for from in (0..inputs).step_by(BLOCK_DEPTH * LANES) {
        let to = inputs.min(from + BLOCK_DEPTH * LANES);
        let depth = (to - from).div_ceil(LANES);
        for (w, weights) in w.chunks(inputs).zip(scratch.weights.chunks_mut(depth)) {
            pack(&w[from..to], weights);
        }
        let x: Vec<&[Lanes]> = x.iter().map(|x| &x[from / LANES..][..depth]).collect();
        let w: Vec<&[Lanes]> = scratch.weights.chunks(depth).take(outputs).collect();
        multiply(&x, &w, sums);
    }
    for (y, sums) in y.into_iter().zip(sums.chunks(outputs)) {
        for (y, sums) in y.iter_mut().zip(sums) {
            *y = Y::from_f32(tree(sums));
        }
    }
}
