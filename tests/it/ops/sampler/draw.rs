//! The draw: its distribution, and that it hangs on the row alone.

use highwater::num::DType;
use highwater::num::philox::philox4x32;
use highwater::ops::Numerics;
use highwater::ops::sampler::{self, SampleRow};

use super::super::kit::{Kit, normals};
use super::{ids, plain, sample, steps};

/// The upper tail of the chi-square distribution as a normal deviate (Wilson and Hilferty, 1931).
fn deviate(chi_square: f64, freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    ((chi_square / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// Chi-square of counts against probabilities, bins pooled until each expects 5 or more; with degrees of freedom.
fn chi_square(counts: &[u64], p: &[f64]) -> (f64, f64) {
    let n = counts.iter().sum::<u64>() as f64;
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].partial_cmp(&p[a]).unwrap());
    let (mut bins, mut open) = (Vec::new(), (0.0, 0.0));
    for i in order {
        open = (open.0 + counts[i] as f64, open.1 + p[i] * n);
        if open.1 >= 5.0 {
            bins.push(open);
            open = (0.0, 0.0);
        }
    }
    match bins.last_mut() {
        Some(last) => *last = (last.0 + open.0, last.1 + open.1),
        None => bins.push(open),
    }
    (bins.iter().map(|(seen, expected)| (seen - expected).powi(2) / expected).sum(), bins.len() as f64 - 1.0)
}

/// What the row's token follows, in float64, from a row where no boundary is close: softmax over the set left.
fn distribution(logits: &[f32], row: &SampleRow) -> Vec<f64> {
    let t: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(row.temperature)).collect();
    let max = t.iter().copied().fold(f64::MIN, f64::max);
    let mut order: Vec<usize> = (0..t.len()).filter(|&i| (t[i] - max).exp() >= f64::from(row.min_p)).collect();
    order.sort_by(|&a, &b| t[b].partial_cmp(&t[a]).unwrap().then(a.cmp(&b)));
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    let total: f64 = order.iter().map(|&i| (t[i] - max).exp()).sum();
    let (mut before, mut keep) = (0.0, 0);
    while keep < order.len() && (keep == 0 || before < f64::from(row.top_p) * total) {
        before += (t[order[keep]] - max).exp();
        keep += 1;
    }
    let mut p = vec![0.0; t.len()];
    order[..keep].iter().for_each(|&i| p[i] = (t[i] - max).exp() / before);
    p
}

fn counts(kit: &Kit, logits: &[f32], row: &SampleRow, draws: u64) -> Vec<u64> {
    let mut counts = vec![0; logits.len()];
    let rows = steps(row, draws);
    for block in rows.chunks(1000) {
        ids(kit, logits, block).iter().for_each(|&id| counts[id as usize] += 1);
    }
    counts
}

