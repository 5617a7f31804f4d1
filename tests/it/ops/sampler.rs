//! Sampling: the chain against a naive float64 one, the draw's distribution, ties and edges, and the same token
//! whoever else is in the batch.

mod chain;
mod draw;
mod edges;
mod logprobs;

use highwater::num::DType;
use highwater::ops::sampler::{self, SampleRow, Token};

use super::kit::Kit;

/// Draws a token for each row of f32 logits `[rows.len(), V]`, every id decodable.
fn sample(kit: &Kit, logits: &[f32], rows: &[SampleRow]) -> Vec<Option<Token>> {
    let vocab = logits.len() / rows.len();
    sample_below(kit, logits, rows, vocab)
}

fn sample_below(kit: &Kit, logits: &[f32], rows: &[SampleRow], decodable: usize) -> Vec<Option<Token>> {
    let vocab = logits.len() / rows.len();
    let logits = kit.floats(DType::F32, &[rows.len(), vocab], logits);
    kit.device.begin_step();
    sampler::sample(&kit.cx(), &logits, rows, decodable).unwrap().read().unwrap()
}

/// The ids drawn from the same logits by each of `rows`.
fn ids(kit: &Kit, logits: &[f32], rows: &[SampleRow]) -> Vec<u32> {
    let all: Vec<f32> = rows.iter().flat_map(|_| logits.iter().copied()).collect();
    sample(kit, &all, rows).into_iter().map(|c| c.unwrap().id).collect()
}

/// `row` at steps `0..n` of its request.
fn steps(row: &SampleRow, n: u64) -> Vec<SampleRow> {
    (0..n).map(|step| SampleRow { step, ..row.clone() }).collect()
}

/// Sampling at temperature 1 with everything else off.
fn plain(seed: u64) -> SampleRow {
    SampleRow { temperature: 1.0, seed, ..SampleRow::greedy() }
}
