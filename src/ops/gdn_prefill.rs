//! The gated delta rule over prompts, in chunks of 64 tokens.
//!
//! The chunked (WY) form of Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024): per value head and chunk, with
//! c the running sum of g and S the state before the chunk,
//! - `A[i,j] = beta_i (k_i . k_j) exp(c_i - c_j)` for j < i, and `(I + A) X = beta (v - exp(c) k S)`,
//! - `o = exp(c) q S + tril(q k^T exp(c_i - c_j)) X`,
//! - `S <- exp(c_last) S + (k exp(c_last - c))^T X`.
//!
//! Only differences with j <= i are exponentiated, so nothing overflows. It equals the recurrence of
//! [`gdn_decode`](super::gdn_decode) in exact arithmetic. Chunks are counted from a span's first row, so a prompt split
//! at multiples of 64 gives the same chunks.
//!
//! A card takes chunks where activations are bf16 and heads are 128 x 128, on tensor cores: operands of the products are
//! rounded to bf16, sums, gates, the inverse and the state are f32. Anything else it takes token by token, in f32.

use serde::Serialize;

use crate::device::{Arm, DeviceSpec};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::activation::Gates;
use crate::ops::cost::Unit;
use crate::ops::{Batch, Cost, Cx, Limits, Span, check, launch, reference};
use crate::tensor::Tensor;
use crate::with_elem;

const OP: &str = "gdn_prefill";

/// Tokens of one chunk.
pub const CHUNK_TOKENS: usize = 64;

/// What is added under the root when q and k are made unit vectors.
pub const L2_EPS: f32 = 1e-6;

/// The matrices of the chunks held at once take no more than this, where one chunk's do not.
const PIECE_BYTES: u64 = 64 << 20;

/// The head size, of keys and of values, that bf16 activations are taken in chunks for; others go token by token.
pub(crate) const CHUNKED_DIM: usize = 128;

/// What one chunk and value head leaves for the scan: two triangles (`(I + A)^-1 beta` and `tril(q k^T ..)`) of 16 x 16
/// tiles in bf16, and in f32 three numbers a row and the chunk's whole decay, which takes four's place.
pub(crate) const CHUNK_BYTES: u64 = {
    let tiles = (CHUNK_TOKENS / 16) as u64;
    let triangle = tiles * (tiles + 1) / 2 * 16 * 16 * 2;
    2 * triangle + (3 * CHUNK_TOKENS as u64 + 4) * 4
};

/// The heads of a GDN layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GdnDims {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v, the gates, the state and the output: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of q or k.
    pub key_dim: usize,
    /// Elements of a head of v.
    pub value_dim: usize,
}

impl GdnDims {
    /// The heads by number and size.
    pub const fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> GdnDims {
        GdnDims { key_heads, value_heads, key_dim, value_dim }
    }

    /// Columns of a fused row (q, k, v): the channels of the convolution.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.out_width()
    }

    /// Columns of the output: all value heads.
    pub const fn out_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of one sequence's state.
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// One shape of the tests and benches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Heads.
    pub dims: GdnDims,
    /// The sequences: (context, rows).
    pub spans: Vec<(usize, usize)>,
    /// The activations' type.
    pub dtype: DType,
    /// The state's type.
    pub state: DType,
}

/// The shapes tests and benches share.
pub fn cases() -> Vec<Case> {
    let case =
        |name, dims, spans: &[(usize, usize)], dtype, state| Case { name, dims, spans: spans.to_vec(), dtype, state };
    let qwen = |value_heads| GdnDims::new(16, value_heads, 128, 128);
    vec![
        case("one_row", GdnDims::new(1, 1, 16, 16), &[(0, 1)], DType::F32, DType::F32),
        case("odd", GdnDims::new(1, 3, 5, 7), &[(0, 67), (3, 2)], DType::F32, DType::F32),
        case("ragged", GdnDims::new(2, 4, 32, 32), &[(64, 130), (0, 1), (0, 64), (10, 3)], DType::F32, DType::F32),
        case("0.8b_512", qwen(16), &[(0, 512)], DType::Bf16, DType::F32),
        case("27b_512", qwen(48), &[(0, 512)], DType::Bf16, DType::F32),
        case("27b_4x100_bf16", qwen(48), &[(0, 100), (64, 100), (0, 100), (128, 100)], DType::Bf16, DType::Bf16),
    ]
}