/// (name, vocabulary, spread of logits, parameters).
fn configurations() -> Vec<(&'static str, usize, f32, SampleRow)> {
    let row = |temperature, top_k, top_p, min_p| SampleRow { temperature, top_k, top_p, min_p, ..plain(0) };
    vec![
        ("two tokens", 2, 1.0, row(1.0, 0, 1.0, 0.0)),
        ("three tokens, hot", 3, 1.0, row(5.0, 0, 1.0, 0.0)),
        ("a few", 7, 1.0, row(1.0, 0, 1.0, 0.0)),
        ("uniform", 100, 0.0, row(1.0, 0, 1.0, 0.0)),
        ("uniform, odd", 333, 0.0, row(0.3, 0, 1.0, 0.0)),
        ("flat", 200, 0.3, row(1.0, 0, 1.0, 0.0)),
        ("usual", 200, 2.0, row(1.0, 0, 1.0, 0.0)),
        ("peaked", 200, 6.0, row(1.0, 0, 1.0, 0.0)),
        ("cool", 200, 2.0, row(0.5, 0, 1.0, 0.0)),
        ("hot", 200, 2.0, row(2.0, 0, 1.0, 0.0)),
        ("very hot", 200, 2.0, row(50.0, 0, 1.0, 0.0)),
        ("top-k 2", 200, 1.0, row(1.0, 2, 1.0, 0.0)),
        ("top-k 20", 200, 1.0, row(1.0, 20, 1.0, 0.0)),
        ("top-k 50, cool", 200, 2.0, row(0.7, 50, 1.0, 0.0)),
        ("top-p 0.9", 200, 2.0, row(1.0, 0, 0.9, 0.0)),
        ("top-p 0.5", 200, 1.0, row(1.0, 0, 0.5, 0.0)),
        ("top-p 0.999, hot", 200, 2.0, row(1.5, 0, 0.999, 0.0)),
        ("min-p 0.05", 200, 2.0, row(1.0, 0, 1.0, 0.05)),
        ("min-p 0.3, hot", 200, 2.0, row(1.7, 0, 1.0, 0.3)),
        ("top-k and top-p", 200, 2.0, row(1.0, 30, 0.8, 0.0)),
        ("the model's defaults", 300, 2.5, row(0.6, 20, 0.95, 0.0)),
        ("all filters", 300, 2.0, row(1.2, 60, 0.9, 0.02)),
    ]
}

/// The deviate at which a configuration fails: one chance in a hundred over all 22 of them, 0.01 / 22 each, one-sided.
const MOST: f64 = 3.32;
const DRAWS: u64 = 20_000;

#[test]
fn draws_follow_the_distribution() {
    let kit = Kit::cpu(Numerics::F32);
    let configurations = configurations();
    assert!(configurations.len() >= 20);
    for (i, (name, vocab, spread, row)) in configurations.into_iter().enumerate() {
        let logits = normals(7, i as u32, vocab, spread);
        let row = SampleRow { seed: 1000 + i as u64, ..row };
        let p = distribution(&logits, &row);
        let counts = counts(&kit, &logits, &row, DRAWS);
        let outside: u64 = counts.iter().zip(&p).filter(|(_, p)| **p == 0.0).map(|(c, _)| c).sum();
        assert_eq!(outside, 0, "{name}: drawn outside the set");
        let (statistic, freedom) = chi_square(&counts, &p);
        let z = deviate(statistic, freedom);
        assert!(z < MOST, "{name}: chi-square {statistic:.1} with {freedom} degrees of freedom, deviate {z:.2}");
        // A fit that is too good is wrong as well.
        assert!(z > -MOST - 1.0, "{name}: chi-square {statistic:.1} with {freedom} degrees of freedom, deviate {z:.2}");
    }
}

#[test]
fn the_test_of_the_distribution_sees_small_faults() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = normals(7, 6, 200, 2.0);
    let drawn = counts(&kit, &logits, &SampleRow { seed: 1006, ..plain(0) }, DRAWS);
    for (what, row) in [
        ("a temperature off by 5 %", SampleRow { temperature: 1.05, ..plain(0) }),
        ("top-p 0.97 for none", SampleRow { top_p: 0.97, ..plain(0) }),
        ("min-p 0.01 for none", SampleRow { min_p: 0.01, ..plain(0) }),
    ] {
        let (statistic, freedom) =
            chi_square(&drawn, &distribution(&logits, &row).iter().map(|p| p.max(1e-9)).collect::<Vec<_>>());
        assert!(deviate(statistic, freedom) > MOST, "{what} is not seen: {statistic:.1} with {freedom}");
    }
}

