//! From logits to a token: bias and penalties, temperature, min-p, top-k, top-p, a draw; and raw log-probabilities.
//!
//! The chain is vLLM's, in its order. Everything that decides a token is exact or integer (see
//! [`reference::sampler`]), so the token of a row depends on its logits and its [`SampleRow`] alone: not on the batch,
//! nor on how a device splits the row.

pub mod row;

use std::borrow::Borrow;
use std::ops::Range;

pub use row::{LIST_STEP, MAX_BIASES, MAX_LOGPROBS, SampleRow};

use crate::device::{Arm, DeviceSpec};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Cx, Limits, launch, reference, with_elem};
use crate::tensor::Tensor;

const SAMPLE: &str = "sample";
const LOGPROBS: &str = "logprobs";

/// Most columns of a row of logits: probability masses are 64-bit integers of at least 40 bits below a row's sum.
pub const MAX_VOCAB: usize = 1 << 22;

/// Bytes of one row's parameters on the device: sixteen 32-bit words.
const PARAM_BYTES: u64 = 64;
/// Bytes of one edit on the device: id, count, bias, and whether it is seen.
const EDIT_BYTES: u64 = 16;
/// Edits of the rows taken together, unless one row alone has more: 4 MiB.
const GROUP_EDITS: usize = 1 << 18;
/// A device keeps, per row, what its parts tell each other: sums and maxima, then a histogram of counts (4 B) and masses
/// (8 B), then a list...
const ROW_BYTES: u64 = 2048 * (4 + 8);
/// ... and one partial result per part of the row.
const PARTIAL_BYTES: u64 = 16;
/// Most parts of a row.
const MAX_SPLITS: u32 = 64;
/// Blocks that a multiprocessor runs side by side.
const BLOCKS_PER_SM: u32 = 3;

/// A change to one lane of a row before anything else is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Edit {
    /// The lane.
    pub id: u32,
    /// Times the token is in the output.
    pub count: u32,
    /// Whether the token is in the prompt or the output, so that the repetition penalty applies.
    pub seen: bool,
    /// Added first.
    pub bias: f32,
}

/// How a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tactic {
    /// Parts of a row that are scanned side by side.
    pub splits: u32,
    /// Bytes of workspace: what each row keeps and the partial results of its parts.
    pub workspace: u64,
}

/// A drawn token for each row of logits.
#[derive(Debug)]
pub struct Sampled {
    /// Token ids, i32 `[n]`; -1 where the row is not valid.
    pub tokens: Tensor,
    /// 1 where the row has a finite logit, else 0: u8 `[n]`.
    pub valid: Tensor,
    /// Raw log-probability of the token, f32 `[n]`; NaN where the row is not valid.
    pub logprobs: Tensor,
    /// The most likely tokens by raw logits, where some row asks for them.
    pub top: Option<TopLogprobs>,
}

/// The most likely tokens of each row, by raw logits, larger first, equal ones by lower id.
#[derive(Debug)]
pub struct TopLogprobs {
    /// i32 `[n, m]`; -1 past the row's own count or its finite lanes.
    pub ids: Tensor,
    /// f32 `[n, m]`; -inf where the id is -1.
    pub logprobs: Tensor,
}

/// One row's result, read back.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The id.
    pub id: u32,
    /// Its raw log-probability.
    pub logprob: f32,
    /// (id, raw log-probability) of the most likely tokens, as many as the row asked for (fewer where fewer are finite).
    pub top: Vec<(u32, f32)>,
}

/// Raw log-probabilities of given tokens: made by [`logprobs`].
#[derive(Debug)]
pub struct Logprobs {
    /// f32 `[n]`; -inf where the target's own logit is not finite or its id is not decodable, NaN where the row is not
    /// valid (and, on a card, where the target is no id of the vocabulary).
    pub targets: Tensor,
    /// 1 where the row has a finite logit, else 0: u8 `[n]`.
    pub valid: Tensor,
    /// The most likely tokens, where asked for.
    pub top: Option<TopLogprobs>,
}

/// A shape every test and bench runs.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it is for.
    pub name: &'static str,
    /// Rows of logits.
    pub rows: usize,
    /// Columns.
    pub vocab: usize,
    /// Ids below this may be drawn.
    pub decodable: usize,
    /// Type of the logits.
    pub dtype: DType,
}

/// The shapes worth trying: one lane, padding beyond the decodable ids, odd sizes, the published vocabulary.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (name, rows, vocab, decodable) in [
            ("one lane", 1, 1, 1),
            ("padded", 3, 320, 300),
            ("odd", 7, 1031, 1031),
            ("published vocabulary", 2, 248_320, 248_077),
        ] {
            cases.push(Case { name, rows, vocab, decodable, dtype });
        }
    }
    cases
}

