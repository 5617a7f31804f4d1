//! The CPU arm of `linear`: operations per second on the shapes its tests share, and on the head's.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::linear::{Case, Shape, cases, cost, linear_as};
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::{Tensor, byte_size};

const SLAB_BYTES: u64 = 4 << 30;

/// Values that are neither zeros nor denormal: those run at another speed.
fn operand(device: &Arc<Device>, dtype: DType, shape: &[usize]) -> Tensor {
    let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.001 - 0.45;
    let tag = Tag::new(Layer::Weights, "bench", "operand");
    let buffer = device.alloc(End::Persistent, tag, byte_size(dtype, shape).expect("a size")).expect("room");
    let mut t = Tensor::new(buffer, dtype, shape).expect("a shape");
    match dtype {
        DType::Bf16 => {
            for (i, v) in t.host_mut::<bf16>().expect("data").iter_mut().enumerate() {
                *v = bf16::from_f32(value(i));
            }
        }
        _ => {
            for (i, v) in t.host_mut::<f32>().expect("data").iter_mut().enumerate() {
                *v = value(i);
            }
        }
    }
    t
}

fn bench(c: &mut Criterion) {
    let head = Shape { tokens: 4, outputs: 50_000, inputs: 1024, x: DType::F32, w: DType::Bf16, out: DType::F32 };
    let extra = [
        Case { name: "head-1", shape: Shape { tokens: 1, ..head } },
        Case { name: "head-4", shape: head },
        Case { name: "head-f32-1", shape: Shape { tokens: 1, w: DType::F32, ..head } },
    ];
    let mut group = c.benchmark_group("linear");
    for case in cases().into_iter().chain(extra) {
        let Shape { tokens, outputs, inputs, x, w, out } = case.shape;
        let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).expect("a slab");
        let meter = Meter::default();
        let cx = Cx { device: &device, numerics: Numerics::BF16, layer: Layer::Other, bound: None, meter: &meter };
        let (x, w) = (operand(&device, x, &[tokens, inputs]), operand(&device, w, &[outputs, inputs]));
        group.throughput(Throughput::Elements(cost(&case.shape).flops));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
            b.iter(|| linear_as(&cx, black_box(x.view()), &w, "y", out).expect("a product"));
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
