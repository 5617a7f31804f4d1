//! Ends of ranges, ties, lanes that are no numbers, undecodable ids, refusals, bytes.

use std::collections::BTreeSet;

use highwater::device::{DeviceSpec, cards};
use highwater::error::Error;
use highwater::num::DType;
use highwater::ops::sampler::{self, LIST_STEP, MAX_BIASES, MAX_LOGPROBS, SampleRow};
use highwater::ops::{Limits, Numerics};

use super::super::kit::{Kit, Words, assert_refused, normals};
use super::{ids, plain, sample, sample_below, steps};

fn argmax(logits: &[f32]) -> u32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    logits.iter().position(|v| *v == max).unwrap() as u32
}

fn seen(kit: &Kit, logits: &[f32], row: &SampleRow, n: u64) -> BTreeSet<u32> {
    ids(kit, logits, &steps(row, n)).into_iter().collect()
}

#[test]
fn low_temperatures_are_greedy_whatever_else_is_set() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = normals(20, 0, 300, 0.01);
    let want = argmax(&logits);
    for temperature in [0.0, -0.0, 1e-30, 9e-6, 9.99e-6] {
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (7, 0.2, 0.5), (u32::MAX, 1.0, 1.0)]
        {
            let row = SampleRow { temperature, top_k, top_p, min_p, ..plain(3) };
            assert_eq!(seen(&kit, &logits, &row, 20), BTreeSet::from([want]), "{row:?}");
        }
    }
    // At 1e-5 it is sampling: two equal logits are both drawn.
    let row = SampleRow { temperature: 1e-5, ..plain(3) };
    assert_eq!(seen(&kit, &[1.0, 3.0, 3.0], &row, 40), BTreeSet::from([1, 2]));
    assert_eq!(seen(&kit, &[1.0, 3.0, 3.0], &SampleRow { temperature: 9e-6, ..plain(3) }, 40), BTreeSet::from([1]));
}

#[test]
fn greedy_is_after_the_penalties() {
    let kit = Kit::cpu(Numerics::F32);
    let row = SampleRow { presence_penalty: 1.0, output_counts: vec![(2, 1)], ..SampleRow::greedy() };
    assert_eq!(ids(&kit, &[0.0, 2.5, 3.0, 1.0], &[row]), [1]);
    let row = SampleRow { bias: vec![(3, 2.1)], ..SampleRow::greedy() };
    assert_eq!(ids(&kit, &[0.0, 2.5, 3.0, 1.0], &[row]), [3]);
}

#[test]
fn the_repetition_penalty_divides_positive_and_multiplies_negative_logits() {
    let kit = Kit::cpu(Numerics::F32);
    let penalised = |logits: &[f32], penalty, prompt: &[u32], output: &[(u32, u32)]| {
        let row = SampleRow {
            repetition_penalty: penalty,
            prompt_ids: prompt.to_vec(),
            output_counts: output.to_vec(),
            ..SampleRow::greedy()
        };
        ids(&kit, logits, &[row])[0]
    };
    assert_eq!(penalised(&[2.0, 1.5], 2.0, &[0], &[]), 1, "2 / 2 < 1.5, a prompt token");
    assert_eq!(penalised(&[2.0, 1.5], 2.0, &[], &[(0, 1)]), 1, "2 / 2 < 1.5, an output token");
    assert_eq!(penalised(&[2.0, 1.5], 1.2, &[0], &[]), 0, "2 / 1.2 > 1.5");
    assert_eq!(penalised(&[-1.0, -1.5], 2.0, &[0], &[]), 1, "-1 x 2 < -1.5");
    assert_eq!(penalised(&[-1.0, -1.5], 2.0, &[0, 1], &[]), 0, "both doubled");
    assert_eq!(penalised(&[2.0, 1.5], 2.0, &[0], &[(0, 3)]), 1, "once, not once per list");
    assert_eq!(penalised(&[2.0, 1.5], 2.0, &[], &[(0, 0)]), 0, "a count of 0 is not in the output");
    assert_eq!(penalised(&[1.0, 1.5], 0.5, &[0], &[]), 0, "below 1 it favours what was said");
}