#[test]
fn the_whole_published_vocabulary_is_drawn_evenly() {
    const VOCAB: usize = 248_320;
    const FEW: u64 = 320;
    let kit = Kit::cpu(Numerics::F32);
    let logits = vec![1.25f32; VOCAB];
    let mut bins = [0u64; 16];
    let rows = steps(&plain(9), FEW);
    let mut parity = 0;
    for block in rows.chunks(20) {
        for id in ids(&kit, &logits, block) {
            bins[id as usize * 16 / VOCAB] += 1;
            parity += u64::from(id % 2);
        }
    }
    let (statistic, freedom) = chi_square(&bins, &[1.0 / 16.0; 16]);
    assert!(deviate(statistic, freedom) < MOST, "{bins:?}");
    assert!((parity as f64 - FEW as f64 / 2.0).abs() < 4.0 * (FEW as f64 / 4.0).sqrt(), "odd ids: {parity}");
}

#[test]
fn steps_and_seeds_are_independent() {
    // Pairs of draws of a fair coin: next step, next seed, and seeds and steps that differ in the upper halves only.
    let kit = Kit::cpu(Numerics::F32);
    let n = 4_000u64;
    let row = |seed, step| SampleRow { seed, step, ..plain(0) };
    let coins = |rows: Vec<SampleRow>| ids(&kit, &[0.0, 0.0], &rows);
    let base = coins((0..n).map(|i| row(5, i)).collect());
    for (what, other) in [
        ("the next step", coins((0..n).map(|i| row(5, i + 1)).collect())),
        ("the next seed", coins((0..n).map(|i| row(6, i)).collect())),
        ("the upper half of the seed", coins((0..n).map(|i| row(5 | 1 << 32, i)).collect())),
        ("the upper half of the step", coins((0..n).map(|i| row(5, i | 1 << 32)).collect())),
        ("seed and step swapped", coins((0..n).map(|i| row(i, 5)).collect())),
    ] {
        let equal = base.iter().zip(&other).filter(|(a, b)| a == b).count() as f64;
        let limit = 4.5 * (n as f64 / 4.0).sqrt();
        assert!((equal - n as f64 / 2.0).abs() < limit, "{what}: {equal} of {n} equal");
    }
    assert_eq!(base, coins((0..n).map(|i| row(5, i)).collect()), "the same seed and step draw the same");
}

/// Rows of every kind, some with lists.
fn mixed(n: usize, vocab: u32) -> Vec<SampleRow> {
    (0..n as u64)
        .map(|i| {
            let base = SampleRow { seed: 77 ^ i, step: i * 3, logprobs: (i % 4) as u32, ..plain(0) };
            match i % 7 {
                0 => SampleRow { temperature: 0.0, top_p: 0.3, ..base },
                1 => base,
                2 => SampleRow { top_k: 5, temperature: 0.8, ..base },
                3 => SampleRow { top_p: 0.7, ..base },
                4 => SampleRow { min_p: 0.1, temperature: 1.4, ..base },
                5 => SampleRow {
                    repetition_penalty: 1.3,
                    presence_penalty: 0.4,
                    prompt_ids: (0..vocab).step_by(3).collect(),
                    output_counts: (0..vocab).step_by(5).map(|id| (id, id % 4)).collect(),
                    ..base
                },
                _ => SampleRow { bias: vec![(1, 4.0), (vocab - 1, -3.0)], top_k: 40, top_p: 0.9, ..base },
            }
        })
        .collect()
}

#[test]
fn a_row_draws_the_same_token_alone_and_anywhere_in_any_batch() {
    let kit = Kit::cpu(Numerics::F32);
    let (n, vocab) = (42, 611);
    let rows = mixed(n, vocab as u32);
    let logits: Vec<Vec<f32>> = (0..n as u32).map(|i| normals(10, i, vocab, 2.0)).collect();
    let alone: Vec<_> = (0..n).map(|i| sample(&kit, &logits[i], &rows[i..=i]).remove(0)).collect();
    assert!(alone.iter().all(Option::is_some));
    let shuffles: [Vec<usize>; 4] = [
        (0..n).collect(),
        (0..n).rev().collect(),
        (0..n).map(|i| i * 5 % n).collect(),
        (0..n).filter(|i| i % 3 != 1).collect(),
    ];
    for order in shuffles {
        let batch: Vec<f32> = order.iter().flat_map(|&i| logits[i].iter().copied()).collect();
        let params: Vec<SampleRow> = order.iter().map(|&i| rows[i].clone()).collect();
        let got = sample(&kit, &batch, &params);
        for (place, &i) in order.iter().enumerate() {
            assert_eq!(got[place], alone[i], "row {i} in place {place} of {}", order.len());
        }
    }
}

