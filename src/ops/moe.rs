//! Mixture of experts: the router's choice, the chosen experts' SwiGLU, and the gated shared expert.
//!
//! Experts are addressed through a slot table, so a table with holes (-1) needs no other kernel.

use crate::device::{Arm, DeviceSpec};
use crate::error::{Error, Result};
use crate::mem::ALIGN_BYTES;
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::linear::{Projection, unit};
use crate::ops::quantise;
use crate::ops::scheme::{ActScheme, Grain, Scheme};
use crate::ops::weight::{InputScale, LinearSpec, Weight};
use crate::ops::{Cx, Limits, check, launch, reference, with_elem};
use crate::tensor::Tensor;

pub(crate) const ROUTE: &str = "route";
/// The name of [`experts`] in tags, costs and errors.
pub const EXPERTS: &str = "experts";
pub(crate) const COMBINE: &str = "combine_shared";

/// The workspace of one block of tokens stays under this, however long the step. A smaller one reads the experts'
/// weights more often: 128 MiB is 3,264 tokens of the 35B-A3B in bf16, so an 8,192-token step reads them three times (in
/// FP8 on Hopper once: that path cuts a step its own way, in the same bytes).
const BLOCK_BYTES: u64 = 128 << 20;
/// Blocks are whole multiples of this many tokens, and never smaller.
const BLOCK_TOKENS: usize = 64;

/// Sizes of an MoE layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Elements of a token's row.
    pub hidden: usize,
    /// Rows of one expert's gate, and of its up projection.
    pub inter: usize,
    /// Experts the router chooses from.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
}

/// Which experts each token goes to: made by [`route`].
#[derive(Debug)]
pub struct Routing {
    /// Expert ids, i32 `[T, k]`, by falling weight.
    pub ids: Tensor,
    /// Their weights, f32 `[T, k]`, of sum 1, rounded to the activation type.
    pub weights: Tensor,
}

/// The weights of a layer's experts, stacked by slot. Where inputs are quantised by a stored scale, each slot has its own.
#[derive(Debug)]
pub struct Experts {
    /// Gate rows then up rows of each slot, `[slots x 2 inter, H]`; or, where they are not stored alike, the gates of all
    /// slots and then the ups, `[slots x inter, H]` each.
    pub gate_up: Projection,
    /// Down projection of each slot, `[slots x H, inter]`.
    pub down: Weight,
    /// The slot of each expert, i32 `[experts]`; -1 is an absent expert, and routing to it is an error.
    pub slots: Tensor,
}

/// How the inputs of the experts' projections are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// The input of each part of `gate_up`; the second is none where there is one part.
    pub x: [ActScheme; 2],
    /// The input of `down`.
    pub h: ActScheme,
}

impl Inputs {
    /// Nothing is quantised.
    pub const NONE: Inputs = Inputs { x: [ActScheme::None; 2], h: ActScheme::None };

    /// As the weights ask under `cx`.
    pub fn of(cx: &Cx, w: &Experts) -> Inputs {
        let mut x = [ActScheme::None; 2];
        for (x, part) in x.iter_mut().zip(w.gate_up.parts()) {
            *x = part.act(cx);
        }
        Inputs { x, h: w.down.act(cx) }
    }
}

/// How a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tactic {
    /// Tokens of one block; the last one may be shorter.
    pub block_tokens: usize,
    /// Bytes of workspace, for one block: the pairs sorted by expert with the experts' offsets, their SwiGLU
    /// activations `[pairs, inter]` and their outputs `[pairs, H]`; codes and scales of quantised inputs, per pair where
    /// each expert has a scale of its own and for the activations, else per token.
    pub workspace: u64,
}

/// A shape every test and bench runs.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it is for.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// The layer.
    pub dims: Dims,
    /// Activations.
    pub act: DType,
    /// Experts' weights.
    pub weights: DType,
}

/// The shapes worth trying: one token, odd sizes, one expert, all experts, the published E = 256 and k = 8, and a layer
/// large enough to time.
pub fn cases() -> Vec<Case> {
    let dims = |hidden, inter, experts, top_k| Dims { hidden, inter, experts, top_k };
    let shapes = [
        ("one token", 1, dims(32, 16, 4, 2)),
        ("odd sizes", 13, dims(37, 19, 5, 3)),
        ("one expert", 9, dims(24, 8, 1, 1)),
        ("every expert", 6, dims(33, 17, 4, 4)),
        ("more experts than tokens", 3, dims(64, 32, 256, 8)),
        ("more tokens than experts", 150, dims(48, 40, 8, 2)),
        ("decode", 1, dims(512, 256, 32, 8)),
        ("small batch", 8, dims(512, 256, 32, 8)),
        ("prefill", 64, dims(512, 256, 32, 8)),
    ];
    let mut cases = Vec::new();
    for (act, weights) in [(DType::F32, DType::F32), (DType::F32, DType::Bf16), (DType::Bf16, DType::Bf16)] {
        for (name, tokens, dims) in shapes {
            cases.push(Case { name, tokens, dims, act, weights });
        }
    }
    cases
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN_BYTES)
}