#[test]
fn frequency_counts_and_presence_does_not_and_the_prompt_is_neither() {
    let kit = Kit::cpu(Numerics::F32);
    let row = |presence_penalty, frequency_penalty| SampleRow {
        presence_penalty,
        frequency_penalty,
        prompt_ids: vec![0],
        output_counts: vec![(1, 4), (2, 1)],
        ..SampleRow::greedy()
    };
    let logits = [0.0, 1.0, 0.9, 0.1];
    assert_eq!(ids(&kit, &logits, &[row(0.0, 0.05)]), [2], "1 - 4 x 0.05 < 0.9 - 0.05");
    assert_eq!(ids(&kit, &logits, &[row(0.05, 0.0)]), [1], "both lose 0.05");
    assert_eq!(ids(&kit, &logits, &[row(0.95, 0.0)]), [3], "output tokens fall below 0.1, the prompt's stays at 0");
    assert_eq!(ids(&kit, &[0.2, 1.0, 0.9, 0.1], &[row(0.95, 0.0)]), [0], "the prompt's token keeps its logit");
    assert_eq!(ids(&kit, &[1.5, 1.0, 0.9, 0.1], &[row(-2.0, 0.0)]), [1], "a negative penalty rewards");
}

#[test]
fn the_largest_of_equal_logits_is_the_lowest_id() {
    let kit = Kit::cpu(Numerics::F32);
    assert_eq!(ids(&kit, &[1.0, 5.0, 5.0, 5.0], &[SampleRow::greedy()]), [1]);
    assert_eq!(ids(&kit, &[0.0, -0.0, 0.0], &[SampleRow::greedy()]), [0]);
    assert_eq!(ids(&kit, &[-0.0, 0.0, 0.0], &[SampleRow::greedy()]), [0]);
    assert_eq!(ids(&kit, &[f32::MIN, f32::MIN], &[SampleRow::greedy()]), [0]);
}

#[test]
fn top_k_of_one_is_greedy_and_of_the_vocabulary_is_off() {
    let kit = Kit::cpu(Numerics::F32);
    let tied = [1.0, 4.0, 4.0, 4.0, 2.0];
    assert_eq!(seen(&kit, &tied, &SampleRow { top_k: 1, ..plain(1) }, 50), BTreeSet::from([1]));
    let logits = normals(21, 0, 40, 1.0);
    let off = ids(&kit, &logits, &steps(&plain(2), 200));
    for top_k in [40, 41, u32::MAX] {
        assert_eq!(ids(&kit, &logits, &steps(&SampleRow { top_k, ..plain(2) }, 200)), off, "top_k {top_k}");
    }
    assert_ne!(
        ids(&kit, &logits, &steps(&SampleRow { top_k: 39, temperature: 9.0, ..plain(2) }, 4000)),
        ids(&kit, &logits, &steps(&SampleRow { temperature: 9.0, ..plain(2) }, 4000)),
        "39 of 40 is on"
    );
}

#[test]
fn every_value_equal_to_the_kth_is_kept() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0];
    assert_eq!(seen(&kit, &logits, &SampleRow { top_k: 2, ..plain(1) }, 300), BTreeSet::from([1, 2, 3, 4]));
    assert_eq!(seen(&kit, &logits, &SampleRow { top_k: 4, ..plain(1) }, 300), BTreeSet::from([1, 2, 3, 4]));
    let five = SampleRow { top_k: 5, ..plain(1) };
    assert_eq!(seen(&kit, &logits, &five, 300), BTreeSet::from([0, 1, 2, 3, 4]));
}

