//! The gated delta rule token by token in float64, and a runner that feeds parts of streams to the ops.

use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::gdn_prefill::GdnDims;
use highwater::ops::{gdn_decode, gdn_prefill};
use highwater::tensor::Tensor;
use rand::RngExt;

use super::{Rig, Seq, Step, empty, random, rng, tensor, values};

/// The inputs of one sequence, all its tokens.
#[derive(Debug, Clone)]
pub struct Stream {
    pub dims: GdnDims,
    /// (q, k, v) rows.
    pub conv: Vec<f32>,
    /// `[tokens, value heads]`.
    pub g: Vec<f32>,
    /// As g.
    pub beta: Vec<f32>,
}

impl Stream {
    /// Random inputs that `dtype` holds exactly; decays from almost 1 down to about exp(-3), betas all over 0 to 1.
    pub fn random(dims: GdnDims, tokens: usize, dtype: DType, seed: u64) -> Stream {
        let mut rng = rng(seed);
        let conv = random(&mut rng, dtype, tokens * dims.channels(), 1.0);
        let mut gate = |f: fn(f32) -> f32| (0..tokens * dims.value_heads).map(|_| f(rng.random())).collect();
        Stream { dims, conv, g: gate(|u| -3.0 * u * u * u), beta: gate(|u| u) }
    }

    pub fn tokens(&self) -> usize {
        self.conv.len() / self.dims.channels()
    }

    /// Advances `state` `[value heads, dk, dv]` over all tokens; gives the outputs `[tokens, value heads * dv]`.
    pub fn recurrence(&self, state: &mut [f64]) -> Vec<f64> {
        let GdnDims { key_heads, value_heads, key_dim: dk, value_dim: dv } = self.dims;
        let mut outputs = Vec::new();
        for (t, row) in self.conv.chunks_exact(self.dims.channels()).enumerate() {
            for h in 0..value_heads {
                let of_key_head = h * key_heads / value_heads;
                let head = |from: usize| -> Vec<f64> {
                    let x: Vec<f64> = row[from + of_key_head * dk..][..dk].iter().map(|&x| f64::from(x)).collect();
                    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.iter().map(|x| x / norm).collect()
                };
                let (q, k) = (head(0), head(key_heads * dk));
                let v = &row[2 * key_heads * dk + h * dv..][..dv];
                let s = &mut state[h * dk * dv..][..dk * dv];
                let decay = f64::from(self.g[t * value_heads + h]).exp();
                let beta = f64::from(self.beta[t * value_heads + h]);
                for s in s.iter_mut() {
                    *s *= decay;
                }
                for c in 0..dv {
                    let read: f64 = (0..dk).map(|r| s[r * dv + c] * k[r]).sum();
                    let delta = beta * (f64::from(v[c]) - read);
                    (0..dk).for_each(|r| s[r * dv + c] += k[r] * delta);
                    outputs.push((0..dk).map(|r| s[r * dv + c] * q[r]).sum::<f64>() / (dk as f64).sqrt());
                }
            }
        }
        outputs
    }
}

/// Tokens `from..from + len` of a stream, as one sequence of a step.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    pub stream: &'a Stream,
    pub from: usize,
    pub len: usize,
    pub slot_in: i32,
    pub slot_out: i32,
    /// Whether what was before counts: a fresh sequence starts from zero.
    pub fresh: bool,
}

impl<'a> Part<'a> {
    /// Tokens `from..to`, state in `slot`, fresh at token 0.
    pub fn new(stream: &'a Stream, from: usize, to: usize, slot: i32) -> Part<'a> {
        Part { stream, from, len: to - from, slot_in: slot, slot_out: slot, fresh: from == 0 }
    }

    /// A part that goes on from what its slot holds.
    pub fn continued(self) -> Part<'a> {
        Part { fresh: false, ..self }
    }
}

/// One step over `parts`, the first `decodes` by the decode op and the others by the prefill op, into one output;
/// gives each part's rows.
pub fn run(rig: &Rig, parts: &[Part], decodes: usize, state: &mut Tensor) -> Vec<Vec<f32>> {
    run_in_pieces(rig, parts, decodes, state, None)
}

