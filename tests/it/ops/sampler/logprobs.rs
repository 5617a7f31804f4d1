//! Raw log-probabilities of drawn tokens, of given targets, and of the most likely tokens.

use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::sampler::{self, SampleRow};

use super::super::kit::{Kit, assert_refused, normals};
use super::{plain, sample, steps};

/// Log-softmax in float64 over the finite lanes.
fn oracle(logits: &[f32]) -> Vec<f64> {
    let finite = |v: &f32| v.is_finite();
    let max = f64::from(logits.iter().copied().filter(finite).fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().filter(|v| finite(v)).map(|&v| (f64::from(v) - max).exp()).sum();
    logits.iter().map(|v| if finite(v) { f64::from(*v) - max - sum.ln() } else { f64::NEG_INFINITY }).collect()
}

/// The `n` largest as (id, value), equal ones by lower id.
fn ranked(logits: &[f32], n: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|&i| logits[i as usize].is_finite()).collect();
    order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap());
    order.truncate(n);
    order
}

fn close(got: f32, want: f64) -> bool {
    // One rounding to f32, and 3e-7 of the sum of exponentials.
    (f64::from(got) - want).abs() <= 4e-7 + want.abs() * 6e-8
}

#[test]
fn targets_have_the_log_softmax_of_float64() {
    for (i, case) in sampler::cases().into_iter().enumerate() {
        let kit = Kit::cpu(Numerics::F32);
        let values = super::super::kit::rounded(case.dtype, &normals(30, i as u32, case.rows * case.vocab, 4.0));
        let logits = kit.floats(case.dtype, &[case.rows, case.vocab], &values);
        let targets: Vec<i32> = (0..case.rows).map(|r| (r * 7919 % case.decodable) as i32).collect();
        for top_n in [0, 1, 20] {
            let t = kit.ints(&[case.rows], &targets);
            let got = sampler::logprobs(&kit.cx(), &logits, &t, top_n, case.decodable).unwrap();
            assert_eq!(got.top.is_some(), top_n > 0);
            for r in 0..case.rows {
                let row = &values[r * case.vocab..][..case.decodable];
                let want = oracle(row);
                let target = got.targets.host::<f32>().unwrap()[r];
                assert!(close(target, want[targets[r] as usize]), "{} row {r}: {target}", case.name);
                assert_eq!(got.valid.host::<u8>().unwrap()[r], 1);
                if let Some(top) = &got.top {
                    let top = top.row(r).unwrap();
                    let ids: Vec<u32> = top.iter().map(|t| t.0).collect();
                    assert_eq!(ids, ranked(row, top_n), "{} row {r}", case.name);
                    assert!(top.iter().all(|&(id, l)| close(l, want[id as usize])), "{} row {r}: {top:?}", case.name);
                }
            }
        }
    }
}

#[test]
fn drawn_tokens_report_raw_log_probabilities_whatever_was_done_to_draw_them() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = normals(31, 0, 500, 2.0);
    let want = oracle(&logits);
    let rows: Vec<SampleRow> = [
        SampleRow::greedy(),
        plain(1),
        SampleRow { temperature: 0.2, top_k: 3, ..plain(1) },
        SampleRow { top_p: 0.5, min_p: 0.2, ..plain(1) },
        SampleRow { bias: vec![(17, 90.0)], ..SampleRow::greedy() },
        SampleRow { repetition_penalty: 3.0, prompt_ids: (0..250).collect(), ..plain(1) },
    ]
    .into_iter()
    .flat_map(|row| steps(&SampleRow { logprobs: 5, ..row }, 10))
    .collect();
    let all: Vec<f32> = rows.iter().flat_map(|_| logits.iter().copied()).collect();
    for (row, choice) in rows.iter().zip(sample(&kit, &all, &rows)) {
        let choice = choice.unwrap();
        assert!(close(choice.logprob, want[choice.id as usize]), "{row:?}: {choice:?}");
        assert_eq!(choice.top.iter().map(|t| t.0).collect::<Vec<_>>(), ranked(&logits, 5), "{row:?}");
        assert!(choice.top.iter().all(|&(id, l)| close(l, want[id as usize])));
        assert!(row.bias.is_empty() || choice.id == 17);
    }
}