#[test]
fn top_p_keeps_the_fewest_and_at_least_one() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = normals(22, 0, 300, 0.05);
    for top_p in [f32::MIN_POSITIVE, 1e-30, 1e-9, 1.0 / 300.0 / 2.0] {
        let row = SampleRow { top_p, temperature: 3.0, ..plain(1) };
        assert_eq!(seen(&kit, &logits, &row, 30), BTreeSet::from([argmax(&logits)]), "top_p {top_p}");
    }
    // Equal shares of a quarter, exactly: a half is reached by two, the lower ids; a hair more takes a third.
    let equal = [2.0; 4];
    let set = |top_p| seen(&kit, &equal, &SampleRow { top_p, ..plain(1) }, 200);
    assert_eq!(set(0.5), BTreeSet::from([0, 1]));
    assert_eq!(set(0.500_001), BTreeSet::from([0, 1, 2]));
    assert_eq!(set(0.25), BTreeSet::from([0]));
    assert_eq!(set(1.0), BTreeSet::from([0, 1, 2, 3]));
    assert_eq!(seen(&kit, &[5.0, 5.0, 5.0], &SampleRow { top_p: 1e-9, ..plain(1) }, 20), BTreeSet::from([0]));
}

#[test]
fn min_p_is_relative_to_the_most_likely_token() {
    let kit = Kit::cpu(Numerics::F32);
    let logits: Vec<f32> = [0.5f32, 0.26, 0.24].iter().map(|p| p.ln()).collect();
    let set = |min_p| seen(&kit, &logits, &SampleRow { min_p, ..plain(1) }, 300);
    assert_eq!(set(0.5), BTreeSet::from([0, 1]));
    assert_eq!(set(0.47), BTreeSet::from([0, 1, 2]));
    assert_eq!(set(0.53), BTreeSet::from([0]));
    assert_eq!(set(1.0), BTreeSet::from([0]));
    assert_eq!(seen(&kit, &[1.0, 1.0, 0.999], &SampleRow { min_p: 1.0, ..plain(1) }, 100), BTreeSet::from([0, 1]));
    let tiny = SampleRow { min_p: f32::from_bits(1), temperature: 20.0, ..plain(1) };
    assert_eq!(seen(&kit, &logits, &tiny, 300), BTreeSet::from([0, 1, 2]));
}

#[test]
fn ids_from_the_decodable_count_on_are_never_drawn() {
    let kit = Kit::cpu(Numerics::F32);
    let mut logits = normals(23, 0, 320, 1.0);
    logits[300..].fill(50.0);
    logits[310] = f32::NAN;
    let want = argmax(&logits[..300]);
    for row in [SampleRow::greedy(), SampleRow { top_k: 5, ..plain(4) }, SampleRow { top_p: 0.9, ..plain(4) }, plain(4)]
    {
        for row in steps(&row, 50) {
            let got = sample_below(&kit, &logits, std::slice::from_ref(&row), 300)[0].clone().unwrap();
            assert!(got.id < 300, "{row:?}");
            assert!(!row.is_greedy() || got.id == want);
        }
    }
    // The same row without the padding: the padding changes neither the token nor its log-probability.
    let rows = steps(&SampleRow { top_p: 0.8, logprobs: 3, ..plain(5) }, 50);
    for row in rows {
        let padded = sample_below(&kit, &logits, std::slice::from_ref(&row), 300);
        assert_eq!(padded, sample(&kit, &logits[..300], std::slice::from_ref(&row)));
    }
    // Penalties of padding ids change nothing and do no harm.
    let row = SampleRow { repetition_penalty: 1.5, prompt_ids: vec![310, 319], ..SampleRow::greedy() };
    assert_eq!(sample_below(&kit, &logits, &[row], 300)[0].as_ref().unwrap().id, want);
}

