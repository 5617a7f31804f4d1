//! Rows of activations to codes and scales, each row by itself; the order of operations is [`quantise`]'s.
//!
//! [`quantise`]: crate::ops::quantise

use half::bf16;
use rayon::prelude::*;

use super::weight::{Matrix, PerRow, nvfp4_scale};
use crate::error::Result;
use crate::num::{DType, fp4, fp8};
use crate::ops::quantise::Form;
use crate::ops::scheme::Global;
use crate::ops::weight::{BLOCK, NVFP4_GROUP};
use crate::tensor::{Tensor, View};

/// The code of 0.125, which stands for an NVFP4 scale that rounds to 0.
const EIGHTH: u8 = 0x20;

/// Writes codes and scales of every row; the op has made them of the right sizes.
pub fn rows(x: View, form: Form, codes: &mut Tensor, scales: Option<&mut Tensor>) -> Result<()> {
    let (cols, pitch) = (x.cols(), codes.cols());
    let matrix = Matrix::rows(x)?;
    let widen = |t: usize, row: &mut Vec<f32>| {
        row.resize(cols, 0.0);
        matrix.widen(t, 0, row);
    };
    if let Form::Nvfp4(global, sense) = form
        && codes.dtype() == DType::Bf16
    {
        let values = codes.host_mut::<bf16>()?.par_chunks_mut(pitch);
        values.enumerate().for_each_init(Vec::new, |row, (t, values)| {
            widen(t, row);
            let (mut codes, mut scales) = (vec![0; cols / 2], vec![0; cols / NVFP4_GROUP]);
            nvfp4(row, global, sense, &mut codes, &mut scales);
            // The global is the product's.
            let globals = PerRow::One(1.0);
            Matrix::Nvfp4 { codes: &codes, cols, scales: &scales, globals, sense }.widen(0, 0, row);
            for (to, v) in values.iter_mut().zip(row) {
                *to = bf16::from_f32(*v);
            }
        });
        return Ok(());
    }
    let codes = codes.host_mut::<u8>()?.par_chunks_mut(pitch);
    match form {
        Form::Fp8Tensor(scale) => codes.enumerate().for_each_init(Vec::new, |row, (t, codes)| {
            widen(t, row);
            fp8_codes(row, scale, codes);
        }),
        Form::Fp8Token | Form::Fp8Group => {
            let group = if form == Form::Fp8Token { cols } else { BLOCK };
            let Some(scales) = scales else { return Ok(()) };
            let per_row = scales.cols();
            let scales = scales.host_mut::<f32>()?.par_chunks_mut(per_row);
            codes.zip(scales).enumerate().for_each_init(Vec::new, |row, (t, (codes, scales))| {
                widen(t, row);
                fp8_groups(row, group, codes, scales);
            });
        }
        Form::Nvfp4(global, sense) => {
            let Some(scales) = scales else { return Ok(()) };
            let per_row = scales.cols();
            let scales = scales.host_mut::<u8>()?.par_chunks_mut(per_row);
            codes.zip(scales).enumerate().for_each_init(Vec::new, |row, (t, (codes, scales))| {
                widen(t, row);
                nvfp4(row, global, sense, codes, scales);
            });
        }
    }
    Ok(())
}

/// Replaces a row by its values after quantisation. `cols` must suit `form`, as the op checks.
pub(super) fn round_trip(row: &mut [f32], form: Form) {
    let cols = row.len();
    match form {
        Form::Fp8Tensor(scale) => {
            let mut codes = vec![0; cols];
            fp8_codes(row, scale, &mut codes);
            Matrix::Fp8Rows { codes: &codes, cols, scales: PerRow::One(scale) }.widen(0, 0, row);
        }
        Form::Fp8Token | Form::Fp8Group => {
            let group = if form == Form::Fp8Token { cols } else { BLOCK };
            let (mut codes, mut scales) = (vec![0; cols], vec![0.0; cols.div_ceil(group)]);
            fp8_groups(row, group, &mut codes, &mut scales);
            match form {
                Form::Fp8Token => Matrix::Fp8Rows { codes: &codes, cols, scales: PerRow::Each(&scales) },
                _ => Matrix::Fp8Blocks { codes: &codes, cols, scales: &scales, segment_rows: 1 },
            }
            .widen(0, 0, row);
        }
        Form::Nvfp4(global, sense) => {
            let (mut codes, mut scales) = (vec![0; cols / 2], vec![0; cols / NVFP4_GROUP]);
            nvfp4(row, global, sense, &mut codes, &mut scales);
            Matrix::Nvfp4 { codes: &codes, cols, scales: &scales, globals: PerRow::One(global), sense }
                .widen(0, 0, row);
        }
    }
}

/// The largest magnitude; NaN where there is one.
fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max: f32, v| if v.is_nan() || v.abs() > max { v.abs() } else { max })
}

fn fp8_codes(row: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, v) in codes.iter_mut().zip(row) {
        *code = fp8::encode(v / scale);
    }
}

/// Codes and scales of one row in groups of `group` columns.
pub(super) fn fp8_groups(row: &[f32], group: usize, codes: &mut [u8], scales: &mut [f32]) {
    for ((row, codes), scale) in row.chunks(group).zip(codes.chunks_mut(group)).zip(scales) {
        let s = amax(row) / fp8::MAX;
        *scale = if s == 0.0 { f32::EPSILON } else { s };
        fp8_codes(row, *scale, codes);
    }
}

fn nvfp4(row: &[f32], global: f32, sense: Global, codes: &mut [u8], scales: &mut [u8]) {
    let groups = row.chunks(NVFP4_GROUP).zip(codes.chunks_mut(NVFP4_GROUP / 2));
    for ((row, codes), scale) in groups.zip(scales) {
        let wanted = match sense {
            Global::Divides => global * (amax(row) / fp4::MAX),
            Global::Multiplies => amax(row) / (fp4::MAX * global),
        };
        let code = fp8::encode(wanted);
        *scale = if code == 0 { EIGHTH } else { code };
        let s = nvfp4_scale(*scale, global, sense);
        for (code, pair) in codes.iter_mut().zip(row.as_chunks::<2>().0) {
            *code = fp4::encode_pair(pair[0] / s, pair[1] / s);
        }
    }
}
