//! Element-wise activations: no sums, so only the exponentials differ from the CPU arm's.

use highwater::num::DType;
use highwater::ops::activation::{Case, Kind, cases, gdn_gates, sigmoid_mul, silu_mul};
use highwater::ops::attention::AttnDims;

use super::Pair;
use super::norm::assert_rounded;
use crate::ops::{numerics, random, rng, tensor, values};

/// An exponential to two units, a sum, a division and a product: each at most half a unit more.
const RELATIVE: f64 = 6e-7;

/// Mostly ordinary values, with the ends where an exponential over- or underflows, and zeros of both signs.
fn inputs(seed: u64, dtype: DType, n: usize) -> Vec<f32> {
    const ENDS: [f32; 10] = [0.0, -0.0, 87.0, -87.0, 89.5, -89.5, 104.0, -104.0, 1e30, -1e30];
    let mut x = random(&mut rng(seed), dtype, n, 4.0);
    x.iter_mut().skip(5).step_by(37).zip(ENDS.iter().cycle()).for_each(|(x, end)| *x = *end);
    x
}

#[test]
fn every_case_equals_the_cpu_arm() {
    let case = |name, kind, rows, width, dtype| Case { name, kind, rows, width, dtype };
    let awkward = [
        case("experts", Kind::SiluMul, 9, 512, DType::Bf16),
        case("one run and a part", Kind::SiluMul, 5, 12, DType::Bf16),
        case("whole runs", Kind::SiluMul, 300, 8, DType::F32),
        case("odd", Kind::SiluMul, 2, 4097, DType::F32),
        case("heads of 20", Kind::SigmoidMul, 7, 40, DType::Bf16),
        case("heads of 64", Kind::SigmoidMul, 7, 192, DType::F32),
        case("9b", Kind::GdnGates, 33, 32, DType::Bf16),
        case("odd", Kind::GdnGates, 5, 7, DType::F32),
    ];
    for (seed, Case { name, kind, rows, width, dtype }) in cases().into_iter().chain(awkward).enumerate() {
        let what = format!("{name}: {kind:?} [{rows}, {width}] {dtype}");
        let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), (rows * width) as u64) else { continue };
        let seed = seed as u64;
        match kind {
            Kind::SiluMul => {
                let x = inputs(seed, dtype, rows * 2 * width);
                let (cpu, cuda) = pair.run(|rig| {
                    let mut t = tensor(&rig.cx(), dtype, &[rows, 2 * width], &x);
                    silu_mul(&rig.cx(), &mut t).unwrap();
                    values(&t)
                });
                for (row, (cuda, cpu)) in cuda.chunks(2 * width).zip(cpu.chunks(2 * width)).enumerate() {
                    assert_eq!(cuda[width..], cpu[width..], "{what}: row {row}, what is multiplied stays");
                }
                let gates = |x: &[f32]| x.chunks(2 * width).flat_map(|row| row[..width].to_vec()).collect::<Vec<_>>();
                // exp(-x) overflows at other last digits of x: there a result near 1e-37 may be 0.
                assert_rounded(&what, dtype, &gates(&cuda), &gates(&cpu), RELATIVE, 1e-35, 1.0);
            }
            Kind::SigmoidMul => {
                let head_dim = [256, 64, 20].into_iter().find(|d| width % d == 0).unwrap();
                let dims = AttnDims { heads: width / head_dim, kv_heads: 1, head_dim, rotary_dim: 2 };
                let x = random(&mut rng(seed), dtype, rows * width, 1.0);
                let qkv = inputs(seed, dtype, rows * dims.qkv_cols());
                let (cpu, cuda) = pair.run(|rig| {
                    let mut t = tensor(&rig.cx(), dtype, &[rows, width], &x);
                    let qkv = tensor(&rig.cx(), dtype, &[rows, dims.qkv_cols()], &qkv);
                    sigmoid_mul(&rig.cx(), &mut t, &qkv, dims).unwrap();
                    values(&t)
                });
                assert_rounded(&what, dtype, &cuda, &cpu, RELATIVE, 1e-35, 1.0);
            }
            Kind::GdnGates => {
                let ba = inputs(seed, dtype, rows * 2 * width);
                let mut rng = rng(seed + 100);
                let a_log = random(&mut rng, DType::F32, width, 2.0);
                let dt_bias = random(&mut rng, DType::F32, width, 1.0);
                let (cpu, cuda) = pair.run(|rig| {
                    let cx = rig.cx();
                    let [a_log, dt_bias] = [&a_log, &dt_bias].map(|v| tensor(&cx, DType::F32, &[width], v));
                    let gates = gdn_gates(&cx, &tensor(&cx, dtype, &[rows, 2 * width], &ba), &a_log, &dt_bias);
                    let gates = gates.unwrap();
                    (values(&gates.g), values(&gates.beta))
                });
                // Two exponentials and a logarithm near 1.
                assert_rounded(&format!("{what}: g"), DType::F32, &cuda.0, &cpu.0, 2.0 * RELATIVE, 1e-35, 0.0);
                assert_rounded(&format!("{what}: beta"), DType::F32, &cuda.1, &cpu.1, RELATIVE, 1e-35, 0.0);
            }
        }
    }
}
