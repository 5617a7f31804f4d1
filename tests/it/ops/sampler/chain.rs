//! Which tokens can be drawn: penalties against dense arrays, filters against float64.

use std::collections::{BTreeMap, BTreeSet};

use highwater::ops::Numerics;
use highwater::ops::reference::sampler::{kept, processed};
use highwater::ops::sampler::{SampleRow, edits};

use super::super::kit::{Kit, Words, normals};
use super::{ids, plain, sample, steps};

/// Dense arrays over the vocabulary, one f32 operation after the other, in vLLM's order.
fn naive_penalties(logits: &[f32], row: &SampleRow) -> Vec<f32> {
    let v = logits.len();
    let (mut in_prompt, mut count, mut bias) = (vec![false; v], vec![0u32; v], vec![0.0f32; v]);
    row.prompt_ids.iter().for_each(|&id| in_prompt[id as usize] = true);
    row.output_counts.iter().for_each(|&(id, n)| count[id as usize] += n);
    row.bias.iter().for_each(|&(id, b)| bias[id as usize] = b);
    let mut z: Vec<f32> = (0..v).map(|i| logits[i] + bias[i]).collect();
    for i in 0..v {
        if in_prompt[i] || count[i] > 0 {
            z[i] = if z[i] > 0.0 { z[i] / row.repetition_penalty } else { z[i] * row.repetition_penalty };
        }
    }
    for i in 0..v {
        z[i] -= row.frequency_penalty * count[i] as f32;
    }
    for i in 0..v {
        z[i] -= row.presence_penalty * if count[i] > 0 { 1.0 } else { 0.0 };
    }
    z
}

/// A row with any mix of penalties and bias over `vocab` ids.
fn penalised(words: &mut Words, vocab: usize) -> SampleRow {
    let distinct = |words: &mut Words, n: usize| -> Vec<u32> {
        let set: BTreeSet<u32> = (0..n).map(|_| words.below(vocab) as u32).collect();
        let mut list: Vec<u32> = set.into_iter().collect();
        // Any order: lists come as requests have them.
        for i in (1..list.len()).rev() {
            list.swap(i, words.below(i + 1));
        }
        list
    };
    let (some_ids, most) = (words.below(40), 1 + words.below(3));
    let bias = distinct(words, some_ids);
    let (prompt, output) = (words.below(60), words.below(60));
    let either = |words: &mut Words, off: f32, on: f32| if words.below(3) == 0 { off } else { on };
    let (repetition, presence, frequency) = (words.unit() as f32 + 0.5, words.unit() as f32, words.unit() as f32);
    SampleRow {
        repetition_penalty: either(words, 1.0, repetition),
        presence_penalty: either(words, 0.0, presence * 4.0 - 2.0),
        frequency_penalty: either(words, 0.0, frequency * 4.0 - 2.0),
        bias: bias.into_iter().map(|id| (id, words.unit() as f32 * 20.0 - 10.0)).collect(),
        prompt_ids: distinct(words, prompt),
        output_counts: distinct(words, output).into_iter().map(|id| (id, words.below(most + 1) as u32)).collect(),
        ..SampleRow::greedy()
    }
}

#[test]
fn penalties_and_bias_are_those_of_dense_arrays_bit_for_bit() {
    let kit = Kit::cpu(Numerics::F32);
    let mut words = Words::new(1);
    let (mut changed, mut moved) = (0, 0);
    for round in 0..600 {
        let vocab = [97, 320, 1][round % 3];
        let logits = normals(2, round as u32, vocab, 3.0);
        let row = penalised(&mut words, vocab);
        let want = naive_penalties(&logits, &row);
        let got = processed(&logits, &row, &edits(&row, vocab).unwrap());
        for i in 0..vocab {
            // -0 and 0 are one value: a lane without edits is not touched, the dense one has 0 subtracted.
            assert!(got[i] == want[i], "round {round} lane {i}: {} for {} of {row:?}", got[i], want[i]);
        }
        changed += usize::from(want != logits);
        let first = |v: &[f32]| (0..vocab).rev().max_by(|&a, &b| v[a].partial_cmp(&v[b]).unwrap()).unwrap() as u32;
        moved += usize::from(first(&want) != first(&logits));
        let token = sample(&kit, &logits, std::slice::from_ref(&row))[0].as_ref().unwrap().id;
        assert_eq!(token, first(&want), "round {round}");
    }
    assert!(changed > 300 && moved > 100, "the test sees little: {changed} changed, {moved} moved");
}

