//! The CPU arm of `attention`: operations per second on the shapes its tests share, and on a prompt of 2048 tokens.

mod support;

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::attention::{AttnDims, Case, attend, cases, cost};
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::kv_write::KvPages;
use highwater::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs};
use highwater::tensor::{Tensor, byte_size};
use support::cuda::{self, CudaTime};

const SLAB_BYTES: u64 = 2 << 30;

/// Values that are neither zeros nor denormal: those run at another speed.
fn fill(t: &mut Tensor) {
    let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.001 - 0.45;
    match t.dtype() {
        DType::Bf16 => {
            for (i, v) in t.host_mut::<bf16>().expect("data").iter_mut().enumerate() {
                *v = bf16::from_f32(value(i));
            }
        }
        DType::U8 => {
            for (i, v) in t.host_mut::<u8>().expect("data").iter_mut().enumerate() {
                *v = (i * 2_654_435_761 % 127) as u8;
            }
        }
        _ => {
            for (i, v) in t.host_mut::<f32>().expect("data").iter_mut().enumerate() {
                *v = value(i);
            }
        }
    }
}

fn spans(case: &Case) -> Vec<Span> {
    let mut start = 0;
    case.sequences
        .iter()
        .map(|&(context, len)| {
            start += len;
            Span { start: start - len, len, context }
        })
        .collect()
}

fn inputs(device: &Arc<Device>, spans: &[Span]) -> (StepInputs, usize) {
    let rows = spans.iter().map(|s| s.len).sum();
    let context = spans.iter().map(|s| s.context + s.len).max().expect("a sequence");
    let limits = Limits { step_tokens: rows, batch: spans.len(), context };
    let mut inputs = StepInputs::new(device, limits).expect("room");
    let mut pages = 0..;
    let places: Vec<Placement> = spans
        .iter()
        .map(|s| {
            let pages = pages.by_ref().take((s.context + s.len).div_ceil(PAGE_TOKENS)).collect();
            Placement { slot_in: 0, slot_out: 0, pages }
        })
        .collect();
    inputs.upload(spans, &places, &vec![0; rows], &[]).expect("a step");
    (inputs, pages.start as usize)
}

fn bench(c: &mut Criterion) {
    let dims = AttnDims { heads: 8, kv_heads: 2, head_dim: 256, rotary_dim: 64 };
    let (dtype, kv) = (DType::Bf16, DType::Bf16);
    let prompt = Case { name: "prompt-2048", dims, sequences: vec![(0, 2048)], decodes: 0, dtype, kv };
    let decode = Case { name: "decode-4096", sequences: vec![(4095, 1)], decodes: 1, ..prompt.clone() };
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    for case in cases().into_iter().chain([prompt, decode]) {
        let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).expect("a slab");
        let numerics = if case.dtype == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 };
        let numerics = Numerics { kv: case.kv, ..numerics };
        let meter = Meter::default();
        let cx = Cx { device: &device, numerics, layer: Layer::Attention, bound: None, meter: &meter, routes: None };
        let spans = spans(&case);
        let (inputs, pages) = inputs(&device, &spans);
        let mut kv = KvPages::new(&device, case.kv, pages, case.dims).expect("room");
        fill(&mut kv.k);
        fill(&mut kv.v);
        let shape = [spans.iter().map(|s| s.len).sum(), case.dims.qkv_cols()];
        let tag = Tag::new(Layer::Attention, "bench", "qkv");
        let buffer = device.alloc(End::Persistent, tag, byte_size(case.dtype, &shape).expect("a size")).expect("room");
        let mut qkv = Tensor::new(buffer, case.dtype, &shape).expect("a shape");
        fill(&mut qkv);
        let batch = Batch { spans: &spans, decodes: case.decodes, inputs: &inputs };
        group.throughput(Throughput::Elements(cost(case.dims, &spans, case.dtype, case.kv).flops));
        group.bench_function(BenchmarkId::new(case.name, case.kv), |b| {
            b.iter(|| attend(&cx, &qkv, &kv, case.dims, &batch).expect("a result"));
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["attention"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
