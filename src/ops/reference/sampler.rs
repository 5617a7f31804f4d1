//! Sampling on the host, in a form any device can repeat bit for bit.
//!
//! - Order is by (logit after penalties, falling; id, rising), which is total, so no split of a row changes it.
//! - A probability mass is `exp(t - max t)` from [`elementary::exp`], cut to an integer of 2^-s of the largest one; sums
//!   of integers have no order. s leaves the sum of a whole row below 2^63.
//! - The draw is a race of exponentials: the token of the largest `exp(t - max t) / E`, with E the exponential variate
//!   of (seed, step, id). The winner is token i with probability p_i (the least of independent exponentials of rates p),
//!   each lane is computed by itself, and the best of any parts is the best of the row. Inverting the cumulative sum
//!   would need all masses before a token, hence a scan and a written split.
//!
//! Scratch is a few numbers per lane of each row in flight, on the heap.

use std::cmp::Ordering;

use rayon::prelude::*;

use crate::num::elementary::{self, exponential};
use crate::num::philox::philox4x32;
use crate::ops::sampler::{Edit, SampleRow};
use crate::tensor::Elem;

/// Fourth counter word of every draw: keeps the sampler's numbers apart from others of the same key.
const DRAW: u32 = 0x7361_6D70;
/// Lanes ordered first when looking for the top-p set; grows by [`HEAD_GROWTH`] while they do not reach p.
const HEAD_LANES: usize = 256;
const HEAD_GROWTH: usize = 8;

/// The result of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token and its raw log-probability; `None` without a finite lane.
    pub token: Option<(u32, f32)>,
    /// The most likely tokens with their raw log-probabilities.
    pub top: Vec<(u32, f32)>,
}

/// The log-probabilities of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLogprobs {
    /// Of the target; `None` without a finite lane.
    pub target: Option<f32>,
    /// The most likely tokens with their raw log-probabilities.
    pub top: Vec<(u32, f32)>,
}

/// A lane that can still be drawn.
#[derive(Debug, Clone, Copy)]
pub struct Lane {
    /// The token.
    pub id: u32,
    /// Its logit after bias and penalties.
    pub z: f32,
}

/// Larger logits first, equal ones by lower id. Logits are finite here.
#[allow(clippy::trivially_copy_pass_by_ref)] // what sorts call
fn by_rank(a: &Lane, b: &Lane) -> Ordering {
    b.z.partial_cmp(&a.z).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Draws one token per row of `logits` `[n, vocab]`; `edits[i]` are row i's changes, one per id.
pub fn sample<L: Elem>(
    logits: &[L],
    vocab: usize,
    decodable: usize,
    rows: &[&SampleRow],
    edits: &[Vec<Edit>],
) -> Vec<Drawn> {
    let lanes = logits.par_chunks(vocab);
    lanes
        .zip(rows.par_iter().zip(edits))
        .map(|(lanes, (row, edits))| {
            let raw = Raw::new(&lanes[..decodable]);
            let token = draw(&raw, row, edits).map(|id| (id, raw.logprob(id)));
            Drawn { token, top: raw.top(row.logprobs as usize) }
        })
        .collect()
}

/// Log-softmax of each row of `logits` at its target, and its `top_n` most likely tokens.
pub fn logprobs<L: Elem>(
    logits: &[L],
    vocab: usize,
    decodable: usize,
    targets: &[i32],
    top_n: usize,
) -> Vec<RowLogprobs> {
    logits
        .par_chunks(vocab)
        .zip(targets)
        .map(|(lanes, &target)| {
            let raw = Raw::new(&lanes[..decodable]);
            RowLogprobs { target: raw.any().then(|| raw.logprob(target as u32)), top: raw.top(top_n) }
        })
        .collect()
}

/// A row as the model left it: the decodable lanes, those that are not finite as -inf.
struct Raw {
    lanes: Vec<f32>,
    max: f32,
    ln_sum: f64,
}

impl Raw {
    fn new<L: Elem>(lanes: &[L]) -> Raw {
        let finite = |v: f32| if v.is_finite() { v } else { f32::NEG_INFINITY };
        let lanes: Vec<f32> = lanes.iter().map(|v| finite(v.to_f32())).collect();
        let max = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shift = mass_shift(lanes.len());
        let sum: u64 = lanes.iter().map(|&v| mass(elementary::exp(v - max), shift)).sum();
        // A row without finite lanes has sum 0 (exp of NaN is 0 here); nothing of it is read.
        let ln_sum = (sum as f64 / (1u64 << shift) as f64).ln();
        Raw { lanes, max, ln_sum }
    }

    fn any(&self) -> bool {
        self.max > f32::NEG_INFINITY
    }

    /// In f64, rounded once; -inf for a lane that is not finite or not decodable.
    fn logprob(&self, id: u32) -> f32 {
        let value = self.lanes.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(value) - f64::from(self.max) - self.ln_sum) as f32
    }

    /// The `n` most likely finite lanes.
    fn top(&self, n: usize) -> Vec<(u32, f32)> {
        leaders(&self.lanes, n).iter().map(|lane| (lane.id, self.logprob(lane.id))).collect()
    }
}