#[test]
fn penalties_off_read_no_list() {
    // Lists a request always has: with no penalty on they change nothing and take no bytes.
    let row = SampleRow { prompt_ids: (0..50).collect(), output_counts: vec![(3, 9)], ..plain(1) };
    assert!(edits(&row, 50).unwrap().is_empty());
    assert_eq!(row.edits(), 0);
    let presence = SampleRow { presence_penalty: 0.5, ..row.clone() };
    assert_eq!(edits(&presence, 50).unwrap().len(), 1, "presence looks at the output alone");
    let repetition = SampleRow { repetition_penalty: 1.1, ..row };
    assert_eq!(edits(&repetition, 50).unwrap().len(), 50);
}

/// What a filter in float64 says of each id, on the penalised logits: in, out, or too close to a boundary to tell.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    In,
    Out,
    Close,
}

/// temperature, min-p, top-k (ties at the k-th kept), top-p (fewest, larger first, then lower id) one after the other,
/// each on the renormalised rest.
fn float64_filter(z: &[f32], row: &SampleRow) -> Vec<Verdict> {
    const MARGIN: f64 = 1e-5;
    let mut verdict = vec![Verdict::Out; z.len()];
    let t: Vec<f64> = z.iter().map(|&z| f64::from(z) / f64::from(row.temperature)).collect();
    let max = t.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut alive: Vec<usize> = (0..z.len()).filter(|&i| z[i].is_finite()).collect();
    let p = |i: usize| (t[i] - max).exp();
    let mut close = Vec::new();
    if row.min_p > 0.0 {
        let least = f64::from(row.min_p);
        close.extend(
            alive
                .iter()
                .copied()
                .filter(|&i| (p(i) / least - 1.0).abs() < MARGIN && z[i] < z.iter().copied().fold(f32::MIN, f32::max)),
        );
        alive.retain(|&i| p(i) >= least || t[i] == max);
    }
    alive.sort_by(|&a, &b| z[b].partial_cmp(&z[a]).unwrap().then(a.cmp(&b)));
    if row.top_k > 1 && (row.top_k as usize) < alive.len() {
        let kth = z[alive[row.top_k as usize - 1]];
        alive.retain(|&i| z[i] >= kth);
    }
    if row.top_k == 1 {
        alive.truncate(1);
    }
    if row.top_p < 1.0 {
        let total: f64 = alive.iter().map(|&i| p(i)).sum();
        let mut before = 0.0;
        let mut keep = 0;
        for (rank, &i) in alive.iter().enumerate() {
            if rank > 0 && (before / total - f64::from(row.top_p)).abs() < MARGIN {
                close.push(i);
            }
            if rank == 0 || before / total < f64::from(row.top_p) {
                keep = rank + 1;
            }
            before += p(i);
        }
        alive.truncate(keep);
    }
    alive.iter().for_each(|&i| verdict[i] = Verdict::In);
    close.iter().for_each(|&i| verdict[i] = Verdict::Close);
    verdict
}

/// Filters in every combination, from loose to tight.
fn filtered(words: &mut Words, vocab: usize) -> SampleRow {
    let pick = |words: &mut Words, list: &[f32]| list[words.below(list.len())];
    SampleRow {
        temperature: pick(words, &[0.05, 0.3, 0.7, 1.0, 1.6, 4.0]),
        top_k: [0, 0, 1, 2, 5, 40, vocab as u32 - 1, vocab as u32, u32::MAX][words.below(9)],
        top_p: pick(words, &[1.0, 1.0, 0.999, 0.95, 0.8, 0.5, 0.1, 1e-6]),
        min_p: pick(words, &[0.0, 0.0, 1e-4, 0.05, 0.3, 1.0]),
        ..SampleRow::greedy()
    }
}

