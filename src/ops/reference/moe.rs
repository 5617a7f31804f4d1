//! Experts on the host. Tokens are independent: a token's row is the same bits alone, in any batch, in any block.
//!
//! Projections are those of [`linear`], in its order. A token's output is w_0 y_0 + w_1 y_1 + ... in routing order.

use rayon::prelude::*;

use super::linear;
use crate::error::{Error, Result};
use crate::ops::moe::{Dims, EXPERTS};
use crate::tensor::{Elem, Rows};

/// The router's choice and where the experts are.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// `[T, k]`.
    pub ids: &'a [i32],
    /// `[T, k]`.
    pub weights: &'a [f32],
    /// `[E]`.
    pub slots: &'a [i32],
}

/// The experts' matrices, slot after slot.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a, W> {
    /// `[slots, 2 inter, H]`.
    pub gate_up: &'a [W],
    /// `[slots, H, inter]`.
    pub down: &'a [W],
}

/// Softmax, top-k and renormalisation of each row. The softmax's sum runs over rising ids, the weights' sum over the
/// routing order.
pub fn route<L: Elem, A: Elem>(logits: &[L], experts: usize, top_k: usize, ids: &mut [i32], weights: &mut [f32]) {
    logits.par_chunks(experts).zip(ids.par_chunks_mut(top_k)).zip(weights.par_chunks_mut(top_k)).for_each(
        |((row, ids), weights)| {
            let row: Vec<f32> = row.iter().map(|v| v.to_f32()).collect();
            // NaN sorts last, so that ids are valid whatever the row holds; -0 + 0 = +0, so that zeros tie.
            let key = |id: usize| if row[id].is_nan() { f32::NEG_INFINITY } else { row[id] + 0.0 };
            let mut order: Vec<usize> = (0..experts).collect();
            let by = |a: &usize, b: &usize| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
            if top_k < experts {
                order.select_nth_unstable_by(top_k - 1, by);
            }
            order[..top_k].sort_unstable_by(by);
            let max = key(order[0]);
            let denominator: f32 = row.iter().map(|&l| (l - max).exp()).sum();
            for (k, &id) in order[..top_k].iter().enumerate() {
                ids[k] = id as i32;
                weights[k] = (row[id] - max).exp() / denominator;
            }
            let sum: f32 = weights.iter().sum();
            for w in weights {
                *w = A::from_f32(*w / sum).to_f32();
            }
        },
    );
}

/// One expert's tokens of a block.
struct Group {
    slot: usize,
    /// (token of the block, place in its routing), in rising token.
    pairs: Vec<(usize, usize)>,
}

/// Sums of the weighted experts of every token, block after block. Scratch on the heap: one block's pairs, their
/// rows, activations (f32 before the SwiGLU) and outputs.
pub fn experts<A: Elem, W: Elem>(
    x: &[A],
    routed: Routed,
    weights: Weights<W>,
    dims: Dims,
    block_tokens: usize,
    out: &mut [A],
) -> Result<()> {
    let Dims { hidden, inter, top_k, .. } = dims;
    let slots = weights.down.len() / (hidden * inter);
    let blocks = x.chunks(block_tokens * hidden).zip(out.chunks_mut(block_tokens * hidden)).enumerate();
    for (block, (x, out)) in blocks {
        let first = block * block_tokens * top_k;
        let pairs = x.len() / hidden * top_k;
        let ids = &routed.ids[first..first + pairs];
        let mix = &routed.weights[first..first + pairs];
        let groups = group(ids, block * block_tokens, routed.slots, slots, top_k)?;
        let outputs: Vec<Vec<A>> = groups
            .par_iter()
            .map(|group| {
                let rows = group.pairs.len();
                let x: Vec<A> = group.pairs.iter().flat_map(|&(t, _)| &x[t * hidden..][..hidden]).copied().collect();
                let gate_up = &weights.gate_up[group.slot * 2 * inter * hidden..][..2 * inter * hidden];
                let mut both = vec![0.0f32; rows * 2 * inter];
                linear::rows(Rows::dense(&x, hidden), gate_up, hidden, 2 * inter, &mut both);
                let act: Vec<A> = both.chunks(2 * inter).flat_map(|row| swiglu(row.split_at(inter))).collect();
                let down = &weights.down[group.slot * hidden * inter..][..hidden * inter];
                let mut y = vec![A::from_f32(0.0); rows * hidden];
                linear::rows(Rows::dense(&act, inter), down, inter, hidden, &mut y);
                y
            })
            .collect();
        // Where the output of each (token, place) lies.
        let mut place = vec![(0, 0); pairs];
        for (g, group) in groups.iter().enumerate() {
            for (row, &(t, k)) in group.pairs.iter().enumerate() {
                place[t * top_k + k] = (g, row);
            }
        }
        out.par_chunks_mut(hidden).enumerate().for_each(|(t, out)| {
            let terms: Vec<(f32, &[A])> = (t * top_k..(t + 1) * top_k)
                .map(|p| (mix[p], &outputs[place[p].0][place[p].1 * hidden..][..hidden]))
                .collect();
            for (i, out) in out.iter_mut().enumerate() {
                *out = A::from_f32(terms.iter().map(|(w, y)| w * y[i].to_f32()).sum());
            }
        });
    }
    Ok(())
}

/// The block's pairs by expert, in rising expert id.
fn group(ids: &[i32], first_token: usize, table: &[i32], slots: usize, top_k: usize) -> Result<Vec<Group>> {
    let mut of: Vec<Vec<(usize, usize)>> = vec![Vec::new(); table.len()];
    for (p, &id) in ids.iter().enumerate() {
        let (t, k) = (p / top_k, p % top_k);
        let Some(pairs) = usize::try_from(id).ok().and_then(|id| of.get_mut(id)) else {
            return Err(Error::shape(
                EXPERTS,
                format!("token {} is routed to expert {id}, there are {}", first_token + t, table.len()),
            ));
        };
        pairs.push((t, k));
    }
    let mut groups = Vec::new();
    for (id, pairs) in of.into_iter().enumerate().filter(|(_, pairs)| !pairs.is_empty()) {
        match usize::try_from(table[id]) {
            Ok(slot) if slot < slots => groups.push(Group { slot, pairs }),
            Ok(slot) => {
                return Err(Error::shape(EXPERTS, format!("expert {id} is in slot {slot}, the weights have {slots}")));
            }
            Err(_) => {
                return Err(Error::shape(
                    EXPERTS,
                    format!(
                        "token {} is routed to expert {id}, which is absent (slot {}); load it first",
                        first_token + pairs[0].0,
                        table[id]
                    ),
                ));
            }
        }
    }
    Ok(groups)
}

/// round(silu(gate) * up) of one row.
fn swiglu<A: Elem>((gate, up): (&[f32], &[f32])) -> impl Iterator<Item = A> {
    gate.iter().zip(up).map(|(&g, &u)| A::from_f32(g / (1.0 + (-g).exp()) * u))
}

/// out = round(out + sigmoid(gate) x shared), element by element.
pub fn combine_shared<A: Elem>(out: &mut [A], shared: &[A], gate: &[A], hidden: usize) {
    out.par_chunks_mut(hidden).zip(shared.par_chunks(hidden)).zip(gate.par_iter()).for_each(|((out, shared), gate)| {
        let gate = 1.0 / (1.0 + (-gate.to_f32()).exp());
        for (out, shared) in out.iter_mut().zip(shared) {
            *out = A::from_f32(out.to_f32() + gate * shared.to_f32());
        }
    });
}