/// The first `n` finite lanes by rank, in order; made for small n.
fn leaders(values: &[f32], n: usize) -> Vec<Lane> {
    const BLOCK: usize = 64;
    let mut best: Vec<Lane> = Vec::with_capacity(n + 1);
    if n == 0 {
        return best;
    }
    // What a lane must exceed: among equal ones the earlier ids, already in, rank first.
    let mut bar = f32::NEG_INFINITY;
    for (block, values) in values.chunks(BLOCK).enumerate() {
        if !values.iter().any(|&z| z > bar) {
            continue;
        }
        for (i, &z) in values.iter().enumerate().filter(|(_, z)| z.is_finite()) {
            if z > bar {
                let lane = Lane { id: (block * BLOCK + i) as u32, z };
                best.insert(best.partition_point(|b| b.z >= z), lane);
                best.truncate(n);
                if best.len() == n {
                    bar = best[n - 1].z;
                }
            }
        }
    }
    best
}

/// The `k`-th largest finite value, if there are so many.
fn kth_largest(z: &[f32], k: usize) -> Option<f32> {
    /// From here on inserting costs more than partitioning.
    const MANY: usize = 256;
    if k <= MANY {
        return leaders(z, k).get(k - 1).map(|lane| lane.z);
    }
    let mut finite: Vec<f32> = z.iter().copied().filter(|z| z.is_finite()).collect();
    (k <= finite.len()).then(|| *finite.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1)
}

/// Puts the first `n` lanes by rank in front, in order.
fn order_first(lanes: &mut [Lane], n: usize) {
    if n < lanes.len() {
        lanes.select_nth_unstable_by(n, by_rank);
    }
    lanes[..n].sort_unstable_by(by_rank);
}

/// The number of bits s below the largest mass, so that `lanes` of them sum to less than 2^63.
fn mass_shift(lanes: usize) -> u32 {
    62 - lanes.ilog2()
}

/// `e` in 0..=1 as an integer of 2^-shift, cut.
fn mass(e: f32, shift: u32) -> u64 {
    (e * (1u64 << shift) as f32) as u64
}

/// Bias, then the repetition penalty, then frequency, then presence: one f32 rounding each, kept finite.
fn edited(value: f32, edit: &Edit, row: &SampleRow) -> f32 {
    let mut z = value + edit.bias;
    if edit.seen {
        let penalty = row.repetition_penalty;
        z = if z > 0.0 { z / penalty } else { z * penalty };
    }
    if edit.count > 0 {
        z -= row.frequency_penalty * edit.count as f32;
        z -= row.presence_penalty;
    }
    z.clamp(f32::MIN, f32::MAX)
}

/// The logits of a row's decodable lanes after bias and penalties; lanes that are not finite stay -inf.
pub fn processed(raw: &[f32], row: &SampleRow, edits: &[Edit]) -> Vec<f32> {
    let mut z = raw.to_vec();
    for edit in edits {
        if let Some(v) = z.get_mut(edit.id as usize).filter(|v| v.is_finite()) {
            *v = edited(*v, edit, row);
        }
    }
    z
}