#[test]
fn lanes_that_are_no_finite_numbers_are_ignored() {
    let kit = Kit::cpu(Numerics::F32);
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let logits = [nan, 1.0, inf, 2.0, -inf, -nan, 1.5];
    assert_eq!(ids(&kit, &logits, &[SampleRow::greedy()]), [3]);
    assert_eq!(seen(&kit, &logits, &SampleRow { temperature: 3.0, ..plain(6) }, 200), BTreeSet::from([1, 3, 6]));
    // They change nothing for the others: the same draws as with -inf there.
    let clean = [-inf, 1.0, -inf, 2.0, -inf, -inf, 1.5];
    for row in [plain(7), SampleRow { top_p: 0.6, ..plain(7) }, SampleRow { top_k: 2, ..plain(7) }] {
        let rows = steps(&row, 100);
        assert_eq!(ids(&kit, &logits, &rows), ids(&kit, &clean, &rows), "{row:?}");
    }
    // Bias and penalties do not bring them back.
    let row = SampleRow {
        bias: vec![(0, 100.0), (2, -100.0), (4, 100.0)],
        repetition_penalty: 0.5,
        prompt_ids: vec![0, 2, 4, 5],
        ..SampleRow::greedy()
    };
    assert_eq!(ids(&kit, &logits, &[row]), [3]);
}

#[test]
fn a_row_without_a_finite_lane_is_not_valid_and_spoils_no_other() {
    let kit = Kit::cpu(Numerics::F32);
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let bad = [[nan; 4], [inf; 4], [-inf; 4], [nan, inf, -inf, nan]];
    for row in [SampleRow::greedy(), plain(1), SampleRow { top_k: 2, top_p: 0.5, min_p: 0.1, logprobs: 2, ..plain(1) }]
    {
        for bad in bad {
            let logits = [[0.0, 1.0, 0.5, 0.0], bad, [3.0, 1.0, 0.5, 0.0]].concat();
            let tensor = kit.floats(DType::F32, &[3, 4], &logits);
            let got = sampler::sample(&kit.cx(), &tensor, &[row.clone(), row.clone(), row.clone()], 4).unwrap();
            assert_eq!(got.valid.host::<u8>().unwrap(), [1, 0, 1], "{bad:?}");
            assert_eq!(got.tokens.host::<i32>().unwrap()[1], -1);
            assert!(got.logprobs.host::<f32>().unwrap()[1].is_nan());
            let read = got.read().unwrap();
            assert!(read[0].is_some() && read[1].is_none() && read[2].is_some());
        }
    }
    // Finite padding does not make a row valid.
    assert_eq!(sample_below(&kit, &[nan, inf, 1.0, 2.0], &[plain(1)], 2), [None]);
}

#[test]
fn a_token_of_no_probability_is_never_drawn() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = [0.0, 200.0, 0.0, 199.0, -200.0];
    assert_eq!(seen(&kit, &logits, &plain(8), 500), BTreeSet::from([1, 3]));
}

#[test]
fn huge_values_do_not_become_infinite_on_the_way() {
    let kit = Kit::cpu(Numerics::F32);
    for row in [
        SampleRow { temperature: 1e-5, ..plain(1) },
        SampleRow { repetition_penalty: 1e-38, prompt_ids: vec![0, 1, 2], ..SampleRow::greedy() },
        SampleRow { repetition_penalty: 1e-38, prompt_ids: vec![0, 1, 2], ..plain(1) },
        SampleRow { repetition_penalty: 1e38, prompt_ids: vec![0, 1, 2], ..plain(1) },
    ] {
        for logits in [[3e38, 1.0, -3e38], [-3e38, -3e38, -3e38], [f32::MAX, f32::MAX, f32::MIN]] {
            assert!(sample(&kit, &logits, std::slice::from_ref(&row))[0].is_some(), "{row:?} {logits:?}");
        }
    }
    assert_eq!(
        seen(&kit, &[f32::MAX, f32::MIN, 0.0], &SampleRow { temperature: 1e-5, ..plain(1) }, 30),
        BTreeSet::from([0])
    );
}

