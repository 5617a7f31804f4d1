//! Experts on the host. Tokens are independent: a token's row is the same bits alone, in any batch, in any block.
//!
//! Projections are those of [`linear`](super::linear), in its order. A token's output is w_0 y_0 + w_1 y_1 + ... in routing order.

use std::ops::Range;

use rayon::prelude::*;

use super::linear::Product;
use super::quantise::round_trip;
use super::weight::Matrix;
use crate::error::{Error, Result};
use crate::ops::moe::{Dims, EXPERTS, Experts, Inputs};
use crate::ops::quantise::Form;
use crate::ops::scheme::{ActScheme, Global};
use crate::ops::weight::{InputScale, Weight};
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

    /// A slot's outputs of rows `x`, `cols` elements each, into columns of `y`.
    fn product<Y: Elem>(&self, x: &[f32], slot: usize, cols: usize, y: &mut [Y], pitch: usize, columns: Range<usize>) {
        let x = Matrix::F32(Rows::dense(x, cols));
        let first_row = self.first + slot * self.stride;
        Product { x: &x, w: &self.matrix, first_row, inputs: cols }.write(y, pitch, columns);
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

/// Sums of the weighted experts of every token, block after block. Scratch on the heap: one block's pairs, their
/// rows, activations (f32 before and after the SwiGLU) and outputs.
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
        let outputs: Vec<Vec<A>> = groups
            .par_iter()
            .map(|group| {
                let rows = group.pairs.iter().flat_map(|&(t, _)| &x[t * hidden..][..hidden]);
                let x: Vec<f32> = rows.map(|v| v.to_f32()).collect();
                let both = gate_up(x, weights, group.slot, inter, hidden);
                let act: Vec<A> = both.chunks(2 * inter).flat_map(|row| swiglu(row.split_at(inter))).collect();
                let act = act.iter().map(|v| v.to_f32()).collect();
                let act = entering(act, inter, weights.down.form(group.slot));
                let mut y = vec![A::from_f32(0.0); group.pairs.len() * hidden];
                weights.down.product(&act, group.slot, inter, &mut y, hidden, 0..hidden);
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

/// Rows as a projection reads them: after quantisation, each by itself, where it wants that.
fn entering(mut rows: Vec<f32>, cols: usize, form: Option<Form>) -> Vec<f32> {
    if let Some(form) = form {
        rows.par_chunks_mut(cols).for_each(|row| round_trip(row, form));
    }
    rows
}

/// Gate, then up, of each row: `[rows, 2 inter]`.
fn gate_up(x: Vec<f32>, weights: &Weights, slot: usize, inter: usize, hidden: usize) -> Vec<f32> {
    let (gate, up) = (&weights.gate, &weights.up);
    let mut both = vec![0.0; x.len() / hidden * 2 * inter];
    // Quantised once where both want the same.
    let apart = (gate.form(slot) != up.form(slot)).then(|| entering(x.clone(), hidden, up.form(slot)));
    let x = entering(x, hidden, gate.form(slot));
    gate.product(&x, slot, hidden, &mut both, 2 * inter, 0..inter);
    up.product(apart.as_ref().unwrap_or(&x), slot, hidden, &mut both, 2 * inter, inter..2 * inter);
    both
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