/// As many parts as run side by side, the same for each row.
pub fn tactic(spec: &DeviceSpec, rows: usize) -> Tactic {
    let splits = (BLOCKS_PER_SM * spec.sms / rows.max(1) as u32).clamp(1, MAX_SPLITS);
    let workspace = rows as u64 * (ROW_BYTES + u64::from(splits) * PARTIAL_BYTES);
    Tactic { splits, workspace }
}

/// The most workspace of up to `limits.batch` rows: they have at most [`MAX_SPLITS`] parts each, and together as many as
/// run side by side or one each.
pub fn upper_bound(spec: &DeviceSpec, limits: Limits) -> u64 {
    let rows = limits.batch as u64;
    let parts = (u64::from(MAX_SPLITS) * rows).min(u64::from(BLOCKS_PER_SM * spec.sms).max(rows));
    rows * ROW_BYTES + parts * PARTIAL_BYTES
}

/// The most bytes of edit lists of up to `limits.batch` rows. Rows are taken in groups whose edits fit
/// [`GROUP_EDITS`] together, or alone, so the bound does not grow with batch x context.
pub fn edits_upper_bound(limits: Limits) -> u64 {
    // A place for each distinct token of the prompt and for each token of the output.
    let row = (MAX_BIASES + limits.context).next_multiple_of(LIST_STEP);
    let group = limits.batch.saturating_mul(row).min(GROUP_EDITS.max(row));
    group as u64 * EDIT_BYTES
}

/// The cost of sampling `rows` rows: one reading of the logits; a few operations per lane.
pub fn cost(rows: usize, vocab: usize, dtype: DType) -> Cost {
    const FLSAMPLES_PER_LANE: u64 = 40;
    let lanes = (rows * vocab) as u64;
    Cost {
        flops: lanes * FLSAMPLES_PER_LANE,
        resident_bytes: 0,
        activation_bytes: lanes * dtype.bytes() + rows as u64 * (PARAM_BYTES + 9),
        unit: Unit::F32,
    }
}

/// The edits of a row, by rising id, each id once.
pub fn edits(row: &SampleRow, vocab: usize) -> Result<Vec<Edit>> {
    let mut list: Vec<Edit> = row.bias.iter().map(|&(id, bias)| Edit { id, count: 0, seen: false, bias }).collect();
    if row.repeats() {
        list.extend(row.prompt_ids.iter().map(|&id| Edit { id, count: 0, seen: true, bias: 0.0 }));
    }
    if row.penalises() {
        let counted = row.output_counts.iter().filter(|(_, count)| *count > 0);
        list.extend(counted.map(|&(id, count)| Edit { id, count, seen: true, bias: 0.0 }));
    }
    if let Some(edit) = list.iter().find(|e| e.id as usize >= vocab) {
        return Err(Error::shape(
            SAMPLE,
            format!("token {} of a prompt or output, the vocabulary has {vocab}", edit.id),
        ));
    }
    list.sort_by_key(|e| e.id);
    list.dedup_by(|next, kept| {
        let same = next.id == kept.id;
        if same {
            kept.count = kept.count.saturating_add(next.count);
            kept.seen |= next.seen;
            kept.bias += next.bias;
        }
        same
    });
    Ok(list)
}

/// Consecutive rows whose edits are on the device together, given each row's places.
fn groups(places: &[usize]) -> Vec<Range<usize>> {
    let mut groups = Vec::new();
    let (mut first, mut held) = (0, 0);
    for (i, &count) in places.iter().enumerate() {
        if i > first && held + count > GROUP_EDITS {
            groups.push(first..i);
            (first, held) = (i, 0);
        }
        held += count;
    }
    groups.push(first..places.len());
    groups
}

