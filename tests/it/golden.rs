//! The whole model against logits that transformers computed from the same weights.

use highwater::engine::{Logits, Request};
use highwater::mem::Layer;
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::Tensor;

use crate::fixture::{
    CASES, F32_WEIGHTS_ONLY, Golden, PROMPTS, QUANTISED, all_logits, distance, engine, golden, options, row_distances,
    sampled_logits,
};

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

/// A router whose k-th and next expert are closer than f32 rounding: (case, prompt, row).
const NEAR_TIES: &[(&str, usize, usize)] = &[];

#[test]
fn quantised_weights_give_the_golden_f32_logits_on_every_row() {
    for case in QUANTISED.iter().map(|(case, _)| *case).chain(["mo_nvfp4"]) {
        let golden = golden(case);
        let mut engine = engine(case, options(F32_WEIGHTS_ONLY, 512, 1));
        let vocab = engine.runner().model().geometry().vocab;
        let mut worst = 0.0f64;
        let mut hold = |prompt: usize, row: usize, d: f64| {
            if !NEAR_TIES.contains(&(case, prompt, row)) {
                assert!(d <= F32_BOUND, "{case}: row {row} of prompt.{prompt} is {d:.2e} off");
                worst = worst.max(d);
            }
        };
        let got = all_logits(&mut engine, golden.prompt(65));
        for (row, d) in row_distances(&got, &golden.floats["fp32/logits_all.65"], vocab).into_iter().enumerate() {
            hold(65, row, d);
        }
        for length in PROMPTS {
            let got = sampled_logits(&mut engine, golden.prompt(length), 1);
            hold(length, length - 1, distance(&got.logits, &golden.floats[&format!("fp32/logits_last.{length}")]));
        }
        println!("{case}: f32 worst row {worst:.2e}");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// How far the last rows of two sets are from each other, prompt by prompt.
fn between(golden: &Golden, set: &str, other: &str) -> Vec<f64> {
    let last = |set: &str, length: usize| &golden.floats[&format!("{set}/logits_last.{length}")];
    PROMPTS.iter().map(|length| distance(last(set, *length), last(other, *length))).collect()
}

/// With the checkpoint's own activation quantisation, the logits are nearer to the peer's than a quarter of what that
/// quantisation does to them, by the median row.
///
/// `fp32_actq_rows` stands for the peer's set where that is of something else than the file says (make_actq.py beside the
/// fixtures tells): modelopt's set is of weights that its export rounds otherwise, compressed-tensors' dynamic tokens are
/// one scale for all rows of a two-dimensional input.
#[test]
fn quantised_activations_are_near_the_peer_s() {
    /// Inputs of this case are within 1e-7 of a tie between two codes, early in its longer prompts, and one code that falls
    /// the other way moves every later row. It is held to the third quartile of how far the peer's own arithmetic is from
    /// itself after nudges of one unit in the last place.
    const TIED: &str = "ct_fp8_dynamic";
    const NUDGED: usize = 9;
    for (case, set) in QUANTISED {
        let Some(set) = set else { continue };
        let golden = golden(case);
        let mut engine = engine(case, options(Numerics::F32, 512, 1));
        let ours: Vec<f64> = PROMPTS
            .iter()
            .map(|length| {
                let got = sampled_logits(&mut engine, golden.prompt(*length), 1);
                distance(&got.logits, &golden.floats[&format!("{set}/logits_last.{length}")])
            })
            .collect();
        for (length, d) in PROMPTS.iter().zip(&ours[..2]) {
            assert!(*d <= F32_BOUND, "{case}: prompt.{length} is {d:.2e} off");
        }
        let (ours, theirs) = (median(ours), median(between(&golden, set, "fp32")));
        println!("{case}: {ours:.4} from {set}, which is {theirs:.4} from fp32: {:.3}", ours / theirs);
        let mut bound = 0.25 * theirs;
        if case == TIED {
            let nudged = |k| median(between(&golden, &format!("fp32_actq_nudged.{k}"), set));
            let mut nudged: Vec<f64> = (0..NUDGED).map(nudged).collect();
            nudged.sort_by(f64::total_cmp);
            println!("{case}: nudged by one unit in the last place the peer is {nudged:.4?} from itself");
            bound = bound.max(nudged[3 * NUDGED / 4]);
        }
        assert!(ours <= bound, "{case}: {ours:.4} from {set}, and at most {bound:.4} is allowed");
    }
}

/// compressed-tensors' own fake quantisation of this case takes one scale for all rows of a two-dimensional input, which the
/// file does not say (`strategy: token`) and no batched engine can do: that formula gives the given set, one scale a row
/// does not.
#[test]
fn the_peer_s_set_of_dynamic_tokens_is_one_scale_for_all_rows() {
    let golden = golden("ct_fp8_dynamic");
    let theirs = median(between(&golden, "fp32_actq", "fp32"));
    let [whole, rows] =
        ["fp32_actq_2d", "fp32_actq_rows"].map(|set| median(between(&golden, set, "fp32_actq")) / theirs);
    println!(
        "ct_fp8_dynamic: of fp32_actq's {theirs:.4} from fp32, one scale for all rows is {whole:.4} away, rows {rows:.4}"
    );
    assert!(whole <= 0.05 && rows > 0.25, "{whole:.4} and {rows:.4}");
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
        let cx = Cx {
            device: runner.device(),
            numerics: Numerics::F32,
            layer: Layer::Head,
            bound: None,
            meter: &meter,
            routes: None,
        };
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
