//! Experts on the host. Tokens are independent: a token's row is the same bits alone, in any batch, in any block.
//!
//! A dot product over K keeps 16 partial sums, sum l over k = l mod 16 in rising k, and adds them as a tree: l with
//! l + 8, then + 4, + 2, + 1. A token's output is w_0 y_0 + w_1 y_1 + ... in routing order.

use rayon::prelude::*;

use super::quantise::round_trip;
use super::weight::Matrix;
use crate::error::{Error, Result};
use crate::ops::moe::{Dims, EXPERTS, Experts, Inputs};
use crate::ops::quantise::Form;
use crate::ops::scheme::{ActScheme, Global};
use crate::ops::weight::{InputScale, Weight};
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

/// One projection of every slot, and how its input is quantised.
#[derive(Debug, Clone, Copy)]
struct Side<'a> {
    matrix: Matrix<'a>,
    /// The row of slot 0.
    first: usize,
    /// Rows from one slot to the next.
    stride: usize,
    act: ActScheme,
    /// By slot, where the scheme stores them.
    scales: &'a [f32],
    sense: Global,
}

impl<'a> Side<'a> {
    fn of(w: &'a Weight, act: ActScheme, first: usize, stride: usize) -> Result<Side<'a>> {
        let scales = if let InputScale::Each(scales) = w.input() { scales.host()? } else { &[] };
        let sense = if act == ActScheme::Nvfp4 { w.global()? } else { Global::Multiplies };
        Ok(Side { matrix: Matrix::weight(w)?, first, stride, act, scales, sense })
    }

    fn row(&self, slot: usize, row: usize) -> usize {
        self.first + slot * self.stride + row
    }

    fn form(&self, slot: usize) -> Option<Form> {
        match self.act {
            ActScheme::None => None,
            ActScheme::Fp8Tensor => Some(Form::Fp8Tensor(self.scales[slot])),
            ActScheme::Fp8Token => Some(Form::Fp8Token),
            ActScheme::Fp8Group => Some(Form::Fp8Group),
            ActScheme::Nvfp4 => Some(Form::Nvfp4(self.scales[slot], self.sense)),
        }
    }
}

/// The experts' matrices.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    gate: Side<'a>,
    up: Side<'a>,
    down: Side<'a>,
    slots: usize,
}

