//! Norms, row by row. The sum of squares is in the order of `lanes`; everything else is per element.

use rayon::prelude::*;

use super::activation::{sigmoid, silu};
use super::lanes::sum_squares;
use super::quantise::fp8_groups;
use crate::ops::norm::Gate;
use crate::tensor::{Elem, Rows};

/// Elements a thread takes at a time at least.
const GRAIN: usize = 1 << 14;

fn scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt()
}

/// `out = x * rsqrt(mean(x^2) + eps) * (1 + w)` over rows of `w.len()` elements.
pub(crate) fn rms<E: Elem>(x: &[E], w: &[f32], eps: f32, out: &mut [E]) {
    let width = w.len();
    out.par_chunks_exact_mut(width).zip(x.par_chunks_exact(width)).with_min_len(GRAIN.div_ceil(width)).for_each_init(
        || vec![0.0; width],
        |row, (out, x)| {
            row.iter_mut().zip(x).for_each(|(r, x)| *r = x.to_f32());
            let scale = scale(row, eps);
            for ((out, x), w) in out.iter_mut().zip(&*row).zip(w) {
                *out = E::from_f32(x * scale * (1.0 + w));
            }
        },
    );
}

/// [`rms`] of each row, quantised by a scale of its own.
pub(crate) fn rms_fp8<E: Elem>(x: &[E], w: &[f32], eps: f32, codes: &mut [u8], scales: &mut [f32]) {
    let width = w.len();
    let rows = codes.par_chunks_exact_mut(width).zip(scales).zip(x.par_chunks_exact(width));
    rows.with_min_len(GRAIN.div_ceil(width)).for_each_init(
        || vec![0.0; width],
        |row, ((codes, to), x)| {
            row.iter_mut().zip(x).for_each(|(r, x)| *r = x.to_f32());
            let scale = scale(row, eps);
            for (x, w) in row.iter_mut().zip(w) {
                *x = E::from_f32(*x * scale * (1.0 + w)).to_f32();
            }
            fp8_groups(row, width, codes, std::slice::from_mut(to));
        },
    );
}

/// `residual = round(residual + delta)`.
pub(crate) fn add<E: Elem>(residual: &mut [E], delta: &[E]) {
    residual.par_iter_mut().zip(delta).with_min_len(GRAIN).for_each(|(r, d)| {
        *r = E::from_f32(r.to_f32() + d.to_f32());
    });
}

/// `out = round(o * rsqrt(mean(o^2) + eps) * w) * gate(z)` over heads of `w.len()` elements.
pub(crate) fn gated<E: Elem>(o: &[E], z: Rows<E>, w: &[f32], eps: f32, gate: Gate, out: &mut [E]) {
    let width = w.len();
    let cols = z.row(0).len();
    let act = |z: f32| match gate {
        Gate::Silu => silu(z),
        Gate::Sigmoid => sigmoid(z),
    };
    out.par_chunks_exact_mut(cols)
        .zip(o.par_chunks_exact(cols))
        .enumerate()
        .with_min_len(GRAIN.div_ceil(cols))
        .for_each_init(
            || vec![0.0; width],
            |head, (i, (out, o))| {
                let heads = out.chunks_exact_mut(width).zip(o.chunks_exact(width)).zip(z.row(i).chunks_exact(width));
                for ((out, o), z) in heads {
                    head.iter_mut().zip(o).for_each(|(h, o)| *h = o.to_f32());
                    let scale = scale(head, eps);
                    for (((out, x), w), z) in out.iter_mut().zip(&*head).zip(w).zip(z) {
                        let normed = E::from_f32(x * scale * w);
                        *out = E::from_f32(normed.to_f32() * act(z.to_f32()));
                    }
                }
            },
        );
}