/// Draws a token for each row of `logits` `[n, V]` (f32 or bf16) by the parameters of `rows[i]`; ids from `decodable`
/// on are never drawn, and NaN and infinite lanes are ignored. A row without a finite lane is not valid and has no
/// token.
///
/// The order is vLLM's: bias (added), repetition penalty (divides positive logits, multiplies negative ones, of prompt
/// and output tokens), frequency then presence penalty (subtracted, output tokens), temperature (divides), min-p,
/// top-k, top-p, the draw. Temperatures below 1e-5 take the largest logit after the penalties, equal ones by lower id.
///
/// Ties. top-k keeps every value equal to the k-th, as vLLM does, but k = 1 is the greedy token. top-p keeps the fewest
/// tokens, larger first and equal ones by lower id, whose share of what top-k left reaches p; at least one.
///
/// Parameters out of range are [`Error::Request`] ([`SampleRow::check`]).
pub fn sample<R: Borrow<SampleRow>>(cx: &Cx, logits: &Tensor, rows: &[R], decodable: usize) -> Result<Sampled> {
    check_logits(SAMPLE, logits, decodable)?;
    let (n, vocab) = (logits.rows(), logits.cols());
    if rows.len() != n {
        return Err(Error::shape(SAMPLE, format!("{n} rows of logits, {} rows of parameters", rows.len())));
    }
    let rows: Vec<&SampleRow> = rows.iter().map(Borrow::borrow).collect();
    let mut lists = Vec::with_capacity(n);
    for row in &rows {
        row.check(decodable)?;
        lists.push(edits(row, vocab)?);
    }
    let places: Vec<usize> = rows.iter().map(|r| r.edits()).collect();
    let groups = groups(&places);
    let largest = groups.iter().map(|group| places[group.clone()].iter().sum::<usize>()).max().unwrap_or(0);
    let edit_bytes = largest as u64 * EDIT_BYTES;
    let edit_bytes = cx.bound.map_or(edit_bytes, |limits| edits_upper_bound(limits).max(edit_bytes));
    let asked = rows.iter().map(|r| r.logprobs as usize).max().unwrap_or(0);
    let width = if cx.bound.is_some() { MAX_LOGPROBS } else { asked };

    let tokens = cx.alloc(SAMPLE, "tokens", DType::I32, &[n])?;
    let valid = cx.alloc(SAMPLE, "valid", DType::U8, &[n])?;
    let logprobs = cx.alloc(SAMPLE, "logprobs", DType::F32, &[n])?;
    let top = TopLogprobs::alloc(cx, SAMPLE, n, width)?;
    let mut out = Sampled { tokens, valid, logprobs, top };
    let params = cx.alloc(SAMPLE, "params", DType::U8, &[n, PARAM_BYTES as usize])?;
    let edits = (edit_bytes > 0).then(|| cx.alloc(SAMPLE, "edits", DType::U8, &[edit_bytes as usize])).transpose()?;
    let spec = cx.device.spec();
    let tactic = tactic(spec, n);
    let workspace = cx.workspace(SAMPLE, tactic.workspace, |limits| upper_bound(spec, limits))?;
    cx.note(SAMPLE, cost(n, vocab, logits.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            let drawn: Vec<_> = with_elem!(SAMPLE, logits.dtype(), L => {
                Ok(reference::sampler::sample::<L>(logits.host()?, vocab, decodable, &rows, &lists))
            })?;
            for (i, row) in drawn.iter().enumerate() {
                out.tokens.host_mut::<i32>()?[i] = row.token.map_or(-1, |(id, _)| id as i32);
                out.valid.host_mut::<u8>()?[i] = u8::from(row.token.is_some());
                out.logprobs.host_mut::<f32>()?[i] = row.token.map_or(f32::NAN, |(_, logprob)| logprob);
                if let Some(top) = &mut out.top {
                    top.put(i, &row.top)?;
                }
            }
        }
        Arm::Cuda(cuda) => {
            let scratch = launch::sampler::Scratch { params, edits, workspace, splits: tactic.splits };
            let rows = launch::sampler::Rows { params: &rows, lists: &lists, groups: &groups };
            launch::sampler::sample(cuda, logits, decodable, &rows, scratch, &mut out)?;
        }
        Arm::Plan => {}
    }
    Ok(out)
}

