//! The kernels that read a step: convolution, delta rule, attention; and the experts.

use highwater::error::Result;
use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::attention::{self, AttnDims};
use highwater::ops::gdn_prefill::{self, GdnDims};
use highwater::ops::kv_write::KvPages;
use highwater::ops::moe::{self, Experts, Routing};
use highwater::ops::scheme::{ActScheme, Scheme};
use highwater::ops::weight::{InputScale, LinearSpec};
use highwater::ops::{Batch, Cx, conv1d, gdn_decode};
use highwater::tensor::Tensor;

use super::operands::{Maker, Steps, floats, gathered, rows, whole};
use super::shapes::{Op, Shape};
use super::work::{Checked, Work};

/// Sequences of a decode that are checked.
const CHECKED_SEQUENCES: usize = 2;
/// First rows of a prefill that are checked: causal, so no later row matters. More than a chunk of the delta rule.
pub(super) const CHECKED_ROWS: usize = 96;
/// Tokens in the cache of a sequence that is decoded, where how many does not matter.
pub(super) const CONTEXT: usize = 1024;

/// Steps of `m` decodes after `context` tokens each, or of one prompt of `m` rows.
pub(super) fn steps(make: &Maker, copies: usize, decode: bool, m: usize, context: usize) -> Result<Steps> {
    if decode { make.steps(copies, &vec![(context, 1); m], m) } else { make.steps(copies, &[(0, m)], 0) }
}

/// How much of that is checked.
pub(super) fn checked(decode: bool, m: usize) -> usize {
    m.min(if decode { CHECKED_SEQUENCES } else { CHECKED_ROWS })
}

/// How near the first rows of two tensors are.
pub(super) fn near(got: &Tensor, want: &Tensor, rows: usize) -> Result<Checked> {
    Ok(Checked::near(&floats(got, 0..rows)?, &floats(want, 0..rows)?))
}

/// The kernel of a shape with `copies` copies of its operands.
pub(super) fn build(shape: &Shape, make: &Maker, copies: usize) -> Result<Box<dyn Work>> {
    let m = shape.m;
    let act = make.cx.numerics.activations;
    let each = |one: &dyn Fn() -> Result<Tensor>| (0..copies).map(|_| one()).collect::<Result<Vec<_>>>();
    let steps = |decode, context| steps(make, copies, decode, m, context);
    Ok(match shape.op {
        Op::Conv { channels, extra, taps, decode } => {
            let steps = steps(decode, CONTEXT)?;
            let state = make.normal(act, &[steps.slots, channels, taps - 1], 0.0, 1.0)?;
            let xs = each(&|| make.activations(&[m, channels + extra]))?;
            Box::new(Conv { decode, xs, w: make.normal(DType::F32, &[channels, taps], 0.0, 0.5)?, state, steps })
        }
        Op::GdnDecode { dims } | Op::GdnPrefill { dims } => {
            let decode = matches!(shape.op, Op::GdnDecode { .. });
            let steps = steps(decode, CONTEXT)?;
            let GdnDims { value_heads, key_dim, value_dim, .. } = dims;
            let state =
                make.normal(make.cx.numerics.state, &[steps.slots, value_heads, key_dim, value_dim], 0.0, 0.05)?;
            let xs = each(&|| make.activations(&[m, dims.channels()]))?;
            let gates = (0..copies)
                .map(|_| {
                    let g = make.decays(&[m, value_heads])?;
                    Ok(Gates { g, beta: make.normal(DType::F32, &[m, value_heads], 0.5, 0.1)? })
                })
                .collect::<Result<_>>()?;
            Box::new(Delta { decode, dims, xs, gates, state, steps })
        }
        Op::AttentionDecode { dims, kv, .. } | Op::AttentionPrefill { dims, kv } => {
            let context = if let Op::AttentionDecode { context, .. } = shape.op { Some(context) } else { None };
            let steps = steps(context.is_some(), context.unwrap_or(0))?;
            let mut pages = KvPages::new(make.cx.device, kv, steps.pages, dims)?;
            let of_a_half = pages.k.shape().to_vec();
            (pages.k, pages.v) = (make.normal(kv, &of_a_half, 0.0, 1.0)?, make.normal(kv, &of_a_half, 0.0, 1.0)?);
            if kv == DType::U8 {
                // Codes have a root mean square of 74.
                (pages.k_scale, pages.v_scale) = (1.0 / 64.0, 1.0 / 64.0);
            }
            let qkvs = each(&|| make.activations(&[m, dims.qkv_cols()]))?;
            Box::new(Attention { decode: context.is_some(), dims, qkvs, pages, steps })
        }
        Op::Route { experts, top_k } => Box::new(Route { logits: each(&|| make.activations(&[m, experts]))?, top_k }),
        Op::Experts { dims, scheme, act } => Box::new(routed(make, m, dims, scheme, act, copies)?),
        _ => unreachable!("the other kernels are built where this is called"),
    })
}