/// Rows of a quantised input: one per pair where the scale hangs on the expert, else one per token.
fn input_rows(scheme: ActScheme, tokens: usize, top_k: usize) -> u64 {
    match scheme {
        ActScheme::None => 0,
        ActScheme::Fp8Token | ActScheme::Fp8Group => tokens as u64,
        ActScheme::Fp8Tensor | ActScheme::Nvfp4 => (tokens * top_k) as u64,
    }
}

/// Where the pieces of a workspace begin, in bytes; empty ones take no room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// The pairs of a block by expert, i32.
    pub(crate) sorted: u64,
    /// Where each expert's begin among them, and the end, i32 `[E + 1]`.
    pub(crate) offsets: u64,
    /// SwiGLU activations of each pair.
    pub(crate) h: u64,
    /// Outputs of each pair.
    pub(crate) y: u64,
    /// Codes and scales of the input of each part of gate_up, and of down.
    pub(crate) inputs: [(u64, u64); 3],
    /// All of them.
    pub(crate) bytes: u64,
}

impl Layout {
    pub(crate) fn new(tokens: usize, dims: Dims, act: DType, inputs: Inputs) -> Layout {
        let pairs = (tokens * dims.top_k) as u64;
        let mut bytes = 0;
        let mut take = |piece: u64| {
            let at = bytes;
            bytes += aligned(piece);
            at
        };
        let sorted = take(4 * pairs);
        let offsets = take(4 * (dims.experts as u64 + 1));
        let h = take(pairs * dims.inter as u64 * act.bytes());
        let y = take(pairs * dims.hidden as u64 * act.bytes());
        let [gate, up] = inputs.x.map(|scheme| (scheme, input_rows(scheme, tokens, dims.top_k), dims.hidden));
        let inputs = [gate, up, (inputs.h, pairs, dims.inter)].map(|(scheme, rows, cols)| {
            let (dtype, scales) = quantise::scale_cols(scheme, cols);
            let codes = take(rows * quantise::code_cols(scheme, cols) as u64);
            (codes, take(rows * scales as u64 * dtype.bytes()))
        });
        Layout { sorted, offsets, h, y, inputs, bytes }
    }
}

fn workspace(tokens: usize, dims: Dims, act: DType, inputs: Inputs) -> u64 {
    Layout::new(tokens, dims, act, inputs).bytes
}

/// The most tokens of one block.
fn largest_block(dims: Dims, act: DType, inputs: Inputs) -> usize {
    let k = dims.top_k as u64;
    let x = inputs.x.map(|scheme| input_rows(scheme, 1, dims.top_k) * quantise::row_bytes(scheme, dims.hidden));
    let per_token = k * (4 + (dims.inter + dims.hidden) as u64 * act.bytes())
        + x.iter().sum::<u64>()
        + k * quantise::row_bytes(inputs.h, dims.inter);
    let fit = (BLOCK_BYTES / per_token.max(1)) as usize;
    (fit / BLOCK_TOKENS * BLOCK_TOKENS).max(BLOCK_TOKENS)
}

/// Blocks of equal size, as few as the workspace's limit allows. The card decides nothing here.
pub fn tactic(_spec: &DeviceSpec, tokens: usize, dims: Dims, act: DType, inputs: Inputs) -> Tactic {
    let blocks = tokens.div_ceil(largest_block(dims, act, inputs)).max(1);
    let block_tokens = tokens.div_ceil(blocks).max(1);
    Tactic { block_tokens, workspace: workspace(block_tokens, dims, act, inputs) }
}

/// The most workspace of any step within `limits`.
pub fn upper_bound(_spec: &DeviceSpec, limits: Limits, dims: Dims, act: DType, inputs: Inputs) -> u64 {
    workspace(limits.step_tokens.min(largest_block(dims, act, inputs)), dims, act, inputs)
}

/// The cost of [`experts`], with `expert_bytes` for the weights of one expert and `unit` for its products. Weight bytes
/// are those of the distinct experts expected under even routing, E (1 - (1 - k/E)^T).
pub fn cost(tokens: usize, dims: Dims, act: DType, expert_bytes: u64, unit: Unit) -> Cost {
    let Dims { hidden, inter, experts, top_k } = dims;
    let matrix = (hidden * inter) as u64;
    let missed = (1.0 - top_k as f64 / experts as f64).powi(tokens.min(i32::MAX as usize) as i32);
    let distinct = experts as f64 * (1.0 - missed);
    Cost {
        flops: (tokens * top_k) as u64 * 6 * matrix,
        resident_bytes: (distinct * expert_bytes as f64).round() as u64,
        activation_bytes: 2 * (tokens * hidden) as u64 * act.bytes() + 8 * (tokens * top_k) as u64,
        unit,
    }
}

