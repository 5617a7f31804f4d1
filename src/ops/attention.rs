//! Causal grouped-query attention over the paged KV cache.
//!
//! `o = softmax(q Kᵀ / sqrt(head_dim)) V` in f32; query head `h` reads kv head `h / (heads / kv_heads)`; the token at
//! position `p` of a sequence sees the cached tokens `0..=p`, its own included (so [`kv_write`](super::kv_write) comes
//! first). The result of a row depends on its sequence's tokens alone: not on the chunking, nor on the rest of the batch.

use crate::device::{Arm, DeviceSpec};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::batch::{PAGE_TOKENS, Span};
use crate::ops::cost::{Cost, Unit};
use crate::ops::kv_write::KvPages;
use crate::ops::{Batch, Cx, Limits, check, launch, reference};
use crate::tensor::Tensor;

const OP: &str = "attention";

/// Heads of one attention layer, and with them the columns of its fused projection: per query head `head_dim` of query
/// then `head_dim` of gate; then the key heads; then the value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttnDims {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rotated elements of a head: even, the first ones.
    pub rotary_dim: usize,
}

impl AttnDims {
    /// Columns of the attention's result: all query heads.
    pub fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the key heads; as many are of the value heads.
    pub fn kv_cols(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The first column of the key heads, after the queries and gates.
    pub fn k_col(&self) -> usize {
        2 * self.out_cols()
    }

    /// The first column of the value heads.
    pub fn v_col(&self) -> usize {
        self.k_col() + self.kv_cols()
    }

    /// Columns of the fused projection.
    pub fn qkv_cols(&self) -> usize {
        self.v_col() + self.kv_cols()
    }

    /// Query heads of a kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Checks the dimensions themselves, for `op`'s error.
    pub fn check(&self, op: &'static str) -> Result<()> {
        let AttnDims { heads, kv_heads, head_dim, rotary_dim } = *self;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::shape(
                op,
                format!("{heads} query heads, {kv_heads} kv heads; must be a multiple, none 0"),
            ));
        }
        if head_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(Error::shape(
                op,
                format!("head_dim {head_dim}, rotary_dim {rotary_dim}; must be above 0, and even and no larger"),
            ));
        }
        Ok(())
    }

    /// Checks a fused projection against the dimensions and the step.
    pub(super) fn check_rows(&self, op: &'static str, qkv: &Tensor, batch: &Batch) -> Result<()> {
        self.check(op)?;
        let Limits { step_tokens, context, .. } = batch.inputs.limits();
        let (tokens, dtype) = (qkv.rows(), qkv.dtype());
        if tokens == 0 || tokens > step_tokens || !matches!(dtype, DType::F32 | DType::Bf16) {
            return Err(Error::shape(
                op,
                format!("qkv has {tokens} rows of {dtype}; must be 1 to {step_tokens} of f32 or bf16"),
            ));
        }
        check::tensor(op, "qkv", qkv, dtype, &[tokens, self.qkv_cols()])?;
        check::batch(op, batch, tokens)?;
        match batch.spans.iter().enumerate().find(|(_, span)| span.context.saturating_add(span.len) > context) {
            Some((i, span)) => Err(Error::shape(op, format!("span {i} is {span:?}, must end within {context} tokens"))),
            None => Ok(()),
        }
    }
}

/// Tokens of a part of a decode's KV at least, and at most as long as that makes [`PARTS_AT_LEAST`] parts: a part's partial
/// result costs 6% of reading the least part's KV, 3% of the most's.
const PART_TOKENS: (usize, usize) = (128, 256);
/// A sequence is cut into fewer parts only where they would be too short.
const PARTS_AT_LEAST: usize = 16;

/// The most a full batch's partial results take.
pub const PARTIALS_BYTES: u64 = 64 << 20;

