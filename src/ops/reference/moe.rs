//! Experts on the host. Tokens are independent: a token's row is the same bits alone, in any batch, in any block.
//!
//! A dot product over K keeps 16 partial sums, sum l over k = l mod 16 in rising k, and adds them as a tree: l with
//! l + 8, then + 4, + 2, + 1. A token's output is w_0 y_0 + w_1 y_1 + ... in routing order.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::ops::moe::{Dims, EXPERTS};
use crate::tensor::Elem;

/// Weight rows of one task.
const TASK_ROWS: usize = 32;
/// Partial sums of a dot product.
const LANES: usize = 16;

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

/// Sums of the weighted experts of every token, block after block. Scratch on the heap: one block's rows and pairs in
/// f32.
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
        let x: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        let outputs: Vec<Vec<f32>> = groups
            .par_iter()
            .map(|g| {
                let gate_up = &weights.gate_up[g.slot * 2 * inter * hidden..][..2 * inter * hidden];
                let down = &weights.down[g.slot * hidden * inter..][..hidden * inter];
                let rows: Vec<&[f32]> = g.pairs.iter().map(|&(t, _)| &x[t * hidden..][..hidden]).collect();
                let act = swiglu::<A, W>(&rows, gate_up, inter, hidden);
                let rows: Vec<&[f32]> = act.chunks(inter).collect();
                let mut y = product::<W>(&rows, down, hidden, inter);
                for v in &mut y {
                    *v = A::from_f32(*v).to_f32();
                }
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
            let terms: Vec<(f32, &[f32])> = (t * top_k..(t + 1) * top_k)
                .map(|p| (mix[p], &outputs[place[p].0][place[p].1 * hidden..][..hidden]))
                .collect();
            for (i, out) in out.iter_mut().enumerate() {
                *out = A::from_f32(terms.iter().map(|(w, y)| w * y[i]).sum());
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

/// round(silu(gate x) * up x) of each row, `[rows, inter]`.
fn swiglu<A: Elem, W: Elem>(rows: &[&[f32]], gate_up: &[W], inter: usize, hidden: usize) -> Vec<f32> {
    let (gate, up) = gate_up.split_at(inter * hidden);
    let mut by_column = vec![0.0; inter * rows.len()];
    by_column.par_chunks_mut(TASK_ROWS * rows.len()).enumerate().for_each(|(task, out)| {
        for (j, out) in out.chunks_mut(rows.len()).enumerate() {
            let row = (task * TASK_ROWS + j) * hidden;
            let (gate, up) = (&gate[row..row + hidden], &up[row..row + hidden]);
            for (x, out) in rows.iter().zip(out) {
                let [g, u] = dot2(x, gate, up);
                *out = A::from_f32(g / (1.0 + (-g).exp()) * u).to_f32();
            }
        }
    });
    transpose(&by_column, rows.len())
}

/// The product of each row with each of the `n` rows of `w` `[n, k]`, `[rows, n]`.
fn product<W: Elem>(rows: &[&[f32]], w: &[W], n: usize, k: usize) -> Vec<f32> {
    let mut by_column = vec![0.0; n * rows.len()];
    by_column.par_chunks_mut(TASK_ROWS * rows.len()).enumerate().for_each(|(task, out)| {
        for (j, out) in out.chunks_mut(2 * rows.len()).enumerate() {
            let first = task * TASK_ROWS + 2 * j;
            let second = (first + 1).min(n - 1);
            let (a, b) = (&w[first * k..][..k], &w[second * k..][..k]);
            for (r, x) in rows.iter().enumerate() {
                let [a, b] = dot2(x, a, b);
                out[r] = a;
                if let Some(out) = out.get_mut(rows.len() + r) {
                    *out = b;
                }
            }
        }
    });
    transpose(&by_column, rows.len())
}

/// `[n, rows]` as `[rows, n]`.
fn transpose(by_column: &[f32], rows: usize) -> Vec<f32> {
    let n = by_column.len() / rows;
    let mut out = vec![0.0; by_column.len()];
    out.par_chunks_mut(n).enumerate().for_each(|(r, out)| {
        for (out, column) in out.iter_mut().zip(by_column.chunks(rows)) {
            *out = column[r];
        }
    });
    out
}

/// x . a and x . b, in the order of the head of this file.
#[inline]
fn dot2<W: Elem>(x: &[f32], a: &[W], b: &[W]) -> [f32; 2] {
    let (mut p, mut q) = ([0.0f32; LANES], [0.0f32; LANES]);
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (xa, a_rest) = a.as_chunks::<LANES>();
    let (xb, b_rest) = b.as_chunks::<LANES>();
    for ((x, a), b) in xs.iter().zip(xa).zip(xb) {
        for l in 0..LANES {
            p[l] += x[l] * a[l].to_f32();
            q[l] += x[l] * b[l].to_f32();
        }
    }
    for (l, ((x, a), b)) in x_rest.iter().zip(a_rest).zip(b_rest).enumerate() {
        p[l] += x * a.to_f32();
        q[l] += x * b.to_f32();
    }
    [tree(p), tree(q)]
}

#[inline]
fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
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
