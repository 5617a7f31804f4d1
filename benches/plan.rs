//! The planner: dividing a card's slab for the published models, which runs every worst step without data.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::checkpoint::ModelRef;
use highwater::device::cards;
use highwater::engine::{KvBudget, sizing};
use highwater::ops::{Limits, Numerics};

/// A model, a card, prompt rows of a step, sequences, tokens of each.
const PLANS: [(&str, &str, usize, usize, usize); 4] = [
    ("qwen3.5-9b@bf16", "rtx-4090", 2048, 8, 8192),
    ("qwen3.6-27b@unsloth-nvfp4", "rtx-5090", 2048, 1, 8192),
    ("qwen3.6-27b@fp8-channel", "h200", 8192, 64, 32_768),
    ("qwen3.6-35b-a3b@fp8-channel", "h200", 8192, 64, 32_768),
];

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.sample_size(10);
    // One plan.
    group.throughput(Throughput::Elements(1));
    for (model, card, chunk, batch, context) in PLANS {
        let source = ModelRef::parse(model).expect("a name").open(0).expect("a built-in model");
        let spec = cards::find(card).expect("a known card");
        let limits = Limits { step_tokens: chunk + batch, batch, context };
        group.bench_function(BenchmarkId::new(model, card), |b| {
            b.iter(|| {
                let slab = spec.slab_bytes(None);
                sizing::size(&spec, slab, black_box(&source), Numerics::BF16, limits, KvBudget::Fill).expect("it fits")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