/// How the op runs on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tactic {
    /// Chunks whose matrices are held at once; 0 where the rule runs token by token and holds none.
    pub piece_chunks: usize,
    /// Bytes of workspace: a piece's matrices for every value head; then, where the state is not f32 and pieces are
    /// several, the state of the sequence that straddles two of them, in f32, twice.
    pub workspace: u64,
}

impl Tactic {
    fn new(dims: GdnDims, act: DType, state: DType, chunks: usize, piece_chunks: usize) -> Tactic {
        if !in_chunks(dims, act) {
            return Tactic { piece_chunks: 0, workspace: 0 };
        }
        let piece_chunks = piece_chunks.min(chunks).max(1);
        let carried = if state == DType::F32 || chunks <= piece_chunks { 0 } else { 2 * dims.state_len() as u64 * 4 };
        Tactic { piece_chunks, workspace: piece_chunks as u64 * dims.value_heads as u64 * CHUNK_BYTES + carried }
    }
}

/// The tactic for `chunks` chunks: the same on every card. Pieces are the fewest that fit, of one size.
pub fn tactic(_spec: &DeviceSpec, dims: GdnDims, act: DType, state: DType, chunks: usize) -> Tactic {
    let pieces = chunks.div_ceil(most_chunks(dims)).max(1);
    Tactic::new(dims, act, state, chunks, chunks.div_ceil(pieces))
}

fn in_chunks(dims: GdnDims, act: DType) -> bool {
    act == DType::Bf16 && (dims.key_dim, dims.value_dim) == (CHUNKED_DIM, CHUNKED_DIM)
}

fn most_chunks(dims: GdnDims) -> usize {
    (PIECE_BYTES / (CHUNK_BYTES * dims.value_heads as u64)).max(1) as usize
}

/// The largest workspace of any step under `limits`.
pub fn upper_bound(_spec: &DeviceSpec, limits: Limits, dims: GdnDims, act: DType, state: DType) -> u64 {
    // b sequences of n tokens together have at most b + (n - b) / 64 chunks, each but the first full. Pieces of one size
    // are largest where one more chunk would make them one more.
    let batch = limits.batch.min(limits.step_tokens);
    let chunks = batch + (limits.step_tokens - batch) / CHUNK_TOKENS;
    Tactic::new(dims, act, state, chunks, most_chunks(dims)).workspace
}

/// The least work of one call on `spans`.
pub fn cost(dims: GdnDims, spans: &[Span], dtype: DType, state: DType) -> Cost {
    let GdnDims { value_heads, key_dim, value_dim, .. } = dims;
    // Of a chunk of n rows: K S, Q S and the update, n dk dv each; K K^T and Q K^T, n n dk; the solve and P X, n n dv.
    let chunk = |n: usize| 6 * n * key_dim * value_dim + 4 * n * n * (key_dim + value_dim);
    let head_flops: usize =
        spans.iter().map(|s| s.len / CHUNK_TOKENS * chunk(CHUNK_TOKENS) + chunk(s.len % CHUNK_TOKENS)).sum();
    let rows = spans.iter().map(|s| s.len).sum::<usize>() as u64;
    let row_bytes = (dims.channels() + dims.out_width()) as u64 * dtype.bytes() + 8 * value_heads as u64;
    Cost {
        flops: (value_heads * head_flops) as u64,
        resident_bytes: state_bytes(dims, spans, state),
        activation_bytes: rows * row_bytes,
        unit: if dtype == DType::Bf16 { Unit::Bf16 } else { Unit::F32 },
    }
}

/// Bytes of state the sequences read (a fresh one reads none) and write.
pub(crate) fn state_bytes(dims: GdnDims, spans: &[Span], state: DType) -> u64 {
    let passes: u64 = spans.iter().map(|s| 1 + u64::from(s.context > 0)).sum();
    passes * dims.state_len() as u64 * state.bytes()
}

