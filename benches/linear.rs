//! The CPU arm of `linear`: operations per second on the shapes its tests share, and on the head's.

mod support;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::linear::{Case, Shape, cases, cost, linear_as};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{InputScale, LinearSpec, Weight};
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::{Tensor, byte_size};
use support::cuda::{self, CudaTime};

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

/// A weight of any scheme: codes that are all finite, scales near one over the root of the width.
fn weight(device: &Arc<Device>, spec: LinearSpec) -> Weight {
    if let Scheme::Plain(dtype) = spec.scheme {
        return Weight::plain(operand(device, dtype, &[spec.rows, spec.cols])).expect("a matrix");
    }
    let tag = Tag::new(Layer::Weights, "bench", "operand");
    let input = match spec.act {
        ActScheme::Fp8Tensor => InputScale::One(1e-3),
        ActScheme::Nvfp4 => InputScale::One(2000.0),
        _ => InputScale::None,
    };
    let mut w = Weight::alloc(device, tag, spec, input).expect("room");
    let fill = |t: &mut Tensor, modulus: usize| {
        for (i, code) in t.host_mut::<u8>().expect("data").iter_mut().enumerate() {
            *code = (i * 2_654_435_761 % modulus) as u8;
        }
    };
    fill(w.codes_mut(), if matches!(spec.scheme, Scheme::Nvfp4(_)) { 256 } else { 127 });
    let global = if spec.scheme == Scheme::Nvfp4(Global::Divides) { 1000.0 } else { 1e-3 };
    if let Some(t) = w.row_scales_mut() {
        t.host_mut::<f32>().expect("data").fill(global);
    }
    if let Some(t) = w.scales_mut() {
        if t.dtype() == DType::U8 { fill(t, 127) } else { t.host_mut::<f32>().expect("data").fill(global) }
    }
    w
}

fn bench(c: &mut Criterion) {
    let head = LinearSpec::plain(50_000, 1024, DType::Bf16);
    let call = |name, tokens, w| Case { name, shape: Shape { tokens, x: DType::F32, w, out: DType::F32 } };
    let fp8 = LinearSpec { scheme: Scheme::Fp8(Grain::Channel), ..head };
    let extra = [
        call("head-1", 1, head),
        call("head-4", 4, head),
        call("head-f32-1", 1, LinearSpec::plain(50_000, 1024, DType::F32)),
        call("head-fp8-1", 1, fp8),
        call("head-fp8-4", 4, fp8),
        call("head-nvfp4-1", 1, LinearSpec { scheme: Scheme::Nvfp4(Global::Divides), ..head }),
    ];
    let mut group = c.benchmark_group("linear");
    // The small quantised cases are for tests; their names repeat.
    let named =
        cases().into_iter().filter(|case| case.shape.w.rows >= 1000 || matches!(case.shape.w.scheme, Scheme::Plain(_)));
    for case in named.chain(extra) {
        let Shape { tokens, x, w, out } = case.shape;
        let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).expect("a slab");
        let meter = Meter::default();
        let cx = Cx {
            device: &device,
            numerics: Numerics::BF16,
            layer: Layer::Other,
            bound: None,
            meter: &meter,
            routes: None,
        };
        let (x, w) = (operand(&device, x, &[tokens, w.cols]), weight(&device, w));
        let flops = cost(device.spec(), &case.shape).expect("a shape").flops;
        group.throughput(Throughput::Elements(flops));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
            b.iter(|| linear_as(&cx, black_box(x.view()), &w, "y", out).expect("a product"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["linear"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