struct Conv {
    decode: bool,
    xs: Vec<Tensor>,
    w: Tensor,
    state: Tensor,
    steps: Steps,
}

impl Work for Conv {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let x = self.xs[copy].columns(0, self.w.rows());
        Ok(vec![conv1d::causal(cx, x, &self.w, &mut self.state, self.steps.batch(copy))?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = checked(self.decode, self.xs[0].rows());
        let make = Maker::new(*cpu);
        let steps = steps(&make, 1, self.decode, few, CONTEXT)?;
        let mut state = rows(cpu, &self.state, 0..steps.slots)?;
        let x = rows(cpu, &self.xs[0], 0..few)?;
        let w = whole(cpu, &self.w)?;
        let want = conv1d::causal(cpu, x.columns(0, w.rows()), &w, &mut state, steps.batch(0))?;
        let y = self.run(cx, 0)?.remove(0);
        near(&y, &want, few)
    }
}

struct Delta {
    decode: bool,
    dims: GdnDims,
    xs: Vec<Tensor>,
    gates: Vec<Gates>,
    state: Tensor,
    steps: Steps,
}

impl Delta {
    fn apply(
        decode: bool,
        cx: &Cx,
        x: &Tensor,
        gates: &Gates,
        state: &mut Tensor,
        dims: GdnDims,
        batch: Batch,
    ) -> Result<Tensor> {
        let mut out = cx.activation("bench", "out", &[x.rows(), dims.out_width()])?;
        let rule = if decode { gdn_decode::recurrent } else { gdn_prefill::chunked };
        rule(cx, x, gates, state, dims, batch, &mut out)?;
        Ok(out)
    }
}

impl Work for Delta {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let Delta { decode, dims, xs, gates, state, steps } = self;
        Ok(vec![Delta::apply(*decode, cx, &xs[copy], &gates[copy], state, *dims, steps.batch(copy))?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = checked(self.decode, self.xs[0].rows());
        let make = Maker::new(*cpu);
        let steps = steps(&make, 1, self.decode, few, CONTEXT)?;
        let mut state = rows(cpu, &self.state, 0..steps.slots)?;
        let gates = Gates { g: rows(cpu, &self.gates[0].g, 0..few)?, beta: rows(cpu, &self.gates[0].beta, 0..few)? };
        let x = rows(cpu, &self.xs[0], 0..few)?;
        let want = Delta::apply(self.decode, cpu, &x, &gates, &mut state, self.dims, steps.batch(0))?;
        let y = self.run(cx, 0)?.remove(0);
        near(&y, &want, few)
    }
}

struct Attention {
    decode: bool,
    dims: AttnDims,
    qkvs: Vec<Tensor>,
    pages: KvPages,
    steps: Steps,
}

impl Attention {
    /// The context with the type that the pages have.
    fn cx<'a>(&self, cx: &Cx<'a>) -> Cx<'a> {
        let mut cx = *cx;
        cx.numerics.kv = self.pages.k.dtype();
        cx
    }
}