/// The rule over the batch's prefills: writes those rows of `out` `[T, value_heads*value_dim]` and their states.
///
/// conv `[T, dims.channels()]` rows are (q, k, v) after the convolution; q and k are made unit vectors here, q is
/// scaled by key_dim^-0.5, value head h uses key head h / (value heads / key heads). The numerics' state type keeps
/// state `[slots, value_heads, key_dim, value_dim]`. A fresh sequence's state counts as zero; slot_in -1 gives zero
/// rows and changes no slot.
pub fn chunked(
    cx: &Cx,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
) -> Result<()> {
    let chunks = chunks(batch.spans.get(batch.decodes..).unwrap_or_default());
    let piece_chunks = tactic(cx.device.spec(), dims, conv.dtype(), state.dtype(), chunks).piece_chunks;
    chunked_in_pieces(cx, conv, gates, state, dims, batch, out, piece_chunks)
}

pub(super) fn chunks(spans: &[Span]) -> usize {
    spans.iter().map(|s| s.len.div_ceil(CHUNK_TOKENS)).sum()
}

/// As [`chunked`], with the matrices of `piece_chunks` chunks held at once: the results are the same bits for any number.
pub fn chunked_in_pieces(
    cx: &Cx,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
    piece_chunks: usize,
) -> Result<()> {
    check_operands(OP, cx, conv, gates, state, dims, &batch, out)?;
    let spans = batch.prefills();
    if spans.is_empty() {
        return Ok(());
    }
    let (spec, act, kept) = (cx.device.spec(), conv.dtype(), state.dtype());
    let tactic = Tactic::new(dims, act, kept, chunks(spans), piece_chunks);
    let workspace = cx.workspace(OP, tactic.workspace, |limits| upper_bound(spec, limits, dims, act, kept))?;
    cx.note(OP, cost(dims, spans, act, kept));
    match cx.device.arm() {
        // The CPU arm solves and does not invert; its heap scratch is a chunk per thread and a slice per (row, head).
        Arm::Cpu(_) => with_elem!(OP, act, E => with_elem!(OP, kept, S => {
            let states = reference::slots::split::<S>(
                OP, state.host_mut()?, dims.state_len(), &batch,
                batch.decodes..batch.spans.len(),
            )?;
            let (g, beta) = (gates.g.host()?, gates.beta.host()?);
            reference::gdn_prefill::chunked::<E, S>(conv.host()?, g, beta, states, dims, spans, out.host_mut()?);
            Ok(())
        })),
        Arm::Cuda(cuda) => match workspace {
            Some(work) => {
                launch::gdn_prefill::chunked(cuda, spec.sms, conv, gates, state, dims, batch, out, tactic, &work)
            }
            None => launch::gdn_prefill::by_token(cuda, conv, gates, state, dims, batch, out),
        },
        Arm::Plan => Ok(()),
    }
}

/// The contract that the prefill and the decode op share.
pub(crate) fn check_operands(
    op: &'static str,
    cx: &Cx,
    conv: &Tensor,
    gates: &Gates,
    state: &Tensor,
    dims: GdnDims,
    batch: &Batch,
    out: &Tensor,
) -> Result<()> {
    let GdnDims { key_heads, value_heads, key_dim, value_dim } = dims;
    if key_heads == 0 || value_heads == 0 || key_dim == 0 || value_dim == 0 || value_heads % key_heads != 0 {
        let what = format!("{dims:?}: every number must be positive, value_heads a multiple of key_heads");
        return Err(Error::shape(op, what));
    }
    let (rows, _) = check::matrix(op, "conv", conv)?;
    check::tensor(op, "conv", conv, cx.numerics.activations, &[rows, dims.channels()])?;
    check::tensor(op, "g", &gates.g, DType::F32, &[rows, value_heads])?;
    check::tensor(op, "beta", &gates.beta, DType::F32, &[rows, value_heads])?;
    check::tensor(op, "state", state, cx.numerics.state, &[state.rows(), value_heads, key_dim, value_dim])?;
    check::tensor(op, "out", out, cx.numerics.activations, &[rows, dims.out_width()])?;
    check::batch(op, batch, rows)
}
