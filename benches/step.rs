//! Prefill and time per output token of whole models, through the engine: the real ones on a card, the tiny
//! ones on this machine's processor where there is none. `HIGHWATER_BENCH_MODELS` names others, separated by spaces.

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::checkpoint::ModelRef;
use highwater::device::cuda::info;
use highwater::device::{Device, DeviceSpec, cards};
use highwater::engine::{Engine, KvBudget, Options, Policy, Request};
use highwater::error::Result;
use highwater::ops::{Limits, Numerics};

const VARIABLE: &str = "HIGHWATER_BENCH_MODELS";
const HOST_SLAB_BYTES: u64 = 2 << 30;

/// What a machine has time for.
struct Scale {
    models: &'static str,
    batches: &'static [usize],
    prompt: usize,
    depth: usize,
    output: usize,
}

const CARD: Scale = Scale {
    models: "qwen3.6-27b@fp8-channel qwen3.6-27b@nvfp4 qwen3.6-35b-a3b@fp8-channel qwen3.6-35b-a3b@nvfp4",
    batches: &[1, 8, 64],
    prompt: 8192,
    depth: 1024,
    output: 256,
};
const HOST: Scale = Scale { models: "tiny@bf16 tiny-moe@bf16", batches: &[1, 8], prompt: 128, depth: 64, output: 32 };

fn engine(device: &Arc<Device>, model: &str, scale: &Scale) -> Result<Engine> {
    let batch = scale.batches.iter().copied().max().unwrap_or(1);
    let context = (scale.depth + scale.output + 2).max(scale.prompt + 2);
    let limits = Limits { step_tokens: scale.prompt.max(batch), batch, context };
    let kv = KvBudget::Tokens((batch * (scale.depth + scale.output + 2)).max(context) as u64 + 64 * batch as u64);
    let options = Options {
        numerics: Numerics::BF16,
        chunk: scale.prompt,
        limits,
        kv,
        policy: Policy::default(),
        seed: 1,
        graphs: true,
        fault: None,
    };
    Engine::load(device, ModelRef::parse(model)?.open(1)?, options, &mut |_, _| {})
}

/// One prompt from nothing to its first token.
fn prefill(engine: &mut Engine, prompt: usize) -> Result<Duration> {
    engine.submit(Request::greedy((0..prompt as u32).map(|i| 1 + i % 200).collect(), 1))?;
    let begun = Instant::now();
    while engine.unfinished() > 0 {
        engine.step()?;
    }
    Ok(begun.elapsed())
}

/// Decode steps of `batch` sequences after `depth` primed tokens; random ids are fed back.
fn decode(engine: &mut Engine, batch: usize, scale: &Scale, steps: u64) -> Result<Duration> {
    let mut taken = Duration::ZERO;
    let mut left = steps;
    while left > 0 {
        let now = left.min(scale.output as u64);
        for sequence in 0..batch as u64 {
            let request = Request::greedy(vec![1 + sequence as u32], now as usize + 1);
            engine.submit(Request { depth: scale.depth, feed: Some(sequence), ..request })?;
        }
        // The first token of each is the prompt's.
        engine.step()?;
        let begun = Instant::now();
        for _ in 0..now {
            engine.step()?;
        }
        taken += begun.elapsed();
        while engine.unfinished() > 0 {
            engine.step()?;
        }
        left -= now;
    }
    Ok(taken)
}

fn bench(c: &mut Criterion) {
    let card = info::cards().ok().and_then(|cards| cards.into_iter().next());
    let scale = if card.is_some() { &CARD } else { &HOST };
    let models = std::env::var(VARIABLE).unwrap_or_else(|_| scale.models.to_owned());
    let mut group = c.benchmark_group("step");
    group.sample_size(10);
    for model in models.split_whitespace() {
        let device = match &card {
            Some(card) => {
                let spec = cards::of(card).expect("a card that kernels are written for");
                let slab = spec.slab_bytes(None);
                Device::cuda(spec, card.ordinal, slab)
            }
            None => Device::cpu(DeviceSpec::host(), HOST_SLAB_BYTES),
        };
        let mut engine = match device.and_then(|device| engine(&device, model, scale)) {
            Ok(engine) => engine,
            Err(error) => {
                println!("{model}: {error}");
                continue;
            }
        };
        group.throughput(Throughput::Elements(scale.prompt as u64));
        group.bench_function(BenchmarkId::new("prefill", model), |b| {
            b.iter_custom(|iters| (0..iters).map(|_| prefill(&mut engine, scale.prompt).expect("a step")).sum());
        });
        for &batch in scale.batches {
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(BenchmarkId::new(format!("TPOT batch {batch}"), model), |b| {
                b.iter_custom(|steps| decode(&mut engine, batch, scale, steps).expect("a step"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