impl<'a> Weights<'a> {
    /// The host's view of `w`, whose inputs are quantised as `inputs` says; the op has checked the sizes.
    pub fn of(w: &'a Experts, inputs: Inputs, dims: Dims, slots: usize) -> Result<Weights<'a>> {
        let inter = dims.inter;
        let (gate, up) = match w.gate_up.parts() {
            [gate, up] => (Side::of(gate, inputs.x[0], 0, inter)?, Side::of(up, inputs.x[1], 0, inter)?),
            parts => {
                let gate = Side::of(&parts[0], inputs.x[0], 0, 2 * inter)?;
                (gate, Side { first: inter, ..gate })
            }
        };
        Ok(Weights { gate, up, down: Side::of(&w.down, inputs.h, 0, dims.hidden)?, slots })
    }
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
/// f32, and two rows of weights per thread.
pub fn experts<A: Elem>(
    x: &[A],
    routed: Routed,
    weights: &Weights,
    dims: Dims,
    block_tokens: usize,
    out: &mut [A],
) -> Result<()> {
    let Dims { hidden, inter, top_k, .. } = dims;
    let blocks = x.chunks(block_tokens * hidden).zip(out.chunks_mut(block_tokens * hidden)).enumerate();
    for (block, (x, out)) in blocks {
        let first = block * block_tokens * top_k;
        let pairs = x.len() / hidden * top_k;
        let ids = &routed.ids[first..first + pairs];
        let mix = &routed.weights[first..first + pairs];
        let groups = group(ids, block * block_tokens, routed.slots, weights.slots, top_k)?;
        let x: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        let outputs: Vec<Vec<f32>> = groups
            .par_iter()
            .map(|g| {
                let rows: Vec<&[f32]> = g.pairs.iter().map(|&(t, _)| &x[t * hidden..][..hidden]).collect();
                let mut act = swiglu::<A>(&rows, weights, g.slot, inter);
                quantised(&mut act, inter, weights.down.form(g.slot));
                let rows: Vec<&[f32]> = act.chunks(inter).collect();
                let mut y = product(&rows, &weights.down, g.slot, hidden);
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

/// Rows after quantisation, each by itself.
fn quantised(rows: &mut [f32], cols: usize, form: Option<Form>) {
    if let Some(form) = form {
        rows.par_chunks_mut(cols).for_each(|row| round_trip(row, form));
    }
}

/// round(silu(gate x) * up x) of each row, `[rows, inter]`.
fn swiglu<A: Elem>(rows: &[&[f32]], weights: &Weights, slot: usize, inter: usize) -> Vec<f32> {
    let (hidden, gate, up) = (rows[0].len(), &weights.gate, &weights.up);
    let entering = |side: &Side| {
        let mut rows = rows.concat();
        quantised(&mut rows, hidden, side.form(slot));
        rows
    };
    let for_gate = entering(gate);
    let of_its_own = (up.form(slot) != gate.form(slot)).then(|| entering(up));
    let for_up = of_its_own.as_ref().unwrap_or(&for_gate);
    let mut by_column = vec![0.0; inter * rows.len()];
    by_column.par_chunks_mut(TASK_ROWS * rows.len()).enumerate().for_each_init(
        || [vec![0.0; hidden], vec![0.0; hidden]],
        |[a, b], (task, out)| {
            for (j, out) in out.chunks_mut(rows.len()).enumerate() {
                let row = task * TASK_ROWS + j;
                let gate = gate.matrix.row(gate.row(slot, row), a);
                let up = up.matrix.row(up.row(slot, row), b);
                for ((xg, xu), out) in for_gate.chunks(hidden).zip(for_up.chunks(hidden)).zip(out) {
                    let [g, u] = dot2([xg, xu], gate, up);
                    *out = A::from_f32(g / (1.0 + (-g).exp()) * u).to_f32();
                }
            }
        },
    );
    transpose(&by_column, rows.len())
}

/// The product of each row with each of a slot's `n` rows, `[rows, n]`.
fn product(rows: &[&[f32]], side: &Side, slot: usize, n: usize) -> Vec<f32> {
    let cols = rows[0].len();
    let mut by_column = vec![0.0; n * rows.len()];
    by_column.par_chunks_mut(TASK_ROWS * rows.len()).enumerate().for_each_init(
        || [vec![0.0; cols], vec![0.0; cols]],
        |[a, b], (task, out)| {
            for (j, out) in out.chunks_mut(2 * rows.len()).enumerate() {
                let first = task * TASK_ROWS + 2 * j;
                let second = (first + 1).min(n - 1);
                let a = side.matrix.row(side.row(slot, first), a);
                let b = side.matrix.row(side.row(slot, second), b);
                for (r, &x) in rows.iter().enumerate() {
                    let [a, b] = dot2([x, x], a, b);
                    out[r] = a;
                    if let Some(out) = out.get_mut(rows.len() + r) {
                        *out = b;
                    }
                }
            }
        },
    );
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

/// x0 . a and x1 . b, in the order of the head of this file.
#[inline]
fn dot2(x: [&[f32]; 2], a: &[f32], b: &[f32]) -> [f32; 2] {
    let (mut p, mut q) = ([0.0f32; LANES], [0.0f32; LANES]);
    let [(x0, rest0), (x1, rest1)] = x.map(|x| x.as_chunks::<LANES>());
    let (xa, a_rest) = a.as_chunks::<LANES>();
    let (xb, b_rest) = b.as_chunks::<LANES>();
    for (((x0, x1), a), b) in x0.iter().zip(x1).zip(xa).zip(xb) {
        for l in 0..LANES {
            p[l] += x0[l] * a[l];
            q[l] += x1[l] * b[l];
        }
    }
    for (l, (((x0, x1), a), b)) in rest0.iter().zip(rest1).zip(a_rest).zip(b_rest).enumerate() {
        p[l] += x0 * a;
        q[l] += x1 * b;
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