/// Log-softmax of the raw logits `[n, V]` (f32 or bf16) at `targets` (i32 `[n]`), and the `top_n` most likely tokens.
/// The distribution is over the finite lanes of the decodable ids. A target outside 0..V is an error that names it; a card,
/// which cannot refuse it, gives NaN.
pub fn logprobs(cx: &Cx, logits: &Tensor, targets: &Tensor, top_n: usize, decodable: usize) -> Result<Logprobs> {
    check_logits(LOGPROBS, logits, decodable)?;
    let (n, vocab) = (logits.rows(), logits.cols());
    if targets.shape() != [n] || targets.dtype() != DType::I32 {
        return Err(Error::shape(
            LOGPROBS,
            format!("targets are {} {:?}, must be i32 [{n}]", targets.dtype(), targets.shape()),
        ));
    }
    if top_n > MAX_LOGPROBS {
        return Err(Error::shape(LOGPROBS, format!("{top_n} most likely tokens, at most {MAX_LOGPROBS}")));
    }
    let width = if cx.bound.is_some() { MAX_LOGPROBS } else { top_n };
    let mut out = Logprobs {
        targets: cx.alloc(LOGPROBS, "targets", DType::F32, &[n])?,
        valid: cx.alloc(LOGPROBS, "valid", DType::U8, &[n])?,
        top: TopLogprobs::alloc(cx, LOGPROBS, n, width)?,
    };
    cx.note(LOGPROBS, cost(n, vocab, logits.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => {
            let targets = targets.host::<i32>()?;
            if let Some((i, t)) = targets.iter().enumerate().find(|(_, t)| **t < 0 || **t as usize >= vocab) {
                return Err(Error::shape(LOGPROBS, format!("target {t} of row {i}, the vocabulary has {vocab}")));
            }
            let rows = with_elem!(LOGPROBS, logits.dtype(), L => {
                Ok(reference::sampler::logprobs::<L>(logits.host()?, vocab, decodable, targets, top_n))
            })?;
            for (i, row) in rows.iter().enumerate() {
                out.targets.host_mut::<f32>()?[i] = row.target.unwrap_or(f32::NAN);
                out.valid.host_mut::<u8>()?[i] = u8::from(row.target.is_some());
                if let Some(top) = &mut out.top {
                    top.put(i, &row.top)?;
                }
            }
        }
        Arm::Cuda(cuda) => launch::sampler::logprobs(cuda, logits, targets, top_n, decodable, &mut out)?,
        Arm::Plan => {}
    }
    Ok(out)
}

fn check_logits(op: &'static str, logits: &Tensor, decodable: usize) -> Result<()> {
    let (shape, vocab) = (logits.shape(), logits.cols());
    if shape.len() != 2 || logits.is_empty() || vocab > MAX_VOCAB {
        return Err(Error::shape(op, format!("logits of shape {shape:?}, must be [n, V], V at most {MAX_VOCAB}")));
    }
    if decodable == 0 || decodable > vocab {
        return Err(Error::shape(op, format!("{decodable} decodable ids, must be 1 to the {vocab} columns of logits")));
    }
    with_elem!(op, logits.dtype(), T => { let _: Option<T> = None; Ok(()) })
}

impl TopLogprobs {
    fn alloc(cx: &Cx, op: &'static str, rows: usize, per_row: usize) -> Result<Option<TopLogprobs>> {
        if per_row == 0 {
            return Ok(None);
        }
        let ids = cx.alloc(op, "top_ids", DType::I32, &[rows, per_row])?;
        let logprobs = cx.alloc(op, "top_logprobs", DType::F32, &[rows, per_row])?;
        Ok(Some(TopLogprobs { ids, logprobs }))
    }

    fn put(&mut self, row: usize, top: &[(u32, f32)]) -> Result<()> {
        let m = self.ids.cols();
        let ids = &mut self.ids.host_mut::<i32>()?[row * m..][..m];
        ids.fill(-1);
        ids.iter_mut().zip(top).for_each(|(d, s)| *d = s.0 as i32);
        let logprobs = &mut self.logprobs.host_mut::<f32>()?[row * m..][..m];
        logprobs.fill(f32::NEG_INFINITY);
        logprobs.iter_mut().zip(top).for_each(|(d, s)| *d = s.1);
        Ok(())
    }

    /// Row `row` as pairs (id, log-probability), read back.
    pub fn row(&self, row: usize) -> Result<Vec<(u32, f32)>> {
        let m = self.ids.cols();
        Ok(pairs(&self.ids.read_range(row * m, m)?, &self.logprobs.read_range(row * m, m)?))
    }

    /// Every row as pairs (id, log-probability), read back in one piece.
    pub fn read(&self) -> Result<Vec<Vec<(u32, f32)>>> {
        let m = self.ids.cols();
        let (ids, logprobs) = (self.ids.read::<i32>()?, self.logprobs.read::<f32>()?);
        Ok(ids.chunks(m).zip(logprobs.chunks(m)).map(|(ids, logprobs)| pairs(ids, logprobs)).collect())
    }
}

/// One row's most likely tokens, up to the first place without one.
fn pairs(ids: &[i32], logprobs: &[f32]) -> Vec<(u32, f32)> {
    ids.iter().zip(logprobs).take_while(|(id, _)| **id >= 0).map(|(&id, &l)| (id as u32, l)).collect()
}

impl Sampled {
    /// Every row, read back; `None` where the row is not valid. [`Error::NoData`] on the plan device.
    pub fn read(&self) -> Result<Vec<Option<Token>>> {
        let (tokens, logprobs) = (self.tokens.read::<i32>()?, self.logprobs.read::<f32>()?);
        let mut top = self.top.as_ref().map(TopLogprobs::read).transpose()?.unwrap_or_default().into_iter();
        let rows = self.valid.read::<u8>()?.into_iter().zip(tokens).zip(logprobs);
        let rows = rows.map(|((valid, id), logprob)| {
            let top = top.next().unwrap_or_default();
            (valid != 0).then_some(Token { id: id as u32, logprob, top })
        });
        Ok(rows.collect())
    }
}
