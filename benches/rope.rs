//! The CPU arm of `qk_norm_rope`: bytes per second (those of `cost`), for a decode and a prompt.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::attention::AttnDims;
use highwater::ops::rope::{cost, qk_norm_rope};
use support::Rig;
use support::cuda::{self, CudaTime};

/// Queries, keys and values of 27B.
const DIMS: AttnDims = AttnDims { heads: 24, kv_heads: 4, head_dim: 256, rotary_dim: 64 };
/// A name, sequences as (context, rows), and how many of them decode.
type Steps = (&'static str, &'static [(usize, usize)], usize);
const STEPS: [Steps; 2] = [("decode", &[(100, 1); 8], 8), ("prefill", &[(0, 128)], 0)];

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("rope");
    group.sample_size(20);
    for (name, sequences, decodes) in STEPS {
        let rig = Rig::new(DType::Bf16, DType::F32);
        let cx = rig.cx();
        let rows = sequences.iter().map(|s| s.1).sum();
        let mut qkv = rig.operand(DType::Bf16, &[rows, DIMS.qkv_cols()], -1.0, 1.0);
        let weight = || rig.operand(DType::F32, &[DIMS.head_dim], -0.1, 0.1);
        let (q_norm, k_norm) = (weight(), weight());
        let inv_freq = rig.operand(DType::F32, &[DIMS.rotary_dim / 2], 0.001, 1.0);
        let step = rig.step(sequences, decodes);
        group.throughput(Throughput::BytesDecimal(cost(rows, DIMS, DType::Bf16).bytes()));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                qk_norm_rope(&cx, &mut qkv, &q_norm, &k_norm, &inv_freq, 1.0, 1e-6, DIMS, &step.batch()).expect("rows");
            });
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["rope"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
