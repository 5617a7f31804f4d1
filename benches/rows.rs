//! The CPU arm of the gather of rows: bytes per second (those of `cost`) on its tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::mem::{End, Layer, Tag};
use highwater::num::DType;
use highwater::ops::rows::{cases, cost, gather};
use highwater::tensor::{Tensor, byte_size};
use support::Rig;
use support::cuda::{self, CudaTime};

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("rows");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, DType::F32);
        let cx = rig.cx();
        let table = rig.operand(case.dtype, &[case.table, case.hidden], -1.0, 1.0);
        let bytes = byte_size(DType::I32, &[case.n]).expect("a size");
        let buffer = cx.device.alloc(End::Persistent, Tag::new(Layer::Other, "bench", "indices"), bytes).expect("room");
        let mut indices = Tensor::new(buffer, DType::I32, &[case.n]).expect("a shape");
        let spread: Vec<i32> = (0..case.n).map(|row| (row * 7919 % case.table) as i32).collect();
        indices.write(0, &spread).expect("data");
        group.throughput(Throughput::BytesDecimal(cost(case.n, case.hidden, case.dtype, case.dtype, false).bytes()));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
            b.iter(|| gather(&cx, &table, &indices, case.n, "y").expect("rows"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["rows"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