/// The lane of the largest of the processed logits `z`, the first of equal ones.
fn largest(z: &[f32]) -> Option<Lane> {
    let mut best: Option<Lane> = None;
    for (id, &z) in z.iter().enumerate() {
        if z.is_finite() && best.is_none_or(|b| z > b.z) {
            best = Some(Lane { id: id as u32, z });
        }
    }
    best
}

/// One f32 division; an overflow stays the largest number, so that differences of two are no NaN.
fn tempered(z: f32, temperature: f32) -> f32 {
    (z / temperature).clamp(f32::MIN, f32::MAX)
}

/// The lanes of the processed logits `z` that min-p, top-k and top-p leave, in no order. `max` is the largest of `z`.
pub fn kept(z: &[f32], max: f32, row: &SampleRow) -> Vec<Lane> {
    let max = tempered(max, row.temperature);
    // p >= min_p * largest p, as logits.
    let least = max + elementary::ln(row.min_p.clamp(f32::MIN_POSITIVE, 1.0));
    let enough = |z: f32| row.min_p <= 0.0 || tempered(z, row.temperature) >= least;
    // min-p leaves the first lanes by rank, so the k-th of all is the k-th of what it leaves, if there are so many.
    let k = row.top_k as usize;
    let kth = if k == 0 || k >= z.len() { None } else { kth_largest(z, k) };
    let kth = kth.unwrap_or(f32::NEG_INFINITY);
    let numbered = z.iter().enumerate().filter(|(_, z)| z.is_finite() && **z >= kth && enough(**z));
    let mut lanes: Vec<Lane> = numbered.map(|(id, &z)| Lane { id: id as u32, z }).collect();
    if row.top_p < 1.0 {
        let e = |lane: &Lane| elementary::exp(tempered(lane.z, row.temperature) - max);
        let count = top_p(&mut lanes, row.top_p, mass_shift(z.len()), e);
        lanes.truncate(count);
    }
    lanes
}

/// The token of a row, or `None` without a finite lane.
fn draw(raw: &Raw, row: &SampleRow, edits: &[Edit]) -> Option<u32> {
    let z = processed(&raw.lanes, row, edits);
    let best = largest(&z)?;
    if row.is_greedy() {
        return Some(best.id);
    }
    let max = tempered(best.z, row.temperature);
    let key = [row.seed as u32, (row.seed >> 32) as u32];
    // One block of random words serves an even id and the next.
    let (mut block, mut words) = (u32::MAX, [0; 4]);
    let mut race = |lane: &Lane| {
        if lane.id / 2 != block {
            block = lane.id / 2;
            words = philox4x32(key, [block, row.step as u32, (row.step >> 32) as u32, DRAW]);
        }
        let half = 2 * (lane.id as usize % 2);
        let e = elementary::exp(tempered(lane.z, row.temperature) - max);
        e / exponential(u64::from(words[half]) << 32 | u64::from(words[half + 1]))
    };
    // The best lane is always among them with e = 1, so a lane of mass 0 never wins.
    let mut winner = (0.0, u32::MAX);
    for lane in kept(&z, best.z, row) {
        let score = race(&lane);
        if score > winner.0 || (score >= winner.0 && lane.id < winner.1) {
            winner = (score, lane.id);
        }
    }
    Some(winner.1)
}

/// Puts the top-p set in front and says how many lanes it has: lane r of the ranking is in it while the masses before
/// it are below p times the sum.
fn top_p(lanes: &mut [Lane], p: f32, shift: u32, e: impl Fn(&Lane) -> f32) -> usize {
    let total: u64 = lanes.iter().map(|lane| mass(e(lane), shift)).sum();
    let needed = (f64::from(p) * total as f64).ceil() as u64;
    let (mut done, mut before, mut head) = (0, 0, HEAD_LANES);
    loop {
        head = head.min(lanes.len());
        order_first(&mut lanes[done..], head - done);
        while done < head {
            // The first lane is always in: `needed` is at least 1, since the largest mass is 2^shift.
            if before >= needed {
                return done;
            }
            before += mass(e(&lanes[done]), shift);
            done += 1;
        }
        if head == lanes.len() {
            return done;
        }
        head *= HEAD_GROWTH;
    }
}
