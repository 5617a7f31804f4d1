//! The CPU arm of the quantisers: bytes per second (those of `cost`) on their tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::quantise::{Form, cases, cost, quantise};
use highwater::ops::scheme::Global;
use support::Rig;
use support::cuda::{self, CudaTime};

const FORMS: [(&str, Form); 4] = [
    ("fp8 token", Form::Fp8Token),
    ("fp8 group", Form::Fp8Group),
    ("fp8 tensor", Form::Fp8Tensor(1.0 / 64.0)),
    ("nvfp4", Form::Nvfp4(256.0, Global::Divides)),
];

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("quantise");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.x, DType::F32);
        let cx = rig.cx();
        let x = rig.operand(case.x, &[case.tokens, case.cols], -2.0, 2.0);
        for (form_name, form) in FORMS {
            group.throughput(Throughput::BytesDecimal(cost(case.tokens, case.cols, case.x, form.scheme()).bytes()));
            group.bench_function(BenchmarkId::new(format!("{} {}", case.name, case.x), form_name), |b| {
                b.iter(|| quantise(&cx, x.view(), form).expect("codes"));
            });
        }
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["quantise"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
