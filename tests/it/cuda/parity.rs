//! The bytes a card takes are the planned ones: every corner of the sizing, and seeded cells, on both devices.

use std::sync::Arc;

use highwater::checkpoint::ModelRef;
use highwater::device::{Device, cards};
use highwater::engine::{Runner, StepPlan, sizing};
use highwater::mem::Report;
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::{Limits, Numerics, Span};
use rand::RngExt;

use super::{Where, place};
use crate::ops::rng;

/// Models on a card; in emulation the tiny ones.
const MODELS: [&str; 6] = [
    "qwen3.6-27b@bf16",
    "qwen3.6-27b@fp8-channel",
    "qwen3.8-27b@unsloth-nvfp4",
    "qwen3.6-35b-a3b@bf16",
    "qwen3.6-35b-a3b@fp8-channel",
    "qwen3.6-35b-a3b@unsloth-nvfp4-fast",
];
const EMULATED_MODELS: [&str; 2] = ["tiny@fp8-channel", "tiny-moe@nvfp4"];
/// Pages of the pool; sequences share them, since bytes do not depend on which page is whose.
const PAGES: usize = 64;
const CELLS: usize = 20;

/// Chunk, batch and depth of a cell.
#[derive(Debug, Clone, Copy)]
struct Cell {
    chunk: usize,
    batch: usize,
    depth: usize,
}

fn cells(emulated: bool) -> Vec<Cell> {
    let mut rng = rng(20);
    let (low, high, batch, depth) = if emulated { (4, 6, 2, 64) } else { (9, 14, 64, 32_768) };
    let count = if emulated { 2 } else { CELLS };
    (0..count)
        .map(|_| {
            let chunk = (1usize << rng.random_range(low..high)) + rng.random_range(0..(1 << low));
            Cell { chunk, batch: rng.random_range(1..=batch), depth: rng.random_range(0..=depth) }
        })
        .collect()
}

/// `batch` sequences after `context` tokens, `rows` rows together, all sampled.
fn step(batch: usize, rows: usize, context: usize, decode: bool) -> StepPlan {
    let mut plan = StepPlan::default();
    let mut start = 0;
    for i in 0..batch {
        let len = rows / batch + usize::from(i < rows % batch);
        if len == 0 {
            continue;
        }
        let pages = (0..(context + len).div_ceil(PAGE_TOKENS)).map(|p| (p % PAGES) as i32).collect();
        plan.spans.push(Span { start, len, context });
        plan.places.push(Placement { slot_in: i as i32 + 1, slot_out: i as i32 + 1, pages });
        start += len;
        plan.samples.push(highwater::engine::runner::SampledRow {
            row: start as i32 - 1,
            params: highwater::ops::sampler::SampleRow::default(),
            logits: false,
        });
    }
    plan.decodes = if decode { plan.spans.len() } else { 0 };
    plan.tokens = (0..start as i32).map(|i| i % 97).collect();
    plan
}

/// What each step took.
fn reports(runner: &mut Runner, limits: Limits, plans: &[(String, StepPlan)]) -> Vec<(String, Report)> {
    runner.allocate(limits, PAGES, limits.batch + 1).unwrap();
    plans
        .iter()
        .map(|(name, plan)| {
            runner.run(plan, None, None, None).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name.clone(), runner.report())
        })
        .collect()
}

#[test]
fn a_card_takes_the_planned_bytes() {
    let emulated = match place() {
        Where::Card => false,
        Where::Emulated => true,
        Where::Nowhere => return,
    };
    let spec = cards::find("h200").unwrap();
    let slab = if emulated { 1 << 30 } else { spec.slab_bytes(None) };
    // PARITY_MODELS=35b,unsloth takes the models with one of these in their name.
    let wanted = std::env::var("PARITY_MODELS").unwrap_or_default();
    let models: &[&str] = if emulated { &EMULATED_MODELS } else { &MODELS };
    let models = models.iter().filter(|m| wanted.split(',').any(|part| m.contains(part)));
    // Guard bands are bytes too: this device has none. One slab serves all models.
    let device: Arc<Device> = if emulated {
        Device::emulated_bare(spec.clone(), slab).unwrap()
    } else {
        Device::cuda(spec.clone(), 0, slab).unwrap()
    };
    for model in models {
        let source = ModelRef::parse(model).unwrap().open(0).unwrap();
        let plan = Device::plan(spec.clone(), slab);
        let mut on_card = Runner::load(&device, &source, Numerics::BF16, &mut |_, _| {}).unwrap();
        let mut planned = Runner::load(&plan, &source, Numerics::BF16, &mut |_, _| {}).unwrap();
        let limits = if emulated {
            Limits { step_tokens: 70, batch: 3, context: 256 }
        } else {
            Limits { step_tokens: 8192, batch: 64, context: 40_960 }
        };
        let mut corners: Vec<(String, StepPlan)> =
            sizing::corners(limits).into_iter().map(|(name, plan)| (name.to_owned(), plan)).collect();
        // A page table of one page repeated is legal; sequences of a corner all stand in slot 1.
        let mut compared = 0;
        let mut compare = |limits: Limits, plans: &[(String, StepPlan)], what: &str| {
            let (card, plan) = (reports(&mut on_card, limits, plans), reports(&mut planned, limits, plans));
            for ((name, card), (_, plan)) in card.iter().zip(&plan) {
                assert_eq!(card, plan, "{model}, {what}: {name}");
                assert_eq!(card.slab, card.resident + card.transient_peak + card.free, "{model}, {what}: {name}");
                compared += 1;
            }
        };
        compare(limits, &std::mem::take(&mut corners), "corners");
        for cell in cells(emulated) {
            let Cell { chunk, batch, depth } = cell;
            let limits = Limits { step_tokens: chunk.max(batch), batch, context: depth + chunk + 1 };
            let plans = [
                ("prefill".to_owned(), step(batch, chunk, depth, false)),
                ("decode".to_owned(), step(batch, batch, depth.max(1), true)),
            ];
            compare(limits, &plans, &format!("{cell:?}"));
        }
        println!("{model}: {compared} steps, the same bytes on both devices");
    }
}