#[test]
fn greedy_rows_of_a_mixed_batch_draw_as_in_an_all_greedy_one() {
    let kit = Kit::cpu(Numerics::F32);
    let (n, vocab) = (30, 200);
    let rows = mixed(n, vocab as u32);
    // Coarse logits: the largest value ties in most rows.
    let logits: Vec<f32> = normals(11, 0, n * vocab, 2.0).iter().map(|v| v.round()).collect();
    let mixed = sample(&kit, &logits, &rows);
    let greedy = sample(&kit, &logits, &vec![SampleRow::greedy(); n]);
    let mut ties = 0;
    for i in (0..n).step_by(7) {
        let row = &logits[i * vocab..][..vocab];
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let first = row.iter().position(|v| *v == max).unwrap() as u32;
        assert_eq!(mixed[i].as_ref().unwrap().id, first);
        assert_eq!(greedy[i].as_ref().unwrap().id, first);
        ties += usize::from(row.iter().filter(|v| **v == max).count() > 1);
    }
    assert!(ties > 1, "no ties in the test");
}

#[test]
fn rows_may_be_lent() {
    let kit = Kit::cpu(Numerics::F32);
    let rows = mixed(6, 50);
    let values = normals(12, 0, 6 * 50, 1.0);
    let logits = kit.floats(DType::F32, &[6, 50], &values);
    let lent: Vec<&SampleRow> = rows.iter().collect();
    let got = sampler::sample(&kit.cx(), &logits, &lent, 50).unwrap().read().unwrap();
    assert_eq!(got, sample(&kit, &values, &rows));
}

#[test]
fn threads_do_not_show() {
    let (n, vocab) = (12, 5_000);
    let rows = mixed(n, 5_000);
    let params: Vec<&SampleRow> = rows.iter().collect();
    let edits: Vec<_> = rows.iter().map(|r| sampler::edits(r, vocab).unwrap()).collect();
    let logits = normals(13, 0, n * vocab, 2.0);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| highwater::ops::reference::sampler::sample(&logits, vocab, vocab, &params, &edits))
    };
    assert_eq!(run(1), run(4));
}

/// The race written a second time in float64, from the definition: the winner is the largest p / E.
#[test]
fn the_draw_is_the_race_of_its_definition() {
    let kit = Kit::cpu(Numerics::F32);
    let mut close = 0;
    for round in 0..500u32 {
        let vocab = 1 + round as usize % 90;
        let logits = normals(14, round, vocab, 1.5);
        let row = SampleRow { seed: u64::from(round) << 20 | 3, step: u64::from(round) << 31 | 1, ..plain(0) };
        let mut scores: Vec<(f64, u32)> = (0..vocab as u32)
            .map(|id| {
                let key = [row.seed as u32, (row.seed >> 32) as u32];
                let w = philox4x32(key, [id / 2, row.step as u32, (row.step >> 32) as u32, 0x7361_6D70]);
                let at = id as usize % 2 * 2;
                let u = ((u64::from(w[at]) << 32 | u64::from(w[at + 1])) as f64 + 0.5) / 2f64.powi(64);
                (f64::from(logits[id as usize]) - (-(-u).ln_1p()).ln(), id)
            })
            .collect();
        scores.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap());
        if scores.len() > 1 && scores[0].0 - scores[1].0 < 1e-5 {
            close += 1;
            continue;
        }
        assert_eq!(ids(&kit, &logits, std::slice::from_ref(&row)), [scores[0].1], "round {round}");
    }
    assert!(close < 5);
}
