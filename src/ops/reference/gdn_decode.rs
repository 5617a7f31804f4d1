//! The gated delta rule, one token. Sums over key_dim are in index order in f32 (norms: the order of
//! `lanes`); a bf16 state is read exactly and rounded once, when the token is done.

use rayon::prelude::*;

use super::lanes::sum_squares;
use crate::ops::gdn_prefill::{GdnDims, L2_EPS};
use crate::tensor::Elem;

/// `out = x / sqrt(sum(x^2) + 1e-6) * scale`.
pub(crate) fn unit<E: Elem>(x: &[E], scale: f32, out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x.to_f32());
    let factor = 1.0 / (sum_squares(out) + L2_EPS).sqrt();
    for o in out {
        *o = *o * factor * scale;
    }
}

/// Row i of `out` from row i of `conv`, for each sequence i; its state block is updated in place.
pub(crate) fn recurrent<E: Elem, S: Elem>(
    conv: &[E],
    g: &[f32],
    beta: &[f32],
    states: Vec<Option<&mut [S]>>,
    dims: GdnDims,
    out: &mut [E],
) {
    let GdnDims { key_heads, value_heads, key_dim, value_dim } = dims;
    let group = value_heads / key_heads;
    let q_scale = (key_dim as f32).powf(-0.5);
    let tasks: Vec<_> = states
        .into_iter()
        .zip(out.chunks_exact_mut(dims.out_width()))
        .enumerate()
        .flat_map(|(row, (state, out))| {
            let mut blocks = state.map(|s| s.chunks_exact_mut(key_dim * value_dim));
            let heads = out.chunks_exact_mut(value_dim).enumerate();
            heads.map(move |(h, out)| (row, h, blocks.as_mut().and_then(Iterator::next), out)).collect::<Vec<_>>()
        })
        .collect();
    tasks.into_par_iter().for_each_init(
        || (vec![0.0; key_dim], vec![0.0; key_dim], vec![0.0; value_dim], vec![0.0; key_dim * value_dim]),
        |(q, k, v, s), (row, h, block, out)| {
            let Some(block) = block else {
                out.fill(E::from_f32(0.0));
                return;
            };
            let (q_cols, rest) = conv[row * dims.channels()..][..dims.channels()].split_at(key_heads * key_dim);
            let (k_cols, v_cols) = rest.split_at(key_heads * key_dim);
            let key = (h / group) * key_dim..(h / group + 1) * key_dim;
            unit(&q_cols[key.clone()], q_scale, q);
            unit(&k_cols[key], 1.0, k);
            let decay = g[row * value_heads + h].exp();
            let beta = beta[row * value_heads + h];
            s.iter_mut().zip(&*block).for_each(|(s, b)| *s = b.to_f32() * decay);
            v.fill(0.0);
            for (k, s) in k.iter().zip(s.chunks_exact(value_dim)) {
                v.iter_mut().zip(s).for_each(|(m, s)| *m += k * s);
            }
            let v_cols = &v_cols[h * value_dim..][..value_dim];
            v.iter_mut().zip(v_cols).for_each(|(m, v)| *m = beta * (v.to_f32() - *m));
            for (k, s) in k.iter().zip(s.chunks_exact_mut(value_dim)) {
                s.iter_mut().zip(&*v).for_each(|(s, delta)| *s += k * delta);
            }
            block.iter_mut().zip(&*s).for_each(|(b, s)| *b = S::from_f32(*s));
            v.fill(0.0);
            for (q, s) in q.iter().zip(s.chunks_exact(value_dim)) {
                v.iter_mut().zip(s).for_each(|(o, s)| *o += q * s);
            }
            out.iter_mut().zip(&*v).for_each(|(out, o)| *out = E::from_f32(*o));
        },
    );
}
