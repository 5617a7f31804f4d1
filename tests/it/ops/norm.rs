//! Norms against float64 closed forms and against transformers' (`gdn_ops`).

use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::norm::{Case, Gate, Kind, add, add_rms, add_rms_fp8, cases, cost, gated, rms, rms_fp8};
use highwater::ops::quantise::{Form, quantise};

use super::{
    Fixture, Rig, assert_close, assert_plan_counts_the_same, assert_shape_error, bytes, empty, numerics, random, rng,
    round, tensor, values,
};

const EPS: f32 = 1e-6;

/// f32 results are off by the sum's few roundings, relative to themselves; a bf16 store adds half a unit (2^-8).
fn relative_bound(dtype: DType) -> f64 {
    1e-6 + if dtype == DType::Bf16 { 1.0 / 256.0 } else { 0.0 }
}

/// `x * rsqrt(mean(x^2) + eps) * weight(w)` of one row.
fn normed(x: &[f32], w: &[f32], weight: fn(f64) -> f64) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = (mean + f64::from(EPS)).sqrt().recip();
    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * scale * weight(f64::from(w))).collect()
}

fn gate_of(gate: Gate, z: f32) -> f64 {
    let z = f64::from(z);
    let sigmoid = 1.0 / (1.0 + (-z).exp());
    match gate {
        Gate::Silu => z * sigmoid,
        Gate::Sigmoid => sigmoid,
    }
}

#[test]
fn every_case_equals_its_closed_form() {
    for Case { name, kind, rows, heads, width, dtype } in cases() {
        // The closed form's rows are independent: a few of a large case are enough.
        let rows = rows.min(9);
        let rig = Rig::cpu(numerics(dtype, DType::F32));
        let cx = rig.cx();
        let mut rng = rng(3);
        let cols = heads * width;
        let x = random(&mut rng, dtype, rows * cols, 2.0);
        let other = random(&mut rng, dtype, rows * cols, 2.0);
        let w = random(&mut rng, DType::F32, width, 0.5);
        let xt = tensor(&cx, dtype, &[rows, cols], &x);
        let wt = tensor(&cx, DType::F32, &[width], &w);
        let sum: Vec<f32> = x.iter().zip(&other).map(|(a, b)| round(dtype, a + b)).collect();
        let by_row = |x: &[f32]| x.chunks_exact(width).flat_map(|r| normed(r, &w, |w| 1.0 + w)).collect::<Vec<_>>();
        match kind {
            Kind::Rms => {
                let y = rms(&cx, &xt, &wt, EPS, "y").unwrap();
                assert_close(name, &values(&y), &by_row(&x), 1e-7, relative_bound(dtype));
            }
            Kind::AddRms => {
                let mut residual = xt;
                let delta = tensor(&cx, dtype, &[rows, cols], &other);
                let y = add_rms(&cx, &mut residual, &delta, &wt, EPS, "y").unwrap();
                assert_eq!(values(&residual), sum, "{name}: the residual is the rounded sum");
                // The norm is of the stored sum, so its only error is its own.
                assert_close(name, &values(&y), &by_row(&sum), 1e-7, relative_bound(dtype));
            }
            // Against the two ops they stand for, which have oracles of their own.
            Kind::RmsFp8 | Kind::AddRmsFp8 => {
                let mut residual = xt;
                let q = if kind == Kind::RmsFp8 {
                    rms_fp8(&cx, &residual, &wt, EPS).unwrap()
                } else {
                    let delta = tensor(&cx, dtype, &[rows, cols], &other);
                    let q = add_rms_fp8(&cx, &mut residual, &delta, &wt, EPS).unwrap();
                    assert_eq!(values(&residual), sum, "{name}: the residual is the rounded sum");
                    q
                };
                let y = rms(&cx, &residual, &wt, EPS, "y").unwrap();
                let want = quantise(&cx, y.view(), Form::Fp8Token).unwrap();
                assert_eq!(q.form, want.form);
                assert!(bytes(&q.codes) == bytes(&want.codes), "{name}: codes");
                assert_eq!(values(&q.scales.unwrap()), values(&want.scales.unwrap()), "{name}");
            }
            Kind::Add => {
                let mut residual = xt;
                add(&cx, &mut residual, &tensor(&cx, dtype, &[rows, cols], &other)).unwrap();
                assert_eq!(values(&residual), sum, "{name}");
            }
            Kind::Gated(gate) => {
                // z is columns of a wider row, as in the fused projection.
                let fused: Vec<f32> =
                    other.chunks_exact(cols).flat_map(|z| [&[9.0, -9.0][..], z, &[9.0]].concat()).collect();
                let fused = tensor(&cx, dtype, &[rows, cols + 3], &fused);
                let y = gated(&cx, &xt, fused.columns(2, cols), &wt, EPS, gate).unwrap();
                let norms: Vec<f64> = x.chunks_exact(width).flat_map(|r| normed(r, &w, |w| w)).collect();
                let expected: Vec<f64> = norms.iter().zip(&other).map(|(n, &z)| n * gate_of(gate, z)).collect();
                // In bf16 the norm is rounded before the gate: one more half unit.
                let bound = relative_bound(dtype) + if dtype == DType::Bf16 { 1.0 / 256.0 } else { 0.0 };
                assert_close(name, &values(&y), &expected, 1e-7, bound);
            }
        }
    }
}