#[test]
fn bf16_logits_draw_as_their_f32_values() {
    let kit = Kit::cpu(Numerics::BF16);
    let values = super::super::kit::rounded(DType::Bf16, &normals(24, 0, 5 * 400, 2.0));
    let rows: Vec<SampleRow> = steps(&SampleRow { top_p: 0.9, logprobs: 4, ..plain(3) }, 5);
    let narrow = kit.floats(DType::Bf16, &[5, 400], &values);
    let got = sampler::sample(&kit.cx(), &narrow, &rows, 390).unwrap().read().unwrap();
    assert_eq!(got, sample_below(&kit, &values, &rows, 390));
}

fn param(result: highwater::error::Result<()>) -> &'static str {
    match result {
        Err(Error::Request { param, .. }) => param,
        other => panic!("{other:?} is no refusal of a parameter"),
    }
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let row = SampleRow::greedy;
    let mut refused: Vec<(&str, SampleRow)> = Vec::new();
    for temperature in [-1e-30, -1.0, nan, inf, -inf] {
        refused.push(("temperature", SampleRow { temperature, ..row() }));
    }
    for top_p in [0.0, -0.1, 1.000_001, nan, inf] {
        refused.push(("top_p", SampleRow { top_p, ..row() }));
    }
    for min_p in [-1e-9, 1.000_001, nan, inf] {
        refused.push(("min_p", SampleRow { min_p, ..row() }));
    }
    for repetition_penalty in [0.0, -1.0, nan, inf] {
        refused.push(("repetition_penalty", SampleRow { repetition_penalty, ..row() }));
    }
    for penalty in [-2.000_001, 2.000_001, nan, inf] {
        refused.push(("presence_penalty", SampleRow { presence_penalty: penalty, ..row() }));
        refused.push(("frequency_penalty", SampleRow { frequency_penalty: penalty, ..row() }));
    }
    for bias in [(10, 1.0), (u32::MAX, 1.0), (3, nan), (3, inf), (3, 100.1), (3, -100.1)] {
        refused.push(("logit_bias", SampleRow { bias: vec![(2, 0.0), bias], ..row() }));
    }
    refused.push(("logit_bias", SampleRow { bias: vec![(3, 1.0), (1, 0.0), (3, 1.0)], ..row() }));
    refused.push(("logit_bias", SampleRow { bias: vec![(3, 1.0); MAX_BIASES + 1], ..row() }));
    refused.push(("logprobs", SampleRow { logprobs: MAX_LOGPROBS as u32 + 1, ..row() }));
    for (name, row) in &refused {
        assert_eq!(param(row.check(10)), *name, "{row:?}");
    }
    // The op itself refuses them, on both devices.
    for kit in [Kit::cpu(Numerics::F32), Kit::plan(Numerics::F32)] {
        let logits = kit.floats(DType::F32, &[1, 12], &[0.0; 12]);
        for (name, row) in &refused {
            assert_refused(sampler::sample(&kit.cx(), &logits, std::slice::from_ref(row), 10), &[name]);
        }
    }
    for row in [
        SampleRow { temperature: 0.0, top_k: u32::MAX, top_p: f32::MIN_POSITIVE, min_p: 1.0, ..row() },
        SampleRow { temperature: f32::MAX, top_p: 1.0, min_p: 0.0, repetition_penalty: f32::MIN_POSITIVE, ..row() },
        SampleRow { presence_penalty: -2.0, frequency_penalty: 2.0, bias: vec![(9, 100.0), (0, -100.0)], ..row() },
        SampleRow { logprobs: MAX_LOGPROBS as u32, ..row() },
    ] {
        row.check(10).unwrap();
    }
    let text = SampleRow { top_p: 0.0, ..row() }.check(10).unwrap_err().to_string();
    assert_eq!(text, "top_p: 0 is not above 0 and at most 1 (1 keeps every token)");
}

