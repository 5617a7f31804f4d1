//! Rows of a stored matrix widened to f32, a piece at a time: what every product with a quantised operand reads.
//!
//! Both operands can be such a matrix: a weight, and rows of activations after quantisation.

use half::bf16;

use super::lanes::{LANES, Lanes};
use crate::error::{Error, Result};
use crate::num::{DType, fp4, fp8};
use crate::ops::quantise::{Form, Quantised};
use crate::ops::scheme::{Global, Grain, Scheme};
use crate::ops::weight::{BLOCK, NVFP4_GROUP, Weight};
use crate::tensor::{Elem, Rows, Tensor, View};

/// A scale for each row.
#[derive(Debug, Clone, Copy)]
pub enum PerRow<'a> {
    /// The same for all.
    One(f32),
    /// One each.
    Each(&'a [f32]),
}

impl PerRow<'_> {
    #[inline]
    fn at(&self, row: usize) -> f32 {
        match self {
            PerRow::One(scale) => *scale,
            PerRow::Each(scales) => scales[row],
        }
    }
}

/// A matrix `[rows, cols]` in host memory, in any form it is stored in.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Floats.
    F32(Rows<'a, f32>),
    /// Floats.
    Bf16(Rows<'a, bf16>),
    /// Floats under one global: NVFP4 codes times their groups' scales.
    Widened {
        /// `[rows, cols]`.
        rows: Rows<'a, bf16>,
        /// For all.
        global: f32,
        /// What it does.
        sense: Global,
    },
    /// e4m3 codes with a scale per row.
    Fp8Rows {
        /// `[rows, cols]`.
        codes: &'a [u8],
        /// Columns.
        cols: usize,
        /// By row.
        scales: PerRow<'a>,
    },
    /// e4m3 codes with a scale per block of rows and 128 columns.
    Fp8Blocks {
        /// `[rows, cols]`.
        codes: &'a [u8],
        /// Columns.
        cols: usize,
        /// `[block rows, ceil(cols/128)]`.
        scales: &'a [f32],
        /// Blocks of 128 rows start anew after this many.
        segment_rows: usize,
    },
    /// Pairs of e2m1 codes with an e4m3 scale per 16 columns and a global per row.
    Nvfp4 {
        /// `[rows, cols/2]`.
        codes: &'a [u8],
        /// Columns.
        cols: usize,
        /// `[rows, cols/16]`.
        scales: &'a [u8],
        /// By row.
        globals: PerRow<'a>,
        /// What a global does.
        sense: Global,
    },
}

impl<'a> Matrix<'a> {
    /// Unquantised rows, f32 or bf16.
    pub fn rows(x: View<'a>) -> Result<Matrix<'a>> {
        match x.dtype() {
            DType::F32 => Ok(Matrix::F32(x.host()?)),
            DType::Bf16 => Ok(Matrix::Bf16(x.host()?)),
            other => Err(Error::shape("weight", format!("elements are {other}, must be f32 or bf16"))),
        }
    }

    /// A weight.
    pub fn weight(w: &'a Weight) -> Result<Matrix<'a>> {
        let spec = w.spec();
        let host = |t: Option<&'a Tensor>, what: &str| {
            t.ok_or_else(|| Error::shape("weight", format!("{:?} without {what}", spec.scheme)))
        };
        let cols = spec.cols;
        Ok(match spec.scheme {
            Scheme::Plain(_) => return Matrix::rows(w.codes().view()),
            Scheme::Fp8(Grain::Tensor | Grain::Channel) => Matrix::Fp8Rows {
                codes: w.codes().host()?,
                cols,
                scales: PerRow::Each(host(w.row_scales(), "row scales")?.host()?),
            },
            Scheme::Fp8(Grain::Block) => Matrix::Fp8Blocks {
                codes: w.codes().host()?,
                cols,
                scales: host(w.scales(), "scales")?.host()?,
                segment_rows: spec.segment_rows,
            },
            Scheme::Nvfp4(sense) => Matrix::Nvfp4 {
                codes: w.codes().host()?,
                cols,
                scales: host(w.scales(), "scales")?.host()?,
                globals: PerRow::Each(host(w.row_scales(), "row scales")?.host()?),
                sense,
            },
        })
    }

    /// Quantised rows of an activation.
    pub fn quantised(x: &'a Quantised) -> Result<Matrix<'a>> {
        if let Form::Nvfp4(global, sense) = x.form
            && x.codes.dtype() == DType::Bf16
        {
            return Ok(Matrix::Widened { rows: x.codes.view().host()?, global, sense });
        }
        let codes: &[u8] = x.codes.host()?;
        let scales = || x.scales.as_ref().ok_or_else(|| Error::shape("quantise", "rows without scales".to_owned()));
        let cols = x.codes.cols();
        Ok(match x.form {
            Form::Fp8Tensor(scale) => Matrix::Fp8Rows { codes, cols, scales: PerRow::One(scale) },
            Form::Fp8Token => Matrix::Fp8Rows { codes, cols, scales: PerRow::Each(scales()?.host()?) },
            Form::Fp8Group => Matrix::Fp8Blocks { codes, cols, scales: scales()?.host()?, segment_rows: 1 },
            Form::Nvfp4(global, sense) => {
                Matrix::Nvfp4 { codes, cols: 2 * cols, scales: scales()?.host()?, globals: PerRow::One(global), sense }
            }
        })
    }

    /// Writes columns `from..from + to.len()` of a row, in the order of operations of [`weight`](crate::ops::weight).
    /// `from` is a multiple of 16, and for NVFP4 so is the length.
    pub fn widen(&self, row: usize, from: usize, to: &mut [f32]) {
        match *self {
            Matrix::F32(rows) => to.copy_from_slice(&rows.row(row)[from..from + to.len()]),
            Matrix::Bf16(rows) => {
                for (to, v) in to.iter_mut().zip(&rows.row(row)[from..]) {
                    *to = Elem::to_f32(*v);
                }
            }
            Matrix::Widened { rows, global, sense } => {
                for (to, v) in to.iter_mut().zip(&rows.row(row)[from..]) {
                    *to = match sense {
                        Global::Multiplies => Elem::to_f32(*v) * global,
                        Global::Divides => Elem::to_f32(*v) / global,
                    };
                }
            }
            Matrix::Fp8Rows { codes, cols, scales } => {
                let scale = scales.at(row);
                for (to, &code) in to.iter_mut().zip(&codes[row * cols + from..]) {
                    *to = fp8::decode(code) * scale;
                }
            }
            Matrix::Fp8Blocks { codes, cols, scales, segment_rows } => {
                let block_row = row / segment_rows * segment_rows.div_ceil(BLOCK) + row % segment_rows / BLOCK;
                let scales = &scales[block_row * cols.div_ceil(BLOCK)..];
                let codes = &codes[row * cols..];
                let end = from + to.len();
                let mut at = from;
                while at < end {
                    let next = (at / BLOCK + 1) * BLOCK;
                    let piece = at..next.min(end);
                    let scale = scales[at / BLOCK];
                    for (to, &code) in to[piece.start - from..piece.end - from].iter_mut().zip(&codes[piece]) {
                        *to = fp8::decode(code) * scale;
                    }
                    at = next;
                }
            }
            Matrix::Nvfp4 { codes, cols, scales, globals, sense } => {
                let global = globals.at(row);
                let scales = &scales[(row * cols + from) / NVFP4_GROUP..];
                let nibble = row * cols + from;
                let codes = &codes[nibble / 2..];
                let groups = to.as_chunks_mut::<NVFP4_GROUP>().0.iter_mut();
                for ((to, codes), &scale) in groups.zip(codes.as_chunks::<{ NVFP4_GROUP / 2 }>().0).zip(scales) {
                    let scale = nvfp4_scale(scale, global, sense);
                    for (to, &pair) in to.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                        *to = fp4::decode_pair(pair).map(|v| v * scale);
                    }
                }
            }
        }
    }

    /// As [`Matrix::widen`], into whole lanes, the last padded with zeros.
    pub(super) fn widen_lanes(&self, row: usize, from: usize, count: usize, to: &mut [Lanes]) {
        let to = to[..count.div_ceil(LANES)].as_flattened_mut();
        let (values, padding) = to.split_at_mut(count);
        self.widen(row, from, values);
        padding.fill(0.0);
    }

    /// A whole row of `cols` f32: the stored one, or `scratch` after widening into it.
    pub(super) fn row<'s>(&'s self, row: usize, scratch: &'s mut Vec<f32>, cols: usize) -> &'s [f32] {
        if let Matrix::F32(rows) = self {
            return rows.row(row);
        }
        scratch.resize(cols, 0.0);
        self.widen(row, 0, scratch);
        scratch
    }
}

/// The f32 scale of an NVFP4 group.
#[inline]
pub(super) fn nvfp4_scale(scale: u8, global: f32, sense: Global) -> f32 {
    match sense {
        Global::Multiplies => fp8::decode(scale) * global,
        Global::Divides => fp8::decode(scale) / global,
    }
}