impl Work for Attention {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let cx = self.cx(cx);
        Ok(vec![attention::attend(&cx, &self.qkvs[copy], &self.pages, self.dims, &self.steps.batch(copy))?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = checked(self.decode, self.qkvs[0].rows());
        let cpu = self.cx(cpu);
        let make = Maker::new(cpu);
        let context = self.steps.batch(0).spans[0].context;
        let steps = steps(&make, 1, self.decode, few, context)?;
        let mut pages = KvPages::new(cpu.device, self.pages.k.dtype(), 1, self.dims)?;
        (pages.k, pages.v) = (rows(&cpu, &self.pages.k, 0..steps.pages)?, rows(&cpu, &self.pages.v, 0..steps.pages)?);
        (pages.k_scale, pages.v_scale) = (self.pages.k_scale, self.pages.v_scale);
        let qkv = rows(&cpu, &self.qkvs[0], 0..few)?;
        let want = attention::attend(&cpu, &qkv, &pages, self.dims, &steps.batch(0))?;
        let y = self.run(cx, 0)?.remove(0);
        near(&y, &want, few)
    }
}

struct Route {
    logits: Vec<Tensor>,
    top_k: usize,
}

impl Work for Route {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let routing = moe::route(cx, &self.logits[copy], self.top_k)?;
        Ok(vec![routing.ids, routing.weights])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = self.logits[0].rows().min(CHECKED_ROWS);
        let want = moe::route(cpu, &rows(cpu, &self.logits[0], 0..few)?, self.top_k)?;
        let got = self.run(cx, 0)?;
        let ids = Checked::same(&got[0].read_range::<i32>(0, few * self.top_k)?, &want.ids.read::<i32>()?);
        Ok(ids.and(near(&got[1], &want.weights, few)?))
    }
}

/// One layer's experts, and another routing for each copy: a step touches a few experts, and which ones changes.
struct Routed {
    dims: moe::Dims,
    xs: Vec<Tensor>,
    routings: Vec<Routing>,
    experts: Experts,
}

fn routed(make: &Maker, m: usize, dims: moe::Dims, scheme: Scheme, act: ActScheme, copies: usize) -> Result<Routed> {
    let moe::Dims { hidden, inter, experts, top_k } = dims;
    let stacked = |rows: usize, cols: usize, segment_rows: usize| {
        make.weight(LinearSpec { rows: experts * rows, cols, scheme, act, segment_rows }, InputScale::None)
    };
    let (gate_up, down) = (stacked(2 * inter, hidden, inter)?, stacked(hidden, inter, hidden)?);
    let slots = make.ints(&(0..experts as i32).collect::<Vec<_>>())?;
    let each = |shape: &[usize]| (0..copies).map(|_| make.activations(shape)).collect::<Result<Vec<_>>>();
    let mut routings = Vec::with_capacity(copies);
    for logits in each(&[m, experts])? {
        let Routing { ids, weights } = moe::route(&make.cx, &logits, top_k)?;
        // Out of the arena, which is empty between steps.
        let (mut kept, mut shares) = (make.empty(DType::I32, &[m, top_k])?, make.empty(DType::F32, &[m, top_k])?);
        if make.cx.device.has_data() {
            kept.write(0, &ids.read::<i32>()?)?;
            shares.write(0, &weights.read::<f32>()?)?;
        }
        routings.push(Routing { ids: kept, weights: shares });
    }
    let experts = Experts { gate_up: gate_up.into(), down, slots };
    Ok(Routed { dims, xs: each(&[m, hidden])?, routings, experts })
}

impl Work for Routed {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        Ok(vec![moe::experts(cx, &self.xs[copy], &self.routings[copy], &self.experts, self.dims.inter)?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = self.xs[0].rows().min(CHECKED_SEQUENCES);
        let (hidden, inter, k) = (self.dims.hidden, self.dims.inter, self.dims.top_k);
        let ids = self.routings[0].ids.read_range::<i32>(0, few * k)?;
        let known = |id: &i32| usize::try_from(*id).ok().filter(|id| *id < self.dims.experts);
        let Some(mut chosen) = ids.iter().map(known).collect::<Option<Vec<usize>>>() else {
            // What the router gave is no expert.
            return Ok(Checked::wrong());
        };
        chosen.sort_unstable();
        chosen.dedup();
        // The chosen experts alone, in slots of their own.
        let mut slots = vec![-1; self.dims.experts];
        chosen.iter().enumerate().for_each(|(slot, expert)| slots[*expert] = slot as i32);
        let make = Maker::new(*cpu);
        let gate_up = gathered(cpu, &self.experts.gate_up.parts()[0], &chosen, 2 * inter)?;
        let experts = Experts {
            gate_up: gate_up.into(),
            down: gathered(cpu, &self.experts.down, &chosen, hidden)?,
            slots: make.ints(&slots)?,
        };
        let routing = Routing {
            ids: rows(cpu, &self.routings[0].ids, 0..few)?,
            weights: rows(cpu, &self.routings[0].weights, 0..few)?,
        };
        let want = moe::experts(cpu, &rows(cpu, &self.xs[0], 0..few)?, &routing, &experts, inter)?;
        let y = self.run(cx, 0)?.remove(0);
        near(&y, &want, few)
    }
}