/// Tokens of each part of a decode that sees `length` tokens, whole pages, where there may be `splits` parts. The last
/// part is what is left. `kernels/lib/attention_decode.cuh` has the same sum: a row is cut by its own length alone, so that
/// a short sequence is spread over the card under any limits, and neither the batch nor a captured graph moves a cut.
pub fn part_tokens(length: usize, splits: usize) -> usize {
    let (least, most) = PART_TOKENS;
    let part = length.div_ceil(PARTS_AT_LEAST).clamp(least, most);
    part.max(length.div_ceil(splits.max(1))).next_multiple_of(PAGE_TOKENS)
}

/// How a call runs on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tactic {
    /// Whether tensor cores compute it: bf16 rows on pages of bf16 or codes, `head_dim` a multiple of 16 up to 256. All
    /// else takes a plain kernel, f32 throughout, that cuts nothing.
    pub tensor_cores: bool,
    /// The most parts a decode's KV is cut into, each of [`part_tokens`]: 1 needs no partial results.
    pub splits: usize,
    /// Bytes of the partial results, f32 `[decodes, heads, splits, head_dim + 2]`.
    pub workspace: u64,
}

/// The tactic for `decodes` single-row sequences under `limits`; `rows` is the type of qkv and of the result, `kv` the
/// pages'.
///
/// The most parts are as many as give each SM two blocks at batch 1, as a sequence of `limits.context` tokens can have, and
/// at most so many that a full batch's partials fit in [`PARTIALS_BYTES`]: a pure function of card, dimensions and limits.
pub fn tactic(spec: &DeviceSpec, dims: AttnDims, rows: DType, kv: DType, limits: Limits, decodes: usize) -> Tactic {
    let tensor_cores = rows == DType::Bf16
        && matches!(kv, DType::Bf16 | DType::U8)
        && dims.head_dim.is_multiple_of(16)
        && dims.head_dim <= 256;
    let row_bytes = dims.heads as u64 * (dims.head_dim as u64 + 2) * DType::F32.bytes();
    let (least, most) = PART_TOKENS;
    let parts = limits.context.div_ceil(most).max(PARTS_AT_LEAST).min(limits.context.div_ceil(least));
    let fill = (2 * spec.sms as usize).div_ceil(dims.kv_heads);
    let afford = PARTIALS_BYTES / (row_bytes * limits.batch.max(1) as u64);
    let splits = if tensor_cores { fill.min(parts).min(afford as usize).max(1) } else { 1 };
    let workspace = if splits > 1 { decodes as u64 * splits as u64 * row_bytes } else { 0 };
    Tactic { tensor_cores, splits, workspace }
}

/// The largest workspace of any step under `limits`.
pub fn upper_bound(spec: &DeviceSpec, dims: AttnDims, rows: DType, kv: DType, limits: Limits) -> u64 {
    tactic(spec, dims, rows, kv, limits, limits.batch.min(limits.step_tokens)).workspace
}

/// Attends every row of the fused `qkv`, normed and rotated, to its sequence's pages, which hold this step's keys and
/// values already: `[T, heads * head_dim]` activations, before the gate. A sequence whose first page is negative is inert:
/// its rows are zero. An error where shapes disagree or a page is outside the cache (on a GPU, which cannot give one, such a
/// page's tokens are left out).
pub fn attend(cx: &Cx, qkv: &Tensor, kv: &KvPages, dims: AttnDims, batch: &Batch) -> Result<Tensor> {
    dims.check_rows(OP, qkv, batch)?;
    kv.check(OP, dims, cx.numerics.kv)?;
    let (limits, spec, pages) = (batch.inputs.limits(), cx.device.spec(), kv.k.dtype());
    let mut out = cx.activation(OP, "out", &[batch.tokens(), dims.out_cols()])?;
    // Rows of one type, result of another: only the plain kernel takes that.
    let rows = if out.dtype() == qkv.dtype() { out.dtype() } else { DType::F32 };
    let tactic = tactic(spec, dims, rows, pages, limits, batch.decodes);
    let partials = cx.workspace(OP, tactic.workspace, |limits| upper_bound(spec, dims, rows, pages, limits))?;
    cx.note(OP, cost(dims, batch.spans, qkv.dtype(), pages));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::attention::attend(qkv, kv, dims, batch, &mut out)?,
        Arm::Cuda(cuda) => launch::attention::Call { qkv, kv, dims, batch, tactic, partials: partials.as_ref() }
            .attend(cuda, &mut out)?,
        Arm::Plan => {}
    }
    Ok(out)
}

