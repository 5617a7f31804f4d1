//! The CPU arm of the seeded values: bytes per second (those of `cost`) on its tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::fill::{cases, cost, normal};
use support::Rig;
use support::cuda::{self, CudaTime};

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("fill");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, DType::F32);
        let cx = rig.cx();
        let mut out = rig.operand(case.dtype, &[case.rows, case.cols], -1.0, 1.0);
        group.throughput(Throughput::BytesDecimal(cost(case.rows * case.cols, case.dtype).bytes()));
        group.bench_function(BenchmarkId::new(case.name, case.dtype), |b| {
            b.iter(|| normal(&cx, &mut out, 0..case.rows, [1, 2], 0, 0.0, 1.0).expect("values"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["fill"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
