//! Element-wise activations in f32; no sums.

use rayon::prelude::*;

use crate::tensor::Elem;

/// Elements a thread takes at a time at least.
const GRAIN: usize = 1 << 13;

/// Above this softplus(x) is x to the last bit of f32 (PyTorch's threshold).
const SOFTPLUS_LINEAR: f32 = 20.0;

/// `1 / (1 + exp(-x))`.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + exp(x))`, without overflow.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_LINEAR { x } else { x.exp().ln_1p() }
}

/// `gate = silu(gate) * up` of rows of `2 * width`.
pub(crate) fn silu_mul<E: Elem>(gate_up: &mut [E], width: usize) {
    gate_up.par_chunks_exact_mut(2 * width).with_min_len(GRAIN.div_ceil(width)).for_each(|row| {
        let (gate, up) = row.split_at_mut(width);
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = E::from_f32(silu(gate.to_f32()) * up.to_f32());
        }
    });
}

/// `x *= sigmoid(gate)`, the gate of head h at `h*2d + d` of a fused row.
pub(crate) fn sigmoid_mul<E: Elem>(x: &mut [E], qkv: &[E], heads: usize, head_dim: usize, fused: usize) {
    let width = heads * head_dim;
    x.par_chunks_exact_mut(width).zip(qkv.par_chunks_exact(fused)).with_min_len(GRAIN.div_ceil(width)).for_each(
        |(x, row)| {
            for (x, qg) in x.chunks_exact_mut(head_dim).zip(row.chunks_exact(2 * head_dim)) {
                for (x, gate) in x.iter_mut().zip(&qg[head_dim..]) {
                    *x = E::from_f32(x.to_f32() * sigmoid(gate.to_f32()));
                }
            }
        },
    );
}

/// `beta = sigmoid(b)`, `g = -exp(a_log) * softplus(a + dt_bias)` of rows (b, a).
pub(crate) fn gdn_gates<E: Elem>(ba: &[E], a_log: &[f32], dt_bias: &[f32], g: &mut [f32], beta: &mut [f32]) {
    let heads = a_log.len();
    for ((row, g), beta) in ba.chunks_exact(2 * heads).zip(g.chunks_exact_mut(heads)).zip(beta.chunks_exact_mut(heads))
    {
        for h in 0..heads {
            beta[h] = sigmoid(row[h].to_f32());
            g[h] = -a_log[h].exp() * softplus(row[heads + h].to_f32() + dt_bias[h]);
        }
    }
}