#[test]
fn the_gated_norm_rounds_before_the_gate() {
    // In bf16 the rounded norm times the gate, rounded again, is not the product rounded once: find where they differ.
    let rig = Rig::cpu(Numerics::BF16);
    let cx = rig.cx();
    let mut rng = rng(5);
    let [x, z] = [(); 2].map(|()| random(&mut rng, DType::Bf16, 64 * 16, 1.0));
    let w = random(&mut rng, DType::F32, 16, 1.0);
    let [xt, zt] = [&x, &z].map(|v| tensor(&cx, DType::Bf16, &[64, 16], v));
    let y = gated(&cx, &xt, zt.view(), &tensor(&cx, DType::F32, &[16], &w), EPS, Gate::Silu).unwrap();
    let norms: Vec<f64> = x.chunks_exact(16).flat_map(|r| normed(r, &w, |w| w)).collect();
    let at = |f: &dyn Fn(f64, f64) -> f64| -> usize {
        let expected = norms.iter().zip(&z).map(|(&n, &z)| round(DType::Bf16, f(n, gate_of(Gate::Silu, z)) as f32));
        expected.zip(values(&y)).filter(|(e, y)| e.to_bits() == y.to_bits()).count()
    };
    let twice = at(&|n, gate| f64::from(round(DType::Bf16, n as f32)) * gate);
    let once = at(&|n, gate| n * gate);
    assert!(twice >= 1020 && once < 900, "of 1024 values {twice} as rounded twice, {once} as rounded once");
}

#[test]
fn equals_transformers() {
    let fixture = Fixture::load("gdn_ops/ops.safetensors");
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let get = |name: &str, shape: &[usize]| tensor(&cx, DType::F32, shape, &fixture.f32(name));
    let y = rms(&cx, &get("norm/x", &[5, 32]), &get("norm/w", &[32]), EPS, "y").unwrap();
    assert_close("norm", &values(&y), &fixture.f64("norm/out"), 1e-5, 0.0);
    let (x, z, w) = (get("gated_norm/x", &[5, 32]), get("gated_norm/gate", &[5, 32]), get("gated_norm/w", &[32]));
    let y = gated(&cx, &x, z.view(), &w, EPS, Gate::Silu).unwrap();
    assert_close("gated norm", &values(&y), &fixture.f64("gated_norm/out"), 1e-5, 0.0);
}

#[test]
fn a_row_of_a_batch_is_the_row_alone() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let x = random(&mut rng(1), DType::F32, 300 * 77, 1.0);
    let w = tensor(&cx, DType::F32, &[77], &random(&mut rng(2), DType::F32, 77, 1.0));
    let all = values(&rms(&cx, &tensor(&cx, DType::F32, &[300, 77], &x), &w, EPS, "y").unwrap());
    for row in [0, 1, 150, 299] {
        let alone = tensor(&cx, DType::F32, &[1, 77], &x[row * 77..][..77]);
        assert_eq!(values(&rms(&cx, &alone, &w, EPS, "y").unwrap()), all[row * 77..][..77]);
    }
}

#[test]
fn zero_rows_stay_zero_and_large_ones_do_not_overflow_early() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let w = tensor(&cx, DType::F32, &[8], &[0.0; 8]);
    let zero = tensor(&cx, DType::F32, &[1, 8], &[0.0; 8]);
    assert_eq!(values(&rms(&cx, &zero, &w, EPS, "y").unwrap()), [0.0; 8]);
    let large = tensor(&cx, DType::F32, &[1, 8], &[1e18; 8]);
    assert_close("1e18", &values(&rms(&cx, &large, &w, EPS, "y").unwrap()), &[1.0; 8], 1e-6, 0.0);
}