/// The cost of [`route`].
pub fn route_cost(tokens: usize, experts: usize, top_k: usize, logits: DType) -> Cost {
    let (lanes, pairs) = ((tokens * experts) as u64, (tokens * top_k) as u64);
    Cost {
        flops: 4 * lanes + 2 * pairs,
        resident_bytes: 0,
        activation_bytes: lanes * logits.bytes() + 8 * pairs,
        unit: Unit::F32,
    }
}

/// The cost of [`combine_shared`].
pub fn combine_cost(tokens: usize, hidden: usize, act: DType) -> Cost {
    let elements = (tokens * hidden) as u64;
    Cost {
        flops: 2 * elements,
        resident_bytes: 0,
        activation_bytes: (3 * elements + tokens as u64) * act.bytes(),
        unit: Unit::F32,
    }
}

/// Chooses `top_k` of the E experts for each row of `logits` `[T, E]` (f32 or bf16): softmax over E in f32, the largest
/// k, equal logits by lower id, weights divided by their sum and rounded to the activation type.
///
/// The order is that of the logits, which the softmax keeps, so it does not hang on how a device rounds exp. A row with
/// NaN or +inf gets valid ids and NaN weights: its output is NaN and its request fails where logits are read.
pub fn route(cx: &Cx, logits: &Tensor, top_k: usize) -> Result<Routing> {
    let (tokens, experts) = (logits.rows(), logits.cols());
    if logits.shape().len() != 2 || tokens == 0 || top_k == 0 || top_k > experts {
        return Err(Error::shape(
            ROUTE,
            format!("router logits of shape {:?}, top_k {top_k}: must be [T, E] with 1 <= top_k <= E", logits.shape()),
        ));
    }
    with_elem!(ROUTE, logits.dtype(), T => { let _: Option<T> = None; Ok(()) })?;
    let mut ids = cx.alloc(ROUTE, "ids", DType::I32, &[tokens, top_k])?;
    let mut weights = cx.alloc(ROUTE, "weights", DType::F32, &[tokens, top_k])?;
    cx.note(ROUTE, route_cost(tokens, experts, top_k, logits.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            let (ids, weights) = (ids.host_mut::<i32>()?, weights.host_mut::<f32>()?);
            with_elem!(ROUTE, logits.dtype(), L => with_elem!(ROUTE, cx.numerics.activations, A => {
                reference::moe::route::<L, A>(logits.host()?, experts, top_k, ids, weights);
                Ok(())
            }))?;
        }
        Arm::Cuda(cuda) => launch::moe::route(cuda, logits, cx.numerics.activations, &mut ids, &mut weights)?,
        Arm::Plan => {}
    }
    Ok(Routing { ids, weights })
}

/// The chosen experts' outputs, weighted and summed: out = sum over k of w_k x down(silu(gate x) * up x), f32 inside,
/// k in routing order; the SwiGLU activation and each expert's output are rounded to the activation type. x is
/// `[T, H]` of the activation type, and so is the result. Inputs of the projections are quantised where weights and
/// numerics ask for it.
///
/// Tokens are taken in blocks of bounded workspace ([`tactic`]); the result does not depend on where blocks end.
/// An id outside the table, or an expert whose slot is -1, is an error that names it.
pub fn experts(cx: &Cx, x: &Tensor, routing: &Routing, w: &Experts, inter: usize) -> Result<Tensor> {
    let (tokens, hidden) = (x.rows(), x.cols());
    let act = cx.numerics.activations;
    let top_k = routing.ids.cols();
    let dims = Dims { hidden, inter, experts: w.slots.len(), top_k };
    let expect = |what: &str, t: &Tensor, dtype: DType, shape: &[usize]| check::tensor(EXPERTS, what, t, dtype, shape);
    expect("x", x, act, &[tokens, hidden])?;
    expect("routing ids", &routing.ids, DType::I32, &[tokens, top_k])?;
    expect("routing weights", &routing.weights, DType::F32, &[tokens, top_k])?;
    expect("slots", &w.slots, DType::I32, &[dims.experts])?;
    if tokens * hidden * inter * top_k == 0 || top_k > dims.experts {
        return Err(Error::shape(
            EXPERTS,
            format!("{tokens} tokens to {top_k} of {} experts, {hidden} x {inter}; none may be 0", dims.experts),
        ));
    }
    let slots = check_weights(w, dims, act)?;
    let inputs = Inputs::of(cx, w);
    let tactic = tactic(cx.device.spec(), tokens, dims, act, inputs);
    let mut out = cx.activation(EXPERTS, "out", &[tokens, hidden])?;
    let workspace =
        cx.workspace(EXPERTS, tactic.workspace, |limits| upper_bound(cx.device.spec(), limits, dims, act, inputs))?;
    let expert_bytes = (w.gate_up.bytes() + w.down.bytes()) / slots as u64;
    let unit = unit(act, w.down.spec().scheme, inputs.x[0]);
    cx.note(EXPERTS, cost(tokens, dims, act, expert_bytes, unit));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            let routed = reference::moe::Routed {
                ids: routing.ids.host()?,
                weights: routing.weights.host()?,
                slots: w.slots.host()?,
            };
            let weights = reference::moe::Weights::of(w, inputs, dims, slots)?;
            with_elem!(EXPERTS, act, A => {
                reference::moe::experts(x.host::<A>()?, routed, &weights, dims, tactic.block_tokens, out.host_mut()?)
            })?;
        }
        Arm::Cuda(cuda) => {
            let batch_invariant = cx.numerics.batch_invariant;
            let call =
                launch::moe::Call { spec: cx.device.spec(), x, routing, w, inputs, dims, slots, batch_invariant };
            if let Some(workspace) = &workspace {
                launch::moe::experts(cuda, &call, tactic.block_tokens, workspace, &mut out)?;
            }
        }
        Arm::Plan => {}
    }
    Ok(out)
}

