//! The CPU arm of the norms: bytes per second (those of `cost`) on their tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::norm::{Kind, add, add_rms, add_rms_fp8, cases, cost, gated, rms, rms_fp8};
use support::Rig;
use support::cuda::{self, CudaTime};

const EPS: f32 = 1e-6;

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("norm");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, DType::F32);
        let cx = rig.cx();
        let shape = [case.rows, case.heads * case.width];
        // A delta of 0 leaves the residual where it is, however often it is added.
        let deltas = if matches!(case.kind, Kind::Add | Kind::AddRms | Kind::AddRmsFp8) { 0.0 } else { 1.0 };
        let mut x = rig.operand(case.dtype, &shape, -2.0, 2.0);
        let other = rig.operand(case.dtype, &shape, -deltas, deltas);
        let w = rig.operand(DType::F32, &[case.width], -0.5, 0.5);
        let cost = cost(case.kind, case.rows, case.heads, case.width, case.dtype);
        group.throughput(Throughput::BytesDecimal(cost.bytes()));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| match case.kind {
            Kind::Rms => b.iter(|| rms(&cx, &x, &w, EPS, "y").expect("a norm")),
            Kind::AddRms => b.iter(|| add_rms(&cx, &mut x, &other, &w, EPS, "y").expect("a norm")),
            Kind::RmsFp8 => b.iter(|| rms_fp8(&cx, &x, &w, EPS).expect("a norm")),
            Kind::AddRmsFp8 => b.iter(|| add_rms_fp8(&cx, &mut x, &other, &w, EPS).expect("a norm")),
            Kind::Add => b.iter(|| add(&cx, &mut x, &other).expect("a sum")),
            Kind::Gated(gate) => b.iter(|| gated(&cx, &x, other.view(), &w, EPS, gate).expect("a norm")),
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["norm"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