#[test]
fn operands_that_disagree_are_refused() {
    let kit = Kit::cpu(Numerics::F32);
    let cx = kit.cx();
    let logits = kit.floats(DType::F32, &[2, 8], &[0.0; 16]);
    let two = vec![SampleRow::greedy(); 2];
    assert!(sampler::sample(&cx, &logits, &two, 8).is_ok());
    assert_refused(sampler::sample(&cx, &logits, &two[..1], 8), &["2 rows of logits", "1 rows of parameters"]);
    assert_refused(sampler::sample(&cx, &logits, &two, 9), &["9 decodable", "8 columns"]);
    assert_refused(sampler::sample(&cx, &logits, &two, 0), &["0 decodable"]);
    assert_refused(sampler::sample(&cx, &kit.floats(DType::F32, &[16], &[0.0; 16]), &two, 1), &["[16]", "[n, V]"]);
    assert_refused(sampler::sample(&cx, &kit.empty(DType::F32, &[0, 8]), &two[..0], 8), &["[0, 8]"]);
    assert_refused(sampler::sample(&cx, &kit.ints(&[2, 8], &[0; 16]), &two, 8), &["i32", "f32 or bf16"]);
    let plan = Kit::plan(Numerics::F32);
    let wide = plan.empty(DType::F32, &[1, (1 << 22) + 1]);
    assert_refused(sampler::sample(&plan.cx(), &wide, &two[..1], 8), &["4194305", "at most 4194304"]);
    for row in [
        SampleRow { repetition_penalty: 2.0, prompt_ids: vec![1, 8], ..SampleRow::greedy() },
        SampleRow { presence_penalty: 1.0, output_counts: vec![(u32::MAX, 1)], ..SampleRow::greedy() },
    ] {
        assert_refused(sampler::sample(&cx, &logits, &[row.clone(), row], 8), &["vocabulary has 8"]);
    }
}

#[test]
fn plan_and_cpu_take_the_same_bytes() {
    let rows = |n: usize, vocab: u32| -> Vec<SampleRow> {
        (0..n)
            .map(|i| SampleRow {
                repetition_penalty: if i % 2 == 0 { 1.0 } else { 1.2 },
                prompt_ids: (0..vocab.min(700)).collect(),
                bias: vec![(0, 1.0)],
                logprobs: i as u32,
                ..plain(i as u64)
            })
            .collect()
    };
    for case in sampler::cases() {
        let rows = rows(case.rows, case.decodable as u32);
        let mut measured = Vec::new();
        for kit in [Kit::cpu(Numerics::F32), Kit::plan(Numerics::F32)] {
            let values = if kit.device.has_data() {
                normals(25, 0, case.rows * case.vocab, 2.0)
            } else {
                vec![0.0; case.rows * case.vocab]
            };
            let logits = kit.floats(case.dtype, &[case.rows, case.vocab], &values);
            let targets = kit.ints(&[case.rows], &vec![0; case.rows]);
            let report = kit.measured(|cx| {
                (
                    sampler::sample(cx, &logits, &rows, case.decodable).unwrap(),
                    sampler::logprobs(cx, &logits, &targets, 5, case.decodable).unwrap(),
                )
            });
            measured.push((report, kit.meter.take()));
        }
        assert_eq!(measured[0], measured[1], "{}", case.name);
        let named: Vec<String> = measured[0].0.owners.iter().map(|(owner, _)| owner.to_string()).collect();
        for buffer in ["sample.tokens", "sample.valid", "sample.params", "sample.edits", "sample.workspace"] {
            assert!(named.iter().any(|n| n.ends_with(buffer)), "{buffer} is not among {named:?}");
        }
    }
    let kit = Kit::plan(Numerics::F32);
    let logits = kit.floats(DType::F32, &[1, 8], &[0.0; 8]);
    assert!(matches!(sampler::sample(&kit.cx(), &logits, &[plain(1)], 8).unwrap().read(), Err(Error::NoData { .. })));
}

