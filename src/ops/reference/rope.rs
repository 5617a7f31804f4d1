//! Per-head norm and rotation. Summation order of a head's mean square: ascending, one lane.

use rayon::prelude::*;

use crate::error::Result;
use crate::ops::attention::AttnDims;
use crate::tensor::{Elem, Tensor};
use crate::with_elem;

const OP: &str = "qk_norm_rope";

/// Norms and rotates every query and key head of `qkv` in place.
pub fn qk_norm_rope(
    qkv: &mut Tensor,
    q_norm: &Tensor,
    k_norm: &Tensor,
    inv_freq: &Tensor,
    attention_factor: f32,
    eps: f32,
    dims: AttnDims,
    positions: &Tensor,
) -> Result<()> {
    let (q_norm, k_norm, inv_freq) = (q_norm.host::<f32>()?, k_norm.host::<f32>()?, inv_freq.host::<f32>()?);
    let positions = positions.host::<i32>()?;
    let (pitch, d) = (qkv.cols(), dims.head_dim);
    with_elem!(OP, qkv.dtype(), E => {
        qkv.host_mut::<E>()?.par_chunks_mut(pitch).zip(positions).for_each(|(row, &position)| {
            let turns: Vec<(f32, f32)> = inv_freq.iter().map(|&f| turn(position, f, attention_factor)).collect();
            let (queries, rest) = row.split_at_mut(dims.k_col());
            for head in queries.chunks_mut(2 * d) {
                norm_rotate(&mut head[..d], q_norm, eps, &turns);
            }
            for head in rest[..dims.kv_cols()].chunks_mut(d) {
                norm_rotate(head, k_norm, eps, &turns);
            }
        });
        Ok(())
    })
}

/// Sine and cosine of the f32 angle, through f64 so that range reduction loses nothing at large positions.
fn turn(position: i32, inv_freq: f32, factor: f32) -> (f32, f32) {
    let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
    (sin as f32 * factor, cos as f32 * factor)
}

fn norm_rotate<E: Elem>(head: &mut [E], w: &[f32], eps: f32, turns: &[(f32, f32)]) {
    let sum: f32 = head.iter().fold(0.0, |sum, x| sum + x.to_f32() * x.to_f32());
    let scale = (sum / head.len() as f32 + eps).sqrt().recip();
    let half = turns.len();
    let normed = |x: E, i: usize| x.to_f32() * scale * (1.0 + w[i]);
    for (i, &(sin, cos)) in turns.iter().enumerate() {
        let (a, b) = (normed(head[i], i), normed(head[i + half], i + half));
        head[i] = E::from_f32(a * cos - b * sin);
        head[i + half] = E::from_f32(b * cos + a * sin);
    }
    for (i, x) in head.iter_mut().enumerate().skip(2 * half) {
        *x = E::from_f32(normed(*x, i));
    }
}