#[test]
fn plan_and_cpu_allocate_the_same_and_the_meter_agrees_with_the_cost() {
    for case in cases() {
        assert_plan_counts_the_same(case.name, numerics(case.dtype, DType::F32), |rig| {
            let cx = rig.cx();
            let (rows, cols) = (case.rows, case.heads * case.width);
            let act = |name| cx.activation("test", name, &[rows, cols]).unwrap();
            let (mut x, other, w) = (act("x"), act("other"), empty(&cx, DType::F32, &[case.width]));
            let (op, y) = match case.kind {
                Kind::Rms => ("rms", Some(rms(&cx, &x, &w, EPS, "y").unwrap())),
                Kind::AddRms => ("add_rms", Some(add_rms(&cx, &mut x, &other, &w, EPS, "y").unwrap())),
                Kind::Add => {
                    add(&cx, &mut x, &other).unwrap();
                    ("add", None)
                }
                Kind::RmsFp8 | Kind::AddRmsFp8 => {
                    let (op, q) = if case.kind == Kind::RmsFp8 {
                        ("rms_fp8", rms_fp8(&cx, &x, &w, EPS).unwrap())
                    } else {
                        ("add_rms_fp8", add_rms_fp8(&cx, &mut x, &other, &w, EPS).unwrap())
                    };
                    assert_eq!((q.codes.shape(), q.scales.unwrap().shape()), (&[rows, cols][..], &[rows, 1][..]));
                    (op, None)
                }
                Kind::Gated(gate) => ("gated_norm", Some(gated(&cx, &x, other.view(), &w, EPS, gate).unwrap())),
            };
            assert!(y.is_none_or(|y| y.shape() == [rows, cols] && y.dtype() == case.dtype));
            let metered = rig.meter.take();
            assert_eq!((metered.len(), metered[0].op), (1, op));
            assert_eq!(metered[0].cost, cost(case.kind, rows, case.heads, case.width, case.dtype));
        });
    }
}

#[test]
fn operands_that_disagree_are_named() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let f32s = |shape: &[usize]| tensor(&cx, DType::F32, shape, &vec![0.5; shape.iter().product()]);
    let (mut x, w) = (f32s(&[2, 6]), f32s(&[6]));
    assert_shape_error(rms(&cx, &x, &f32s(&[5]), EPS, "y"), "rms", &["w is", "[5]", "[6]"]);
    assert_shape_error(rms(&cx, &f32s(&[12]), &w, EPS, "y"), "rms", &["x is [12]"]);
    assert_shape_error(rms(&cx, &f32s(&[0, 6]), &w, EPS, "y"), "rms", &["[0, 6]", "not empty"]);
    assert_shape_error(rms(&cx, &x, &w, f32::NAN, "y"), "rms", &["eps is NaN"]);
    assert_shape_error(rms(&cx, &x, &w, -1.0, "y"), "rms", &["eps is -1"]);
    let bf16 = empty(&cx, DType::Bf16, &[2, 6]);
    assert_shape_error(rms(&cx, &bf16, &w, EPS, "y"), "rms", &["x is bf16", "must be f32"]);
    let narrow = f32s(&[2, 5]);
    assert_shape_error(add_rms(&cx, &mut x, &narrow, &w, EPS, "y"), "add_rms", &["delta", "[2, 5]", "[2, 6]"]);
    assert_shape_error(rms_fp8(&cx, &x, &f32s(&[5]), EPS), "rms_fp8", &["w is", "[5]", "[6]"]);
    assert_shape_error(rms_fp8(&cx, &bf16, &w, EPS), "rms_fp8", &["x is bf16", "must be f32"]);
    assert_shape_error(add_rms_fp8(&cx, &mut x, &narrow, &w, EPS), "add_rms_fp8", &["delta", "[2, 5]", "[2, 6]"]);
    assert_shape_error(add_rms_fp8(&cx, &mut x, &f32s(&[2, 6]), &w, -1.0), "add_rms_fp8", &["eps is -1"]);
    assert_shape_error(add(&cx, &mut x, &narrow), "add", &["delta", "[2, 5]", "[2, 6]"]);
    let gated = |z: &highwater::tensor::Tensor, from, cols, w: &highwater::tensor::Tensor, parts: &[&str]| {
        assert_shape_error(gated(&cx, &f32s(&[2, 6]), z.columns(from, cols), w, EPS, Gate::Silu), "gated_norm", parts);
    };
    gated(&f32s(&[2, 9]), 4, 6, &f32s(&[3]), &["z is", "from column 4 of 9"]);
    gated(&f32s(&[2, 6]), 0, 5, &f32s(&[3]), &["z is", "[2, 5]", "[2, 6]"]);
    gated(&f32s(&[2, 6]), 0, 6, &f32s(&[4]), &["[4]", "divisor of 6"]);
    gated(&f32s(&[2, 6]), 0, 6, &f32s(&[0]), &["[0]"]);
}
