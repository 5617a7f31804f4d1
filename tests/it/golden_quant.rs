//! The whole model on quantised checkpoints, inputs not quantised, against logits that transformers computed from each
//! peer's own dequantised weights.

use highwater::ops::{ActQuant, Numerics};

use crate::fixture::{PROMPTS, all_logits, distance, engine, golden, options, row_distances, sampled_logits};

/// The quantised cases.
const CASES: [&str; 13] = [
    "ct_dense_nvfp4",
    "ct_fp8_block",
    "ct_fp8_dynamic",
    "ct_fp8_static",
    "ct_mfree_ignore_re",
    "ct_mixed_lmhead_fp8",
    "ct_nvfp4",
    "ct_nvfp4a16",
    "hf_fp8_block",
    "mo_fp8",
    "mo_fp8_pc_pt",
    "mo_mixed",
    "mo_nvfp4",
];

/// The bound on every row of f32 arithmetic with inputs not quantised.
const F32_BOUND: f64 = 1e-3;

fn numerics(act_quant: ActQuant) -> Numerics {
    Numerics { act_quant, ..Numerics::F32 }
}

#[test]
fn f32_logits_of_dequantised_weights_are_the_golden_ones_on_every_row() {
    let mut far = Vec::new();
    for case in CASES {
        let golden = golden(case);
        let mut engine = engine(case, options(numerics(ActQuant::Off), 512, 1));
        let vocab = engine.runner().model().geometry().vocab;
        let mut worst = 0.0f64;
        let got = all_logits(&mut engine, golden.prompt(65));
        let mut rows: Vec<(String, f64)> = row_distances(&got, &golden.floats["fp32/logits_all.65"], vocab)
            .into_iter()
            .enumerate()
            .map(|(row, d)| (format!("row {row} of prompt.65"), d))
            .collect();
        for length in PROMPTS {
            let got = sampled_logits(&mut engine, golden.prompt(length), 1);
            let d = distance(&got.logits, &golden.floats[&format!("fp32/logits_last.{length}")]);
            rows.push((format!("the last row of prompt.{length}"), d));
        }
        for (row, d) in rows {
            worst = worst.max(d);
            if d > F32_BOUND {
                far.push(format!("{case}: {row} is {d:.2e} off"));
            }
        }
        println!("{case}: f32 worst row {worst:.2e}");
    }
    assert!(far.is_empty(), "{}", far.join("\n"));
}
