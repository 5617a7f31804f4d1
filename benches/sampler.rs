//! Drawing a token on this machine's processor, by kind of parameters; throughput in logits.

mod support;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::philox::stream_key;
use highwater::ops::sampler::{self, SampleRow};
use highwater::ops::{Cx, Meter, Numerics, fill};
use highwater::tensor::{Tensor, byte_size};
use support::cuda::{self, CudaTime};

const SLAB_BYTES: u64 = 64 << 20;

fn kinds(decodable: u32) -> Vec<(&'static str, SampleRow)> {
    let sampled = SampleRow { temperature: 0.7, seed: 1, ..SampleRow::greedy() };
    let some = decodable.min(2000);
    vec![
        ("greedy", SampleRow::greedy()),
        ("temperature", sampled.clone()),
        ("top-k 20, top-p 0.95", SampleRow { top_k: 20, top_p: 0.95, ..sampled.clone() }),
        ("top-p 0.95", SampleRow { top_p: 0.95, ..sampled.clone() }),
        ("min-p 0.05", SampleRow { min_p: 0.05, ..sampled.clone() }),
        (
            "penalties",
            SampleRow {
                top_k: 20,
                repetition_penalty: 1.1,
                presence_penalty: 0.5,
                prompt_ids: (0..some).collect(),
                output_counts: (0..some / 4).map(|id| (id, 2)).collect(),
                ..sampled.clone()
            },
        ),
        ("logprobs 20", SampleRow { logprobs: 20, top_k: 20, ..sampled }),
    ]
}

fn bench(c: &mut Criterion) {
    let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).unwrap();
    let meter = Meter::default();
    let cx = Cx {
        device: &device,
        numerics: Numerics::F32,
        layer: Layer::Sampler,
        bound: None,
        meter: &meter,
        routes: None,
    };
    let mut group = c.benchmark_group("sampler");
    for case in sampler::cases() {
        let shape = [case.rows, case.vocab];
        let bytes = byte_size(case.dtype, &shape).unwrap();
        let buffer = device.alloc(End::Persistent, Tag::new(Layer::Other, "bench", "logits"), bytes).unwrap();
        let mut logits = Tensor::new(buffer, case.dtype, &shape).unwrap();
        fill::normal(&cx, &mut logits, 0..case.rows, stream_key(1, "logits"), 0, 0.0, 3.0).unwrap();
        group.throughput(Throughput::Elements((case.rows * case.vocab) as u64));
        for (kind, row) in kinds(case.decodable as u32) {
            let mut rows = vec![row; case.rows];
            group.bench_function(BenchmarkId::new(format!("{} {}", case.name, case.dtype), kind), |b| {
                b.iter(|| {
                    for row in &mut rows {
                        row.step += 1;
                    }
                    device.begin_step();
                    sampler::sample(&cx, black_box(&logits), &rows, case.decodable).unwrap()
                });
            });
        }
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["sampler"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
