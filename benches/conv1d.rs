//! The CPU arm of `conv1d`: bytes per second (those of `cost`) on its tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::conv1d::{cases, causal, cost};
use support::Rig;
use support::cuda::{self, CudaTime};

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("conv1d");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, DType::F32);
        let cx = rig.cx();
        let rows = case.spans.iter().map(|s| s.1).sum();
        let x = rig.operand(case.dtype, &[rows, case.channels + case.extra], -1.0, 1.0);
        let w = rig.operand(DType::F32, &[case.channels, case.taps], -0.5, 0.5);
        let mut state = rig.operand(case.dtype, &[case.spans.len(), case.channels, case.taps - 1], -1.0, 1.0);
        let step = rig.step(&case.spans, 0);
        let cost = cost(step.batch().spans, case.channels, case.taps, case.dtype);
        group.throughput(Throughput::BytesDecimal(cost.bytes()));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
            b.iter(|| causal(&cx, x.columns(0, case.channels), &w, &mut state, step.batch()).expect("a step"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["conv1d"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
