//! `y = x Wᵀ` in f32, either operand in any form it is stored in.
//!
//! Every output element is one dot product in the order of [`lanes`](super::lanes): neither the number of rows, nor the
//! threads, nor the blocking enters, and a quantised operand is only another way to read the same f32 values. From
//! [`PACKED_ROWS`] rows on, weights are widened once per panel of rows and the products run in tiles; scratch is heap,
//! bounded by [`PANEL_ROWS`] packed rows and by one block, or one row, per thread.

use std::ops::Range;

use rayon::prelude::*;

use super::lanes::{LANES, Lanes, dot, multiply, tree};
use super::weight::Matrix;
use crate::error::Result;
use crate::ops::linear::Shape;
use crate::tensor::{Elem, Tensor};
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

/// Writes `x` times the transpose of `w` to columns `first..first + N` of `y`; the op has checked the shapes.
pub fn linear(x: &Matrix, shape: &Shape, w: &Matrix, y: &mut Tensor, first: usize) -> Result<()> {
    let (pitch, columns) = (y.cols(), first..first + shape.w.rows);
    with_elem!(OP, y.dtype(), Y => {
        let y = y.host_mut::<Y>()?;
        if shape.tokens < PACKED_ROWS {
            few(x, shape.w.cols, w, blocks(y, pitch, columns));
        } else {
            panels(x, shape.w.cols, w, y, pitch, &columns);
        }
        Ok(())
    })
}

/// Each row of `w` is read once, against every row of `x`.
fn few<Y: Elem>(x: &Matrix, inputs: usize, w: &Matrix, y: Vec<Vec<&mut [Y]>>) {
    let tokens = y.first().map_or(0, Vec::len);
    let mut rows = vec![0.0; tokens * inputs];
    for (t, row) in rows.chunks_mut(inputs).enumerate() {
        x.widen(t, 0, row);
    }
    y.into_par_iter().enumerate().for_each_init(
        || vec![0.0; inputs],
        |scratch, (block, mut y)| {
            let width = y.first().map_or(0, |y| y.len());
            for n in 0..width {
                let output = block * BLOCK_OUTPUTS + n;
                // A bf16 row is widened in the sum itself; any other goes through scratch.
                if let Matrix::Bf16(w) = w {
                    for (x, y) in rows.chunks(inputs).zip(&mut y) {
                        y[n] = Y::from_f32(dot(x, w.row(output)));
                    }
                } else {
                    let w = w.row(output, scratch);
                    for (x, y) in rows.chunks(inputs).zip(&mut y) {
                        y[n] = Y::from_f32(dot(x, w));
                    }
                }
            }
        },
    );
}

fn panels<Y: Elem>(x: &Matrix, inputs: usize, w: &Matrix, y: &mut [Y], pitch: usize, outputs: &Range<usize>) {
    let (tokens, depth) = (y.len() / pitch, inputs.div_ceil(LANES));
    let mut packed = vec![[0.0; LANES]; tokens.min(PANEL_ROWS) * depth];
    for (panel, y) in y.chunks_mut(PANEL_ROWS * pitch).enumerate() {
        let tokens = y.len() / pitch;
        packed.par_chunks_mut(depth).take(tokens).enumerate().for_each(|(t, packed)| {
            x.widen_lanes(panel * PANEL_ROWS + t, 0, inputs, packed);
        });
        let x: Vec<&[Lanes]> = packed.chunks(depth).take(tokens).collect();
        blocks(y, pitch, outputs.clone()).into_par_iter().enumerate().for_each_init(
            || (vec![[0.0; LANES]; PANEL_ROWS * BLOCK_OUTPUTS], vec![[0.0; LANES]; BLOCK_OUTPUTS * BLOCK_DEPTH]),
            |(sums, weights), (i, mut y)| block(&x, w, i * BLOCK_OUTPUTS, inputs, &mut y, sums, weights),
        );
    }
}

/// Columns `range` of the rows of `y`, cut into blocks: for each block, its part of every row.
fn blocks<Y>(y: &mut [Y], pitch: usize, range: Range<usize>) -> Vec<Vec<&mut [Y]>> {
    let rows = y.len() / pitch;
    let count = range.len().div_ceil(BLOCK_OUTPUTS);
    let mut blocks: Vec<Vec<&mut [Y]>> = (0..count).map(|_| Vec::with_capacity(rows)).collect();
    for row in y.chunks_mut(pitch) {
        for (block, part) in blocks.iter_mut().zip(row[range.clone()].chunks_mut(BLOCK_OUTPUTS)) {
            block.push(part);
        }
    }
    blocks
}

/// A panel of packed rows against the rows of `w` from `first` on, as many as `y` is wide, `BLOCK_DEPTH` lanes of both at
/// a time.
fn block<Y: Elem>(
    x: &[&[Lanes]],
    w: &Matrix,
    first: usize,
    inputs: usize,
    y: &mut [&mut [Y]],
    sums: &mut [Lanes],
    weights: &mut [Lanes],
) {
    let outputs = y.first().map_or(0, |y| y.len());
    let sums = &mut sums[..x.len() * outputs];
    sums.fill([0.0; LANES]);
    for from in (0..inputs).step_by(BLOCK_DEPTH * LANES) {
        let count = (inputs - from).min(BLOCK_DEPTH * LANES);
        let depth = count.div_ceil(LANES);
        for (n, weights) in weights.chunks_mut(depth).take(outputs).enumerate() {
            w.widen_lanes(first + n, from, count, weights);
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