#[test]
fn the_tokens_left_are_those_of_a_float64_filter() {
    let mut words = Words::new(3);
    let (mut close, mut total, mut sizes) = (0usize, 0usize, BTreeMap::<usize, usize>::new());
    for round in 0..4_000u32 {
        let vocab = [50, 257, 1031, 3000][words.below(4)];
        // A third of the rows in bf16 steps, so that values tie.
        let mut z = normals(4, round, vocab, [0.5, 3.0, 8.0][words.below(3)]);
        if round % 3 == 0 {
            z.iter_mut().for_each(|v| *v = (*v * 8.0).round() / 8.0);
        }
        if round % 5 == 0 {
            z.iter_mut().step_by(3).for_each(|v| *v = f32::NEG_INFINITY);
        }
        let mut row = filtered(&mut words, vocab);
        row.top_k = if row.top_k == 1 { 3 } else { row.top_k };
        let want = float64_filter(&z, &row);
        let max = z.iter().copied().fold(f32::MIN, f32::max);
        let got: BTreeSet<usize> = kept(&z, max, &row).iter().map(|lane| lane.id as usize).collect();
        assert!(!got.is_empty(), "{row:?}");
        // Where min-p is close, the sum that top-p looks at is in doubt as well.
        if row.min_p > 0.0 && row.top_p < 1.0 && want.contains(&Verdict::Close) {
            close += vocab;
            continue;
        }
        for (id, verdict) in want.iter().enumerate() {
            match verdict {
                Verdict::In => assert!(got.contains(&id), "round {round}: {id} is missing, {row:?}"),
                Verdict::Out => assert!(!got.contains(&id), "round {round}: {id} is too many, {row:?}"),
                Verdict::Close => close += 1,
            }
        }
        total += vocab;
        *sizes.entry(got.len().ilog2() as usize).or_default() += 1;
    }
    assert!(close * 50 < total, "{close} of {total} too close to a boundary to tell");
    assert!(sizes.len() >= 10, "sets of few sizes only: {sizes:?}");
}

#[test]
fn draws_stay_in_the_set_and_reach_all_of_it() {
    let kit = Kit::cpu(Numerics::F32);
    let mut words = Words::new(5);
    let mut reached = 0;
    for round in 0..60 {
        let vocab = 64;
        let logits = normals(6, round, vocab, 2.0);
        let row = filtered(&mut words, vocab);
        let want = float64_filter(&logits, &row);
        let draws = ids(&kit, &logits, &steps(&SampleRow { seed: u64::from(round), ..row.clone() }, 400));
        let seen: BTreeSet<u32> = draws.iter().copied().collect();
        for id in &seen {
            assert!(want[*id as usize] != Verdict::Out, "round {round}: {id} was drawn, {row:?}");
        }
        // A token of 5 % is missed by 400 draws once in 10^9.
        let t = |i: usize| (f64::from(logits[i]) / f64::from(row.temperature)).exp();
        let inside: Vec<usize> = (0..vocab).filter(|&i| want[i] == Verdict::In).collect();
        let total: f64 = inside.iter().map(|&i| t(i)).sum();
        for &i in inside.iter().filter(|&&i| t(i) / total > 0.05) {
            assert!(seen.contains(&(i as u32)), "round {round}: {i} was never drawn, {row:?}");
            reached += 1;
        }
    }
    assert!(reached > 100, "{reached}");
}

#[test]
fn the_order_is_temperature_min_p_top_k_top_p() {
    // Probabilities 0.4, 0.3, 0.2, 0.1 at temperature 1.
    let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
    let set = |row: SampleRow| -> Vec<u32> {
        let mut ids: Vec<u32> = kept(&logits, logits[0], &row).iter().map(|lane| lane.id).collect();
        ids.sort_unstable();
        ids
    };
    // top-k first: the three left are 0.444, 0.333, 0.222, so 0.75 is reached by two; of all four it takes three.
    assert_eq!(set(SampleRow { top_k: 3, top_p: 0.75, ..plain(0) }), [0, 1]);
    assert_eq!(set(SampleRow { top_p: 0.75, ..plain(0) }), [0, 1, 2]);
    // min-p after the temperature: at 2 the ratios are roots, 0.1 / 0.4 becomes 0.5.
    assert_eq!(set(SampleRow { min_p: 0.45, ..plain(0) }), [0, 1, 2]);
    assert_eq!(set(SampleRow { min_p: 0.45, temperature: 2.0, ..plain(0) }), [0, 1, 2, 3]);
    // min-p before top-p: what it leaves (0.4, 0.3) is renormalised to 0.571, 0.429, so 0.55 is reached by one.
    assert_eq!(set(SampleRow { min_p: 0.6, top_p: 0.55, ..plain(0) }), [0]);
    assert_eq!(set(SampleRow { top_p: 0.55, ..plain(0) }), [0, 1]);
}