#[test]
fn bytes_hang_on_the_list_lengths_alone() {
    let kit = Kit::plan(Numerics::F32);
    let vocab = 4000;
    let logits = kit.empty(DType::F32, &[2, vocab]);
    let row = |prompt: std::ops::Range<u32>, output: std::ops::Range<u32>| SampleRow {
        repetition_penalty: 1.1,
        prompt_ids: prompt.collect(),
        output_counts: output.map(|id| (id, 1)).collect(),
        ..SampleRow::greedy()
    };
    let bytes =
        |rows: &[SampleRow]| kit.measured(|cx| sampler::sample(cx, &logits, rows, vocab).unwrap()).transient_peak;
    // Overlapping and disjoint lists of the same lengths, and one token more within a step.
    let overlapping = [row(0..100, 0..100), row(0..50, 0..10)];
    let disjoint = [row(0..100, 100..200), row(0..50, 50..60)];
    let grown = [row(0..100, 100..201), row(0..50, 50..61)];
    assert_eq!(bytes(&overlapping), bytes(&disjoint));
    assert_eq!(overlapping.clone().map(|r| r.edits()), disjoint.clone().map(|r| r.edits()));
    assert_eq!(bytes(&disjoint), bytes(&grown));
    let more = [row(0..100, 100..200 + LIST_STEP as u32), row(0..50, 50..60)];
    assert_eq!(bytes(&more), bytes(&disjoint) + 16 * LIST_STEP as u64);
}

#[test]
fn no_legal_batch_needs_more_than_the_upper_bound() {
    let mut words = Words::new(26);
    let all = cards::all();
    for round in 0..2_000 {
        let limits = Limits { step_tokens: 512, batch: 1 + words.below(600), context: 1 + words.below(300_000) };
        let spec = &all[round % all.len()];
        let bound = sampler::upper_bound(spec, limits);
        for rows in [1, limits.batch, 1 + words.below(limits.batch)] {
            assert!(sampler::tactic(spec, rows).workspace <= bound, "{rows} rows of {limits:?} on {}", spec.name);
        }
    }
    // Sizing allocates at the bound, and real batches with lists and alternatives stay below it.
    for round in 0..60 {
        let vocab = 600;
        let limits = Limits { step_tokens: 64, batch: 1 + words.below(20), context: 1 + words.below(2_000) };
        let mut kit = Kit::plan(Numerics::F32);
        kit.bound = Some(limits);
        let greedy = vec![SampleRow::greedy(); limits.batch];
        let logits = kit.empty(DType::F32, &[limits.batch, vocab]);
        let bound = kit.measured(|cx| sampler::sample(cx, &logits, &greedy, vocab).unwrap()).transient_peak;
        kit.bound = None;
        let rows: Vec<SampleRow> = (0..=words.below(limits.batch))
            .map(|i| {
                let prompt = words.below(limits.context.min(vocab) + 1);
                let output = (limits.context - prompt).min(vocab);
                SampleRow {
                    repetition_penalty: 1.5,
                    prompt_ids: (0..prompt as u32).collect(),
                    output_counts: (0..output as u32).map(|id| (id, 1)).collect(),
                    bias: (0..words.below(vocab) as u32).map(|id| (id, 1.0)).collect(),
                    logprobs: words.below(MAX_LOGPROBS + 1) as u32,
                    ..plain(i as u64)
                }
            })
            .collect();
        let logits = kit.empty(DType::F32, &[rows.len(), vocab]);
        let took = kit.measured(|cx| sampler::sample(cx, &logits, &rows, vocab).unwrap()).transient_peak;
        assert!(took <= bound, "round {round}: {took} > {bound}, {limits:?}");
    }
    // Lists of a large batch at long context are taken in groups: 256 x 262,144 tokens need no gigabyte.
    let limits = Limits { step_tokens: 8192, batch: 256, context: 262_144 };
    assert!(sampler::edits_upper_bound(limits) < 5 << 20);
    assert!(sampler::upper_bound(&DeviceSpec::host(), limits) < 8 << 20);
}

#[test]
fn costs_are_one_reading_of_the_logits() {
    let cost = sampler::cost(3, 1000, DType::Bf16);
    assert!(cost.activation_bytes >= 6000 && cost.activation_bytes < 6400 && cost.resident_bytes == 0);
}