#[test]
fn each_row_reports_as_many_as_it_asked_for() {
    let kit = Kit::cpu(Numerics::F32);
    let asked = [0, 3, 1, 20];
    let rows: Vec<SampleRow> = asked.iter().map(|&logprobs| SampleRow { logprobs, ..SampleRow::greedy() }).collect();
    let mut logits = normals(32, 0, 4 * 10, 1.0);
    logits[20] = f32::NAN;
    let got = sample(&kit, &logits, &rows);
    let counts: Vec<usize> = got.iter().map(|c| c.as_ref().unwrap().top.len()).collect();
    assert_eq!(counts, [0, 3, 1, 10], "no more than there are lanes");
    let quiet = sample(&kit, &logits, &vec![SampleRow::greedy(); 4]);
    for (a, b) in got.iter().zip(&quiet) {
        let (a, b) = (a.as_ref().unwrap(), b.as_ref().unwrap());
        assert!(a.id == b.id && a.logprob.to_bits() == b.logprob.to_bits() && b.top.is_empty());
    }
}

#[test]
fn ties_and_lanes_that_are_no_numbers() {
    let kit = Kit::cpu(Numerics::F32);
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let row = [1.0, nan, 2.0, inf, 2.0, -inf, 1.0, 0.5];
    let values = [row, [nan; 8], [0.0; 8]].concat();
    let logits = kit.floats(DType::F32, &[3, 8], &values);
    let at = |targets: [i32; 3], decodable| {
        let targets = kit.ints(&[3], &targets);
        sampler::logprobs(&kit.cx(), &logits, &targets, 6, decodable).unwrap()
    };
    let got = at([2, 0, 7], 8);
    assert_eq!(got.valid.host::<u8>().unwrap(), [1, 0, 1]);
    let targets = got.targets.host::<f32>().unwrap();
    assert!(close(targets[0], oracle(&row)[2]) && targets[1].is_nan() && close(targets[2], -(8f64.ln())));
    let top = got.top.as_ref().unwrap();
    let ids = |r| top.row(r).unwrap().iter().map(|t| t.0).collect::<Vec<_>>();
    assert_eq!(ids(0), [2, 4, 0, 6, 7]);
    assert_eq!(ids(1), [0u32; 0]);
    assert_eq!(ids(2), [0, 1, 2, 3, 4, 5]);
    assert_eq!(top.ids.host::<i32>().unwrap()[5], -1);
    assert_eq!(top.logprobs.host::<f32>().unwrap()[5], -inf);
    // A target that is no number, or no decodable id, has no probability.
    for target in [1, 3, 5] {
        assert_eq!(at([target, 0, 0], 8).targets.host::<f32>().unwrap()[0], -inf);
    }
    let narrow = at([7, 0, 3], 4);
    assert_eq!(narrow.targets.host::<f32>().unwrap()[0], -inf);
    assert!(close(narrow.targets.host::<f32>().unwrap()[2], -(4f64.ln())), "four decodable ids share it");
}

#[test]
fn extreme_rows_keep_their_precision() {
    let kit = Kit::cpu(Numerics::F32);
    // One token takes all: its log-probability is 0 and the others' are the differences.
    let values = [[1e4f32, 0.0, -1e4, 9_990.0], [-3e38, 3e38, 0.0, 0.0]].concat();
    let logits = kit.floats(DType::F32, &[2, 4], &values);
    let got = sampler::logprobs(&kit.cx(), &logits, &kit.ints(&[2], &[1, 1]), 4, 4).unwrap();
    assert_eq!(got.targets.host::<f32>().unwrap()[0], -10_000.0);
    assert_eq!(got.targets.host::<f32>().unwrap()[1], 0.0);
    let top = got.top.unwrap().row(0).unwrap();
    assert!(close(top[0].1, -(-10f64).exp().ln_1p()) && top[0].0 == 0, "{top:?}");
}

#[test]
fn operands_that_disagree_are_refused() {
    let kit = Kit::cpu(Numerics::F32);
    let cx = kit.cx();
    let logits = kit.floats(DType::F32, &[2, 8], &[0.0; 16]);
    let targets = |v: &[i32]| kit.ints(&[v.len()], v);
    assert_refused(sampler::logprobs(&cx, &logits, &targets(&[0, 1, 2]), 0, 8), &["targets", "[3]", "[2]"]);
    assert_refused(
        sampler::logprobs(&cx, &logits, &targets(&[0, 8]), 0, 8),
        &["target 8 of row 1", "vocabulary has 8"],
    );
    assert_refused(sampler::logprobs(&cx, &logits, &targets(&[-1, 0]), 0, 8), &["target -1 of row 0"]);
    assert_refused(sampler::logprobs(&cx, &logits, &targets(&[0, 1]), 21, 8), &["21", "at most 20"]);
    assert_refused(sampler::logprobs(&cx, &logits, &targets(&[0, 1]), 0, 9), &["9 decodable"]);
    let floats = kit.floats(DType::F32, &[2], &[0.0; 2]);
    assert_refused(sampler::logprobs(&cx, &logits, &floats, 0, 8), &["targets", "f32", "i32"]);
}
