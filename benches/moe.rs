//! Router and experts on this machine's processor, one time per case; throughput in floating-point operations.

mod support;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::DType;
use highwater::num::philox::stream_key;
use highwater::ops::cost::Unit;
use highwater::ops::moe::{self, Case, Experts};
use highwater::ops::weight::Weight;
use highwater::ops::{Cx, Meter, Numerics, fill};
use highwater::tensor::{Tensor, byte_size};
use support::cuda::{self, CudaTime};

const SLAB_BYTES: u64 = 1 << 30;

fn normal(cx: &Cx, name: &'static str, dtype: DType, shape: &[usize], std: f32) -> Tensor {
    let buffer =
        cx.device.alloc(End::Persistent, Tag::new(Layer::Other, "bench", name), byte_size(dtype, shape).unwrap());
    let mut tensor = Tensor::new(buffer.unwrap(), dtype, shape).unwrap();
    let rows = tensor.rows();
    fill::normal(cx, &mut tensor, 0..rows, stream_key(1, name), 0, 0.0, std).unwrap();
    tensor
}

fn experts(cx: &Cx, case: &Case) -> Experts {
    let moe::Dims { hidden, inter, experts, .. } = case.dims;
    let bytes = byte_size(DType::I32, &[experts]).unwrap();
    let slots = cx.device.alloc(End::Persistent, Tag::new(Layer::Other, "bench", "slots"), bytes).unwrap();
    let mut slots = Tensor::new(slots, DType::I32, &[experts]).unwrap();
    slots.host_mut::<i32>().unwrap().iter_mut().enumerate().for_each(|(e, slot)| *slot = e as i32);
    let gate_up = normal(cx, "gate_up", case.weights, &[experts * 2 * inter, hidden], 0.05);
    let down = normal(cx, "down", case.weights, &[experts * hidden, inter], 0.05);
    Experts { gate_up: Weight::plain(gate_up).unwrap().into(), down: Weight::plain(down).unwrap(), slots }
}

fn bench(c: &mut Criterion) {
    let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).unwrap();
    let meter = Meter::default();
    let mut group = c.benchmark_group("moe");
    for case in moe::cases() {
        let numerics = if case.act == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 };
        let cx = Cx { device: &device, numerics, layer: Layer::Moe, bound: None, meter: &meter, routes: None };
        let moe::Dims { hidden, inter, experts: e, top_k } = case.dims;
        let (logits, x) = (
            normal(&cx, "logits", case.act, &[case.tokens, e], 1.0),
            normal(&cx, "x", case.act, &[case.tokens, hidden], 1.0),
        );
        let w = experts(&cx, &case);
        group.throughput(Throughput::Elements(moe::cost(case.tokens, case.dims, case.act, 0, Unit::F32).flops));
        let id = BenchmarkId::new(case.name, format!("{}-{}", case.act, case.weights));
        group.bench_function(id, |b| {
            b.iter(|| {
                device.begin_step();
                let routing = moe::route(&cx, black_box(&logits), top_k).unwrap();
                moe::experts(&cx, &x, &routing, &w, inter).unwrap()
            });
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["moe"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
