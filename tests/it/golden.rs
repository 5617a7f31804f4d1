//! The whole model against logits that transformers computed from the same weights.

use highwater::engine::{Logits, Request};
use highwater::mem::Layer;
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::Tensor;

use crate::fixture::{CASES, PROMPTS, all_logits, distance, engine, golden, options, row_distances, sampled_logits};

/// The bound of issue and fixtures alike for f32 arithmetic, on every row.
const F32_BOUND: f64 = 1e-3;
/// bf16 arithmetic is held by its median row: a router near-tie may flip one row, never half of them.
const BF16_MEDIAN_BOUND: f64 = 0.08;

#[test]
fn f32_logits_are_the_golden_ones_on_every_row_of_every_prompt() {
    for case in CASES {
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::F32, 512, 1));
        let vocab = engine.runner().model().geometry().vocab;
        let mut worst = 0.0f64;
        let got = all_logits(&mut engine, golden.prompt(65));
        for (row, d) in row_distances(&got, &golden.floats["fp32/logits_all.65"], vocab).into_iter().enumerate() {
            assert!(d <= F32_BOUND, "{case}: row {row} of prompt.65 is {d:.2e} off");
            worst = worst.max(d);
        }
        for length in PROMPTS {
            let got = sampled_logits(&mut engine, golden.prompt(length), 1);
            let d = distance(&got.logits, &golden.floats[&format!("fp32/logits_last.{length}")]);
            assert!(d <= F32_BOUND, "{case}: the last row of prompt.{length} is {d:.2e} off");
            worst = worst.max(d);
        }
        println!("{case}: f32 worst row {worst:.2e}");
    }
}

#[test]
fn f32_hidden_states_are_the_golden_ones_layer_by_layer() {
    for case in CASES {
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::F32, 512, 1));
        engine.submit(Request::greedy(golden.prompt(65), 1)).unwrap();
        let mut seen = Vec::new();
        engine
            .step_probed(Some(&mut |layer: usize, x: &Tensor| {
                seen.push((layer, x.host::<f32>()?.to_vec()));
                Ok(())
            }))
            .unwrap();
        let layers = engine.runner().model().geometry().layers.len();
        let hidden = engine.runner().model().geometry().hidden;
        assert_eq!(seen.len(), layers + 1);
        for (layer, got) in &seen[..layers] {
            let want = &golden.floats[&format!("fp32/hidden.65.{layer}")];
            for (row, d) in row_distances(got, want, hidden).into_iter().enumerate() {
                assert!(d <= F32_BOUND, "{case}: row {row} into layer {layer} is {d:.2e} off");
            }
        }
        // The golden's last entry is after the final norm.
        let runner = engine.runner();
        let meter = Meter::default();
        let cx =
            Cx { device: runner.device(), numerics: Numerics::F32, layer: Layer::Head, bound: None, meter: &meter };
        let mut last = cx.activation("test", "last", &[65, hidden]).unwrap();
        last.host_mut::<f32>().unwrap().copy_from_slice(&seen[layers].1);
        let normed = runner.model().final_norm(&cx, &last).unwrap();
        let want = &golden.floats[&format!("fp32/hidden.65.{layers}")];
        for (row, d) in row_distances(normed.host().unwrap(), want, hidden).into_iter().enumerate() {
            assert!(d <= F32_BOUND, "{case}: row {row} after the final norm is {d:.2e} off");
        }
    }
}

#[test]
fn greedy_tokens_are_the_golden_ones_where_the_gap_allows() {
    /// Logits are within 1e-3 of values of order one; a gap below this may fall either way.
    const LEAST_GAP: f64 = 1e-2;
    let mut compared = 0;
    for case in CASES {
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::F32, 512, 1));
        for length in PROMPTS {
            let want = &golden.ints[&format!("fp32/greedy.{length}")];
            let gaps = &golden.json["sets"]["fp32"]["greedy_top1_minus_top2"][length.to_string()];
            let got = sampled_logits(&mut engine, golden.prompt(length), want.len()).tokens;
            assert_eq!(got.len(), want.len());
            for (step, (got, want)) in got.iter().zip(want).enumerate() {
                if gaps[step].as_f64().unwrap() < LEAST_GAP {
                    break; // from here on the two may have gone different ways
                }
                assert_eq!(*got as i32, *want, "{case}: prompt.{length}, token {step}");
                compared += 1;
            }
        }
    }
    assert!(compared > 500, "only {compared} tokens had a gap to compare");
    println!("{compared} greedy tokens equal");
}

#[test]
fn bf16_logits_are_close_by_the_median_row() {
    for case in CASES {
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::BF16, 512, 1));
        let vocab = engine.runner().model().geometry().vocab;
        let got = all_logits(&mut engine, golden.prompt(65));
        let mut rows = row_distances(&got, &golden.floats["fp32/logits_all.65"], vocab);
        rows.sort_by(f64::total_cmp);
        let median = rows[rows.len() / 2];
        println!("{case}: bf16 median row {median:.3}, worst {:.3}", rows[rows.len() - 1]);
        assert!(median <= BF16_MEDIAN_BOUND, "{case}: the median row is {median:.3} off");
        assert!(median > 1e-4, "{case}: {median:.1e} is no bf16 arithmetic");
    }
}

#[test]
fn prompt_logprobs_are_those_of_the_golden_logits() {
    for case in ["dense_bf16", "moe_bf16"] {
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::F32, 512, 1));
        let vocab = engine.runner().model().geometry().vocab;
        let prompt = golden.prompt(65);
        let request = Request { prompt_logprobs: true, logits: Logits::None, ..Request::greedy(prompt.clone(), 1) };
        let got = crate::fixture::run(&mut engine, request).prompt_logprobs;
        assert_eq!(got.len(), 64);
        for (row, got) in got.iter().enumerate() {
            let logits = &golden.floats["fp32/logits_all.65"][row * vocab..(row + 1) * vocab];
            let top = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
            let want = f64::from(logits[prompt[row + 1] as usize] - top) - sum.ln();
            assert!((f64::from(*got) - want).abs() < 1e-2, "{case}: row {row}: {got} for {want}");
        }
    }
}
