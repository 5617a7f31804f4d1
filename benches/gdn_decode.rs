//! The CPU arm of `gdn_decode`: bytes per second (those of `cost`: the state once in, once out) on its tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::gdn_decode::{cases, cost, recurrent};
use support::Rig;
use support::cuda::{self, CudaTime};

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("gdn_decode");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, case.state);
        let (cx, dims, rows) = (rig.cx(), case.dims, case.batch);
        let conv = rig.operand(case.dtype, &[rows, dims.channels()], -0.5, 0.5);
        let gates = Gates {
            g: rig.operand(DType::F32, &[rows, dims.value_heads], -1.0, -0.01),
            beta: rig.operand(DType::F32, &[rows, dims.value_heads], 0.0, 1.0),
        };
        let slots = [rows, dims.value_heads, dims.key_dim, dims.value_dim];
        let mut state = rig.operand(case.state, &slots, -0.1, 0.1);
        let mut out = rig.operand(case.dtype, &[rows, dims.out_width()], 0.0, 0.0);
        let step = rig.step(&vec![(100, 1); rows], rows);
        let cost = cost(dims, step.batch().spans, case.dtype, case.state);
        group.throughput(Throughput::BytesDecimal(cost.bytes()));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
            b.iter(|| recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).expect("a step"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["gdn_decode"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