/// As [`run`], the prefills in pieces of that many chunks.
pub fn run_in_pieces(
    rig: &Rig,
    parts: &[Part],
    decodes: usize,
    state: &mut Tensor,
    pieces: Option<usize>,
) -> Vec<Vec<f32>> {
    let cx = rig.cx();
    let (act, dims) = (rig.numerics.activations, parts[0].stream.dims);
    let rows: usize = parts.iter().map(|p| p.len).sum();
    let gather = |of: fn(&Stream) -> &[f32], width: usize| -> Vec<f32> {
        parts.iter().flat_map(|p| &of(p.stream)[p.from * width..(p.from + p.len) * width]).copied().collect()
    };
    let conv = tensor(&cx, act, &[rows, dims.channels()], &gather(|s| &s.conv, dims.channels()));
    let heads = dims.value_heads;
    let gates = Gates {
        g: tensor(&cx, DType::F32, &[rows, heads], &gather(|s| &s.g, heads)),
        beta: tensor(&cx, DType::F32, &[rows, heads], &gather(|s| &s.beta, heads)),
    };
    let seqs: Vec<Seq> = parts
        .iter()
        .map(|p| {
            let context = if p.fresh { 0 } else { p.from.max(1) };
            Seq { context, len: p.len, slot_in: p.slot_in, slot_out: p.slot_out }
        })
        .collect();
    let step = Step::new(&rig.device, &seqs, decodes);
    let mut out = empty(&cx, act, &[rows, dims.out_width()]);
    gdn_decode::recurrent(&cx, &conv, &gates, state, dims, step.batch(), &mut out).unwrap();
    match pieces {
        None => gdn_prefill::chunked(&cx, &conv, &gates, state, dims, step.batch(), &mut out).unwrap(),
        Some(chunks) => {
            gdn_prefill::chunked_in_pieces(&cx, &conv, &gates, state, dims, step.batch(), &mut out, chunks).unwrap();
        }
    }
    let out = values(&out);
    let mut start = 0;
    parts
        .iter()
        .map(|p| {
            let from = start * dims.out_width();
            start += p.len;
            out[from..start * dims.out_width()].to_vec()
        })
        .collect()
}

/// A state of `slots` slots; slot i holds `slot(i)`.
pub fn state_of(rig: &Rig, dims: GdnDims, slots: usize, slot: impl Fn(usize) -> Vec<f32>) -> Tensor {
    let values: Vec<f32> = (0..slots).flat_map(slot).collect();
    let shape = [slots, dims.value_heads, dims.key_dim, dims.value_dim];
    tensor(&rig.cx(), rig.numerics.state, &shape, &values)
}

/// A state of one slot.
pub fn one_slot(rig: &Rig, dims: GdnDims, values: &[f32]) -> Tensor {
    state_of(rig, dims, 1, |_| values.to_vec())
}

/// Runs a whole stream in slot 0, cut at `cuts` (ascending).
pub fn run_cut(rig: &Rig, stream: &Stream, cuts: &[usize], fresh: bool, state: &mut Tensor) -> Vec<f32> {
    let mut out = Vec::new();
    let mut from = 0;
    for to in cuts.iter().map(|&to| to.min(stream.tokens())).chain([stream.tokens()]) {
        if to > from {
            let part = Part { fresh: fresh && from == 0, ..Part::new(stream, from, to, 0) };
            out.extend(run(rig, &[part], 0, state).remove(0));
            from = to;
        }
    }
    out
}

/// Runs tokens `from..` of a stream one by one through the decode op, in slot 0.
pub fn decode_from(rig: &Rig, stream: &Stream, from: usize, state: &mut Tensor) -> Vec<f32> {
    (from..stream.tokens())
        .flat_map(|t| run(rig, &[Part::new(stream, t, t + 1, 0).continued()], 1, state).remove(0))
        .collect()
}
