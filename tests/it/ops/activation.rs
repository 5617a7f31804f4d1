//! Activations against float64 closed forms.

use highwater::num::DType;
use highwater::ops::activation::{Case, Kind, cases, cost, gdn_gates, sigmoid_mul, silu_mul};
use highwater::ops::attention::AttnDims;
use highwater::ops::{Cx, Numerics};

use super::{
    Rig, assert_close, assert_plan_counts_the_same, assert_shape_error, empty, numerics, random, rng, tensor, values,
};

/// Of one op: f32 arithmetic and, in bf16, one store.
fn relative_bound(dtype: DType) -> f64 {
    1e-6 + if dtype == DType::Bf16 { 1.0 / 256.0 } else { 0.0 }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Heads for a case of `width` output columns: as large as divides it, two kv heads.
fn dims_of(width: usize) -> AttnDims {
    let head_dim = if width.is_multiple_of(256) { 256 } else { width };
    AttnDims { heads: width / head_dim, kv_heads: 2, head_dim, rotary_dim: head_dim / 4 }
}

/// The result columns of `silu_mul`; the others must be as they were.
fn silu_of(cx: &Cx, dtype: DType, shape: &[usize], gate_up: &[f32]) -> Vec<f32> {
    let mut t = tensor(cx, dtype, shape, gate_up);
    silu_mul(cx, &mut t).unwrap();
    let width = shape[1] / 2;
    let after = values(&t);
    for (after, before) in after.chunks_exact(2 * width).zip(gate_up.chunks_exact(2 * width)) {
        assert_eq!(after[width..], before[width..]);
    }
    after.chunks_exact(2 * width).flat_map(|row| row[..width].to_vec()).collect()
}

#[test]
fn every_case_equals_its_closed_form() {
    for Case { name, kind, rows, width, dtype } in cases() {
        let rows = rows.min(5);
        let rig = Rig::cpu(numerics(dtype, DType::F32));
        let cx = rig.cx();
        let mut rng = rng(1);
        match kind {
            Kind::SiluMul => {
                let x = random(&mut rng, dtype, rows * 2 * width, 4.0);
                let y = silu_of(&cx, dtype, &[rows, 2 * width], &x);
                let expected: Vec<f64> = x
                    .chunks_exact(2 * width)
                    .flat_map(|r| (0..width).map(|i| (f64::from(r[i]), f64::from(r[width + i]))).collect::<Vec<_>>())
                    .map(|(gate, up)| gate * sigmoid(gate) * up)
                    .collect();
                assert_close(name, &y, &expected, 1e-7, relative_bound(dtype));
            }
            Kind::SigmoidMul => {
                let dims = dims_of(width);
                let fused = 2 * (dims.heads + dims.kv_heads) * dims.head_dim;
                let qkv = random(&mut rng, dtype, rows * fused, 4.0);
                let before = random(&mut rng, dtype, rows * width, 1.0);
                let mut x = tensor(&cx, dtype, &[rows, width], &before);
                sigmoid_mul(&cx, &mut x, &tensor(&cx, dtype, &[rows, fused], &qkv), dims).unwrap();
                let d = dims.head_dim;
                let expected: Vec<f64> = (0..rows * width)
                    .map(|i| {
                        let (row, head, c) = (i / width, i % width / d, i % d);
                        let gate = qkv[row * fused + head * 2 * d + d + c];
                        f64::from(before[i]) * sigmoid(f64::from(gate))
                    })
                    .collect();
                assert_close(name, &values(&x), &expected, 1e-7, relative_bound(dtype));
            }
            Kind::GdnGates => {
                let ba = random(&mut rng, dtype, rows * 2 * width, 4.0);
                let [a_log, dt_bias] = [1.0, 3.0].map(|scale| random(&mut rng, DType::F32, width, scale));
                let [at, dt] = [&a_log, &dt_bias].map(|v| tensor(&cx, DType::F32, &[width], v));
                let gates = gdn_gates(&cx, &tensor(&cx, dtype, &[rows, 2 * width], &ba), &at, &dt).unwrap();
                let part = |i: usize, from: usize| f64::from(ba[i / width * 2 * width + from + i % width]);
                let beta: Vec<f64> = (0..rows * width).map(|i| sigmoid(part(i, 0))).collect();
                let g: Vec<f64> = (0..rows * width)
                    .map(|i| {
                        let softplus = (part(i, width) + f64::from(dt_bias[i % width])).exp().ln_1p();
                        -f64::from(a_log[i % width]).exp() * softplus
                    })
                    .collect();
                // Gates are f32 whatever the activations are; the f32 sum a + dt_bias costs a few units.
                assert_close(name, &values(&gates.beta), &beta, 0.0, 1e-6);
                assert_close(name, &values(&gates.g), &g, 1e-7, 3e-6);
            }
        }
    }
}

#[test]
fn gates_do_not_overflow_at_the_ends() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let ba = [-1000.0, 1000.0, 0.0, 88.0, 1000.0, -1000.0, 20.5, 19.5];
    let zero = tensor(&cx, DType::F32, &[4], &[0.0; 4]);
    let gates = gdn_gates(&cx, &tensor(&cx, DType::F32, &[1, 8], &ba), &zero, &zero).unwrap();
    assert_close("beta", &values(&gates.beta), &[0.0, 1.0, 0.5, 1.0], 1e-7, 0.0);
    let near = |x: f64| -x.exp().ln_1p();
    assert_close("g", &values(&gates.g), &[-1000.0, 0.0, near(20.5), near(19.5)], 0.0, 1e-6);

    let gate_up = [-1000.0, 1000.0, f32::MIN, 2.0, 3.0, 1.0];
    let y = silu_of(&cx, DType::F32, &[1, 6], &gate_up);
    assert_close("silu", &y, &[0.0, 3000.0, 0.0], 1e-7, 1e-6);
}