/// Checks forms and sizes; gives the number of slots.
fn check_weights(w: &Experts, dims: Dims, act: DType) -> Result<usize> {
    let Dims { hidden, inter, .. } = dims;
    let err = |what: String| Err(Error::shape(EXPERTS, what));
    let (parts, down) = (w.gate_up.parts(), &w.down);
    if parts.len() > 2 {
        return err(format!("gate_up has {} parts, must have one or two", parts.len()));
    }
    let rows = if parts.len() == 1 { 2 * inter } else { inter };
    let slots = down.rows() / hidden;
    if down.rows() != slots * hidden || down.cols() != inter {
        return err(format!("down is [{}, {}], must be [slots x {hidden}, {inter}]", down.rows(), down.cols()));
    }
    for (weight, rows) in parts.iter().map(|part| (part, rows)).chain([(down, hidden)]) {
        let what = if std::ptr::eq(weight, down) { "down" } else { "gate_up" };
        let LinearSpec { scheme, segment_rows, act: input, .. } = *weight.spec();
        let (matrix, cols) = if what == "down" { (hidden, inter) } else { (inter, hidden) };
        if weight.rows() != slots * rows || weight.cols() != cols {
            let is = format!("{what} is [{}, {}]", weight.rows(), weight.cols());
            return err(format!("{is}, must be [{slots} slots x {rows}, {cols}]"));
        }
        if scheme == Scheme::Fp8(Grain::Block) && segment_rows != matrix {
            return err(format!(
                "{what} has segments of {segment_rows} rows, must be {matrix}: blocks end with a matrix"
            ));
        }
        if act == DType::Bf16 && scheme == Scheme::Plain(DType::F32) {
            return err(format!("bf16 activations need bf16 or quantised weights, {what} is f32"));
        }
        let each = matches!(weight.input(), InputScale::Each(scales) if scales.len() == slots);
        if matches!(input, ActScheme::Fp8Tensor | ActScheme::Nvfp4) && !each {
            return err(format!(
                "{what} quantises its input by stored scales, must have one for each of {slots} slots"
            ));
        }
    }
    Ok(slots)
}

/// out += sigmoid(gate) x shared, in f32, rounded to the activation type once. `out` and `shared` are `[T, H]`, `gate`
/// is `[T, 1]`, all of the activation type.
pub fn combine_shared(cx: &Cx, out: &mut Tensor, shared: &Tensor, gate: &Tensor) -> Result<()> {
    let act = cx.numerics.activations;
    let (tokens, hidden) = (out.rows(), out.cols());
    check::matrix(COMBINE, "out", out)?;
    check::tensor(COMBINE, "out", out, act, &[tokens, hidden])?;
    check::tensor(COMBINE, "shared", shared, act, &[tokens, hidden])?;
    check::tensor(COMBINE, "gate", gate, act, &[tokens, 1])?;
    cx.note(COMBINE, combine_cost(tokens, hidden, act));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(COMBINE, act, A => {
            reference::moe::combine_shared::<A>(out.host_mut()?, shared.host()?, gate.host()?, hidden);
            Ok(())
        }),
        Arm::Cuda(cuda) => launch::moe::combine_shared(cuda, out, shared, gate),
        Arm::Plan => Ok(()),
    }
}