/// Each sequence's keys and values read once, queries read once and the result written once; four operations per query
/// head, visible token and element of a head.
pub fn cost(dims: AttnDims, spans: &[Span], activations: DType, kv: DType) -> Cost {
    let (mut pairs, mut cached, mut tokens) = (0u64, 0u64, 0u64);
    for span in spans {
        let (context, len) = (span.context as u64, span.len as u64);
        pairs += context * len + len * (len + 1) / 2;
        cached += context + len;
        tokens += len;
    }
    let out_cols = dims.out_cols() as u64;
    let tensor_cores = activations == DType::Bf16 && kv != DType::F32;
    Cost {
        flops: 4 * pairs * out_cols,
        resident_bytes: cached * 2 * dims.kv_cols() as u64 * kv.bytes(),
        activation_bytes: 2 * tokens * out_cols * activations.bytes(),
        unit: if tensor_cores { Unit::Bf16 } else { Unit::F32 },
    }
}

/// A step that tests and benches share.
#[derive(Debug, Clone)]
pub struct Case {
    /// What is special about it.
    pub name: &'static str,
    /// Heads.
    pub dims: AttnDims,
    /// (cached tokens, new rows) of each sequence.
    pub sequences: Vec<(usize, usize)>,
    /// How many leading sequences are decodes.
    pub decodes: usize,
    /// The type of activations.
    pub dtype: DType,
    /// The type of the pages.
    pub kv: DType,
}

/// Group sizes 1, 2, 6 and 8; head dimensions 16, 32 and 256; contexts below, at and across page boundaries; decode,
/// prefill and both; pages of floats and of codes.
pub fn cases() -> Vec<Case> {
    use DType::{Bf16, F32, U8};
    let dims = |heads, kv_heads, head_dim, rotary_dim| AttnDims { heads, kv_heads, head_dim, rotary_dim };
    let case = |name, dims, sequences: &[(usize, usize)], decodes, dtype| Case {
        name,
        dims,
        sequences: sequences.to_vec(),
        decodes,
        dtype,
        kv: dtype,
    };
    let codes = |case: Case| Case { kv: U8, ..case };
    vec![
        case("first", dims(1, 1, 16, 4), &[(0, 1)], 0, F32),
        case("decode", dims(4, 2, 32, 8), &[(63, 1), (64, 1), (65, 1), (1, 1)], 4, F32),
        case("prefill", dims(4, 4, 16, 4), &[(0, 130)], 0, F32),
        case("chunk", dims(6, 1, 32, 8), &[(64, 64)], 0, F32),
        case("odd-chunk", dims(2, 1, 32, 8), &[(37, 91)], 0, Bf16),
        case("mixed", dims(12, 2, 256, 64), &[(200, 1), (63, 1), (0, 65), (100, 33)], 2, F32),
        case("mixed-bf16", dims(12, 2, 256, 64), &[(127, 1), (128, 1), (0, 3), (64, 70)], 2, Bf16),
        codes(case("decode-codes", dims(8, 1, 256, 64), &[(64, 1), (191, 1)], 2, Bf16)),
        codes(case("mixed-codes", dims(4, 2, 32, 8), &[(130, 1), (63, 1), (0, 65), (37, 91)], 2, Bf16)),
        codes(case("codes-f32", dims(6, 3, 16, 4), &[(64, 1), (10, 60)], 1, F32)),
    ]
}