#[test]
fn softplus_is_continuous_at_its_linear_end() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let a: Vec<f32> = (0..400).map(|i| 19.0 + i as f32 * 0.005).collect();
    let ba = [vec![0.0; 400], a.clone()].concat();
    let zero = tensor(&cx, DType::F32, &[400], &[0.0; 400]);
    let gates = gdn_gates(&cx, &tensor(&cx, DType::F32, &[1, 800], &ba), &zero, &zero).unwrap();
    let expected: Vec<f64> = a.iter().map(|&a| -f64::from(a).exp().ln_1p()).collect();
    assert_close("g", &values(&gates.g), &expected, 0.0, 2e-7);
}

#[test]
fn plan_and_cpu_allocate_the_same_and_the_meter_agrees_with_the_cost() {
    for case in cases() {
        assert_plan_counts_the_same(case.name, numerics(case.dtype, DType::F32), |rig| {
            let cx = rig.cx();
            let Case { kind, rows, width, .. } = case;
            let act = |cols| cx.activation("test", "x", &[rows, cols]).unwrap();
            let op = match kind {
                Kind::SiluMul => {
                    silu_mul(&cx, &mut act(2 * width)).unwrap();
                    "silu_mul"
                }
                Kind::SigmoidMul => {
                    let dims = dims_of(width);
                    let fused = act(2 * (dims.heads + dims.kv_heads) * dims.head_dim);
                    sigmoid_mul(&cx, &mut act(width), &fused, dims).unwrap();
                    "sigmoid_mul"
                }
                Kind::GdnGates => {
                    let [a, dt] = [(); 2].map(|()| empty(&cx, DType::F32, &[width]));
                    let gates = gdn_gates(&cx, &act(2 * width), &a, &dt).unwrap();
                    assert!(gates.g.shape() == [rows, width] && gates.beta.dtype() == DType::F32);
                    "gdn_gates"
                }
            };
            let metered = rig.meter.take();
            assert_eq!((metered.len(), metered[0].op), (1, op));
            assert_eq!(metered[0].cost, cost(kind, rows, width, case.dtype));
        });
    }
}

#[test]
fn operands_that_disagree_are_named() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let f32s = |shape: &[usize]| tensor(&cx, DType::F32, shape, &vec![0.5; shape.iter().product()]);
    assert_shape_error(silu_mul(&cx, &mut f32s(&[2, 7])), "silu_mul", &["7 columns"]);
    assert_shape_error(silu_mul(&cx, &mut f32s(&[0, 8])), "silu_mul", &["[0, 8]"]);
    let mut bf16 = empty(&cx, DType::Bf16, &[2, 8]);
    assert_shape_error(silu_mul(&cx, &mut bf16), "silu_mul", &["bf16", "must be f32"]);
    let dims = AttnDims { heads: 2, kv_heads: 1, head_dim: 4, rotary_dim: 2 };
    let narrow = f32s(&[2, 23]);
    let result = sigmoid_mul(&cx, &mut f32s(&[2, 8]), &narrow, dims);
    assert_shape_error(result, "sigmoid_mul", &["qkv", "[2, 23]", "[2, 24]"]);
    let result = sigmoid_mul(&cx, &mut f32s(&[2, 9]), &f32s(&[2, 24]), dims);
    assert_shape_error(result, "sigmoid_mul", &["x is", "[2, 9]", "[2, 8]"]);
    let result = gdn_gates(&cx, &f32s(&[2, 8]), &f32s(&[3]), &f32s(&[3]));
    assert_shape_error(result, "gdn_gates", &["ba is", "[2, 8]", "[2, 6]"]);
    let result = gdn_gates(&cx, &f32s(&[2, 8]), &f32s(&[4]), &f32s(&[5]));
    assert_shape_error(result, "gdn_gates", &["dt_bias", "[5]", "[4]"]);
}
