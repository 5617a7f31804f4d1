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
/// Fewer products than this are done before another thread has woken up.
const PARALLEL_PRODUCTS: usize = 1 << 18;

/// Writes `x` times the transpose of `w` to columns `first..first + N` of `y`; the op has checked the shapes.
pub fn linear(x: &Matrix, shape: &Shape, w: &Matrix, y: &mut Tensor, first: usize) -> Result<()> {
    let (pitch, columns) = (y.cols(), first..first + shape.w.rows);
    with_elem!(OP, y.dtype(), Y => {
        Product { x, w, first_row: 0, inputs: shape.w.cols }.write::<Y>(y.host_mut()?, pitch, columns);
        Ok(())
    })
}

/// Rows of `x` from 0 on against rows of `w` from `first_row` on, all of `inputs` columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) x: &'a Matrix<'a>,
    pub(super) w: &'a Matrix<'a>,
    pub(super) first_row: usize,
    pub(super) inputs: usize,
}

impl Product<'_> {
    /// Writes one output per column of `columns` to every row of `y`, `pitch` elements each.
    pub(super) fn write<Y: Elem>(&self, y: &mut [Y], pitch: usize, columns: Range<usize>) {
        let tokens = y.len() / pitch;
        let parallel = tokens * columns.len() * self.inputs >= PARALLEL_PRODUCTS;
        if tokens < PACKED_ROWS {
            self.few(blocks(y, pitch, &columns), tokens, parallel);
            return;
        }
        let depth = self.inputs.div_ceil(LANES);
        let mut packed = vec![[0.0; LANES]; tokens.min(PANEL_ROWS) * depth];
        for (panel, y) in y.chunks_mut(PANEL_ROWS * pitch).enumerate() {
            let tokens = y.len() / pitch;
            for (t, packed) in packed.chunks_mut(depth).take(tokens).enumerate() {
                self.x.widen_lanes(panel * PANEL_ROWS + t, 0, self.inputs, packed);
            }
            let x: Vec<&[Lanes]> = packed.chunks(depth).take(tokens).collect();
            let scratch = || Scratch {
                sums: vec![[0.0; LANES]; tokens * BLOCK_OUTPUTS],
                weights: vec![[0.0; LANES]; BLOCK_OUTPUTS * depth.min(BLOCK_DEPTH)],
            };
            let y = blocks(y, pitch, &columns);
            let block = |scratch: &mut Scratch, (i, y)| self.block(&x, i * BLOCK_OUTPUTS, y, scratch);
            if parallel {
                y.into_par_iter().enumerate().for_each_init(scratch, block);
            } else {
                let mut scratch = scratch();
                y.into_iter().enumerate().for_each(|y| block(&mut scratch, y));
            }
        }
    }

    /// Each row of `w` is read once, against every row of `x`.
    fn few<Y: Elem>(&self, y: Vec<Vec<&mut [Y]>>, tokens: usize, parallel: bool) {
        let inputs = self.inputs;
        let mut x = vec![0.0; tokens * inputs];
        for (t, row) in x.chunks_mut(inputs).enumerate() {
            self.x.widen(t, 0, row);
        }
        let block = |scratch: &mut Vec<f32>, (i, mut y): (usize, Vec<&mut [Y]>)| {
            let outputs = y.first().map_or(0, |y| y.len());
            for n in 0..outputs {
                let row = self.first_row + i * BLOCK_OUTPUTS + n;
                // A bf16 row is widened in the sum itself; any other that is no f32 goes through scratch.
                if let Matrix::Bf16(w) = self.w {
                    for (x, y) in x.chunks(inputs).zip(&mut y) {
                        y[n] = Y::from_f32(dot(x, w.row(row)));
                    }
                } else {
                    let w = self.w.row(row, scratch, inputs);
                    for (x, y) in x.chunks(inputs).zip(&mut y) {
                        y[n] = Y::from_f32(dot(x, w));
                    }
                }
            }
        };
        if parallel {
            y.into_par_iter().enumerate().for_each_init(Vec::new, block);
        } else {
            let mut scratch = Vec::new();
            y.into_iter().enumerate().for_each(|y| block(&mut scratch, y));
        }
    }

    /// A panel of packed rows against the rows of `w` from `first` of the product's on, as many as `y` is wide,
    /// `BLOCK_DEPTH` lanes of both at a time.
    fn block<Y: Elem>(&self, x: &[&[Lanes]], first: usize, y: Vec<&mut [Y]>, scratch: &mut Scratch) {
        let outputs = y.first().map_or(0, |y| y.len());
        let sums = &mut scratch.sums[..x.len() * outputs];
        sums.fill([0.0; LANES]);
        for from in (0..self.inputs).step_by(BLOCK_DEPTH * LANES) {
            let count = (self.inputs - from).min(BLOCK_DEPTH * LANES);
            let depth = count.div_ceil(LANES);
            for (n, weights) in scratch.weights.chunks_mut(depth).take(outputs).enumerate() {
                self.w.widen_lanes(self.first_row + first + n, from, count, weights);
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
}

/// A thread's own buffers.
struct Scratch {
    /// The lanes of each (row, output) of a block.
    sums: Vec<Lanes>,
    /// The widened weights of a block.
    weights: Vec<Lanes>,
}

/// Columns `range` of the rows of `y`, cut into blocks: for each block, its part of every row.
fn blocks<'y, Y>(y: &'y mut [Y], pitch: usize, range: &Range<usize>) -> Vec<Vec<&'y mut [Y]>> {
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
