//! The CPU arm of the activations: bytes per second (those of `cost`) on their tests' shapes.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use highwater::num::DType;
use highwater::ops::activation::{Kind, cases, cost, gdn_gates, sigmoid_mul, silu_mul};
use highwater::ops::attention::AttnDims;
use support::Rig;
use support::cuda::{self, CudaTime};

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("activation");
    group.sample_size(20);
    for case in cases() {
        let rig = Rig::new(case.dtype, DType::F32);
        let cx = rig.cx();
        // Gates of 24 and more let pass what they gate, so that in place nothing shrinks, however often.
        let operand = |width: usize| rig.operand(case.dtype, &[case.rows, width], 24.0, 25.0);
        group.throughput(Throughput::BytesDecimal(cost(case.kind, case.rows, case.width, case.dtype).bytes()));
        group.bench_function(BenchmarkId::from_parameter(case.name), |b| match case.kind {
            Kind::SiluMul => {
                let mut x = operand(2 * case.width);
                let one = if case.dtype == DType::Bf16 {
                    0x3F80u16.to_le_bytes().to_vec()
                } else {
                    1f32.to_le_bytes().to_vec()
                };
                let ups = one.repeat(case.width);
                (0..case.rows).try_for_each(|row| x.write((2 * row + 1) * ups.len(), &ups)).expect("data");
                b.iter(|| silu_mul(&cx, &mut x).expect("rows"));
            }
            Kind::SigmoidMul => {
                // One head of the whole width.
                let dims = AttnDims { heads: 1, kv_heads: 1, head_dim: case.width, rotary_dim: 2 };
                let (mut x, qkv) = (operand(case.width), operand(4 * case.width));
                b.iter(|| sigmoid_mul(&cx, &mut x, &qkv, dims).expect("rows"));
            }
            Kind::GdnGates => {
                let parameters = || rig.operand(DType::F32, &[case.width], -1.0, 1.0);
                let (ba, a_log, dt_bias) = (operand(2 * case.width), parameters(), parameters());
                b.iter(|| gdn_gates(&cx, &ba, &a_log, &dt_bias).expect("gates"));
            }
        });
    }
    group.finish();
}

fn on_card(c: &mut Criterion<CudaTime>) {
    cuda::kernels(c, &["silu_mul"]);
}

criterion_group!(benches, bench);
criterion_group!(name = card; config = cuda::criterion(); targets = on_card);
criterion_main!(card, benches);
