//! Whole models on the CUDA arm: the goldens, captured graphs against the same launches made one by one, company.
//!
//! Emulation has time for the smallest prompts of a few cases; a card runs them all.

use std::sync::Arc;

use highwater::device::{Device, cards};
use highwater::engine::{Engine, Finish, Logits, Options, Request};
use highwater::ops::{ActQuant, Numerics};

use super::{Where, place};
use crate::fixture::{CASES, Got, PROMPTS, QUANTISED, SLAB, all_logits, drain, golden, load, options, row_distances};
use crate::fixture::{distance, sampled_logits};

/// bf16 arithmetic is held by its median row, as on the CPU arm.
const BF16_MEDIAN_BOUND: f64 = 0.08;
/// f32 arithmetic on a card: the same bound as the CPU arm's.
const F32_BOUND: f64 = 1e-3;
/// Rows whose two largest logits are closer than this may sample either, once bf16 sums are taken in another order.
/// Logits of these models are of order one and move by about 0.02.
const TOP_GAP: f32 = 0.1;
/// The same where inputs are quantised: one code that turns can turn a router, and these random models' logits then move by
/// more than one (a token at a gap of 1.43 was seen to differ).
const TOP_GAP_QUANTISED: f32 = 2.0;

fn device() -> Option<Arc<Device>> {
    let spec = cards::find("h200").unwrap();
    match place() {
        Where::Card => Some(Device::cuda_guarded(spec, 0, SLAB).unwrap()),
        Where::Emulated => Some(Device::emulated(spec, SLAB).unwrap()),
        Where::Nowhere => None,
    }
}

fn engine(case: &str, options: Options) -> Option<Engine> {
    Some(load(&device()?, case, options))
}

/// The cases that run here.
fn cases() -> Vec<&'static str> {
    let all: Vec<&str> = CASES.into_iter().chain(QUANTISED.iter().map(|(case, _)| *case)).chain(["mo_nvfp4"]).collect();
    match place() {
        Where::Card => all,
        Where::Emulated => vec!["dense_bf16", "ct_nvfp4"],
        Where::Nowhere => Vec::new(),
    }
}

fn prompts() -> &'static [usize] {
    if place() == Where::Card { &PROMPTS } else { &PROMPTS[..2] }
}

fn median(mut rows: Vec<f64>) -> f64 {
    rows.sort_by(f64::total_cmp);
    rows[(rows.len() - 1) / 2]
}

/// The last rows of every prompt, and on a card every row of one. A router that bf16 turns early in that one prompt moves
/// all its later rows: where half of them are further than the bound, the CPU arm in bf16 must be as far.
#[test]
fn bf16_logits_are_close_to_the_goldens_by_the_median_row() {
    let numerics = Numerics { act_quant: ActQuant::Off, ..Numerics::BF16 };
    for case in cases() {
        let golden = golden(case);
        let Some(mut engine) = engine(case, options(numerics, 512, 1)) else { return };
        let vocab = engine.runner().model().geometry().vocab;
        let mut last = Vec::new();
        for &length in prompts() {
            let got = sampled_logits(&mut engine, golden.prompt(length), 1);
            last.push(distance(&got.logits, &golden.floats[&format!("fp32/logits_last.{length}")]));
        }
        let last = median(last);
        assert!(last <= BF16_MEDIAN_BOUND, "{case}: the median of the last rows is {last:.3} off");
        let mut all = 0.0;
        if place() == Where::Card {
            let want = &golden.floats["fp32/logits_all.65"];
            all = median(row_distances(&all_logits(&mut engine, golden.prompt(65)), want, vocab));
            if all > BF16_MEDIAN_BOUND {
                let mut cpu = crate::fixture::engine(case, options(numerics, 512, 1));
                let cpu = median(row_distances(&all_logits(&mut cpu, golden.prompt(65)), want, vocab));
                println!("{case}: the median row of prompt.65 is {all:.3} off, the CPU arm's {cpu:.3}");
                assert!(
                    all <= 1.1 * cpu,
                    "{case}: the median row of prompt.65 is {all:.3} off, the CPU arm's {cpu:.3}"
                );
            }
        }
        println!("{case}: bf16, median of the last rows {last:.3}, of prompt.65 {all:.3}");
        assert!(engine.runner().device().take_overruns().is_empty());
    }
}

#[test]
fn f32_logits_are_the_goldens_on_every_row() {
    for case in cases() {
        let golden = golden(case);
        let numerics = Numerics { act_quant: ActQuant::Off, ..Numerics::F32 };
        let Some(mut engine) = engine(case, options(numerics, 512, 1)) else { return };
        let mut worst = 0.0f64;
        for &length in prompts() {
            let got = sampled_logits(&mut engine, golden.prompt(length), 1);
            worst = worst.max(distance(&got.logits, &golden.floats[&format!("fp32/logits_last.{length}")]));
        }
        println!("{case}: f32 worst row {worst:.2e}");
        assert!(worst <= F32_BOUND, "{case}: {worst:.2e}");
    }
}

#[test]
fn greedy_tokens_are_the_golden_ones_where_the_gap_allows() {
    let mut compared = 0;
    for case in cases() {
        let golden = golden(case);
        let numerics = Numerics { act_quant: ActQuant::Off, ..Numerics::F32 };
        let Some(mut engine) = engine(case, options(numerics, 512, 1)) else { return };
        for &length in prompts() {
            let Some(want) = golden.ints.get(&format!("fp32/greedy.{length}")) else { continue };
            let gaps = &golden.json["sets"]["fp32"]["greedy_top1_minus_top2"][length.to_string()];
            let wanted = if place() == Where::Card { want.len() } else { want.len().min(3) };
            let got = sampled_logits(&mut engine, golden.prompt(length), wanted).tokens;
            for (step, (got, want)) in got.iter().zip(want).enumerate() {
                if gaps[step].as_f64().is_none_or(|gap| gap < 1e-2) {
                    break;
                }
                assert_eq!(*got as i32, *want, "{case}: prompt.{length}, token {step}");
                compared += 1;
            }
        }
    }
    println!("{compared} greedy tokens equal");
    assert!(compared > 0 || place() == Where::Nowhere);
}

/// Every prompt of a case at once.
fn together(case: &str, options: Options, tokens: usize) -> Option<Vec<Got>> {
    let mut engine = engine(case, options)?;
    let golden = golden(case);
    let ids: Vec<_> = prompts()
        .iter()
        .map(|&n| {
            let request = Request { logits: Logits::Sampled, ..Request::greedy(golden.prompt(n), tokens) };
            engine.submit(request).unwrap()
        })
        .collect();
    let mut all = drain(&mut engine);
    let got: Vec<Got> = ids.into_iter().map(|id| all.remove(&id).unwrap()).collect();
    for got in &got {
        assert_eq!((got.tokens.len(), &got.finish), (tokens, &Some(Finish::Length)), "{case}");
    }
    Some(got)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_captured_step_is_the_same_launches_made_one_by_one() {
    for case in cases() {
        let with = |graphs| {
            let options = Options { graphs, ..options(Numerics::BF16, 512, 6) };
            together(case, options, if place() == Where::Card { 12 } else { 3 })
        };
        let (Some(captured), Some(eager)) = (with(true), with(false)) else { return };
        for (n, (captured, eager)) in prompts().iter().zip(captured.iter().zip(&eager)) {
            assert_eq!(captured.tokens, eager.tokens, "{case}: prompt.{n}");
            assert!(bits(&captured.logits) == bits(&eager.logits), "{case}: prompt.{n}: logits");
        }
    }
}

#[test]
fn company_changes_no_bit_under_batch_invariance_and_no_clear_token_without_it() {
    let tokens = if place() == Where::Card { 8 } else { 2 };
    let (mut rows, mut diverged, mut furthest) = (0usize, 0usize, 0.0f64);
    let quantised: Vec<&str> = QUANTISED.iter().map(|(case, _)| *case).collect();
    for case in cases() {
        let golden = golden(case);
        for batch_invariant in [true, false] {
            let numerics = Numerics { batch_invariant, ..Numerics::BF16 };
            let Some(company) = together(case, options(numerics, 512, 6), tokens) else { return };
            for (&n, got) in prompts().iter().zip(&company) {
                let Some(mut alone) = engine(case, options(numerics, 512, 1)) else { return };
                let vocab = alone.runner().model().geometry().vocab;
                let alone = sampled_logits(&mut alone, golden.prompt(n), tokens);
                if batch_invariant {
                    assert_eq!(got.tokens, alone.tokens, "{case}: prompt.{n}");
                    assert!(bits(&got.logits) == bits(&alone.logits), "{case}: prompt.{n}: logits");
                    continue;
                }
                let distances = row_distances(&got.logits, &alone.logits, vocab);
                for (i, (d, row)) in distances.into_iter().zip(alone.logits.chunks(vocab)).enumerate() {
                    rows += 1;
                    furthest = furthest.max(d);
                    if got.tokens[i] == alone.tokens[i] {
                        continue;
                    }
                    diverged += 1;
                    let mut sorted = row.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    let gap = sorted[0] - sorted[1];
                    let most = if quantised.contains(&case) { TOP_GAP_QUANTISED } else { TOP_GAP };
                    assert!(gap <= most, "{case}: prompt.{n}, token {i} differs at a gap of {gap}");
                    break; // from here on the two have gone different ways
                }
            }
        }
    }
    println!(
        "alone against batched: {diverged} of {rows} sampled rows diverge, the furthest row is {furthest:.2e} off"
    );
}
