//! Norms: the sum of squares is taken in another order than the CPU arm's, everything else is per element.

use highwater::num::DType;
use highwater::ops::norm::{Case, Gate, Kind, add, add_rms, add_rms_fp8, cases, gated, rms, rms_fp8};
use highwater::ops::quantise::{Form, Quantised, quantise};
use highwater::tensor::Tensor;

use super::{Pair, assert_same};
use crate::ops::{Rig, bytes, numerics, random, rng, tensor, values};

const EPS: f32 = 1e-6;

/// Asserts that values agree to `relative` plus `absolute` where they are f32. As bf16 each must be at most `steps`
/// neighbours away, and at most 1% may differ at all: an error of 1e-5 relative crosses a midpoint between neighbours, at
/// least 2^-8 apart, that rarely.
#[track_caller]
pub(super) fn assert_rounded(
    what: &str,
    dtype: DType,
    cuda: &[f32],
    cpu: &[f32],
    relative: f64,
    absolute: f64,
    steps: f64,
) {
    assert_eq!(cuda.len(), cpu.len(), "{what}");
    let relative = if dtype == DType::Bf16 { steps / 128.0 } else { relative };
    let mut differing = 0;
    for (i, (&a, &b)) in cuda.iter().zip(cpu).enumerate() {
        if a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) {
            continue;
        }
        differing += 1;
        let off = (f64::from(a) - f64::from(b)).abs();
        assert!(
            off <= relative * f64::from(b.abs()) + absolute,
            "{what}: element {i} is {a:e} for {b:e}, off by {off:e}"
        );
    }
    if dtype == DType::Bf16 {
        assert!(differing <= cpu.len() / 100 + 2, "{what}: {differing} of {} differ", cpu.len());
    }
}

/// A lane of the CPU arm adds width / 16 squares, each with a rounding of half a unit in the last place, and the errors of
/// such a chain grow like the root of its length; the other arm's sums are shorter. The root halves them, and the few
/// products after it add one unit each.
fn relative(width: usize) -> f64 {
    2f64.powi(-23) * (4.0 + (width as f64 / 16.0).sqrt())
}

/// A fused norm is the norm and the quantisation of the same arm, whose own tests hold them to the CPU's.
#[track_caller]
fn is_rms_then_quantise(what: &str, rig: &Rig, fused: &Quantised, x: &Tensor, w: &Tensor) {
    let y = rms(&rig.cx(), x, w, EPS, "y").unwrap();
    let apart = quantise(&rig.cx(), y.view(), Form::Fp8Token).unwrap();
    assert_eq!(fused.form, apart.form);
    assert_same(&format!("{what}: codes"), &bytes(&fused.codes), &bytes(&apart.codes));
    let scales = |q: &Quantised| bytes(q.scales.as_ref().unwrap());
    assert_same(&format!("{what}: scales"), &scales(fused), &scales(&apart));
}

fn awkward() -> Vec<Case> {
    let case = |name, kind, rows, heads, width, dtype| Case { name, kind, rows, heads, width, dtype };
    let silu = Kind::Gated(Gate::Silu);
    let sigmoid = Kind::Gated(Gate::Sigmoid);
    vec![
        case("more runs than are held", Kind::Rms, 3, 1, 2 * 1024 * 8 + 24, DType::Bf16),
        case("more runs than are held", Kind::AddRms, 2, 1, 2 * 1024 * 4 + 8, DType::F32),
        case("wide and odd", Kind::AddRms, 2, 1, 20_001, DType::Bf16),
        case("more runs than are held", Kind::AddRmsFp8, 2, 1, 2 * 1024 * 8 + 40, DType::Bf16),
        case("more runs than are held", Kind::RmsFp8, 2, 1, 2 * 1024 * 4 + 8, DType::F32),
        case("wide and odd", Kind::AddRmsFp8, 2, 1, 9001, DType::Bf16),
        case("9b", Kind::RmsFp8, 5, 1, 4096, DType::Bf16),
        case("eight", Kind::Rms, 70, 1, 8, DType::Bf16),
        case("hundred", Kind::AddRms, 9, 1, 100, DType::F32),
        case("add of whole runs but the last", Kind::Add, 1, 1, 8 * 300 + 5, DType::Bf16),
        case("heads of more runs than are held", silu, 3, 2, 1024, DType::Bf16),
        case("heads of more runs than are held", sigmoid, 3, 2, 384, DType::F32),
        case("heads of one lane", silu, 5, 9, 1, DType::F32),
        case("heads of one run", sigmoid, 33, 5, 8, DType::Bf16),
        case("9b", silu, 3, 32, 128, DType::Bf16),
        case("f32", silu, 3, 16, 128, DType::F32),
    ]
}

#[test]
fn every_case_equals_the_cpu_arm() {
    for (seed, Case { name, kind, rows, heads, width, dtype }) in cases().into_iter().chain(awkward()).enumerate() {
        let what = format!("{name}: {kind:?} [{rows}, {heads} x {width}] {dtype}");
        let cols = heads * width;
        let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), (rows * cols) as u64) else { continue };
        let mut rng = rng(seed as u64);
        let mut x = random(&mut rng, dtype, rows * cols, 2.0);
        // The largest of a row is its last, which no thread holds where there are too many runs.
        x.chunks_mut(cols).for_each(|row| row[cols - 1] = 24.0);
        let other = random(&mut rng, dtype, rows * cols, 2.0);
        let w = random(&mut rng, DType::F32, width, 0.5);
        // (the result, the residual)
        let (cuda, cpu) = {
            let (cpu, cuda) = pair.run(|rig| {
                let cx = rig.cx();
                let mut xt = tensor(&cx, dtype, &[rows, cols], &x);
                let ot = tensor(&cx, dtype, &[rows, cols], &other);
                let wt = tensor(&cx, DType::F32, &[width], &w);
                let y = match kind {
                    Kind::Rms => Some(rms(&cx, &xt, &wt, EPS, "y").unwrap()),
                    Kind::AddRms => Some(add_rms(&cx, &mut xt, &ot, &wt, EPS, "y").unwrap()),
                    Kind::RmsFp8 | Kind::AddRmsFp8 => {
                        let q = match kind {
                            Kind::RmsFp8 => rms_fp8(&cx, &xt, &wt, EPS).unwrap(),
                            _ => add_rms_fp8(&cx, &mut xt, &ot, &wt, EPS).unwrap(),
                        };
                        is_rms_then_quantise(&what, rig, &q, &xt, &wt);
                        None
                    }
                    Kind::Add => {
                        add(&cx, &mut xt, &ot).unwrap();
                        None
                    }
                    Kind::Gated(gate) => Some(gated(&cx, &xt, ot.view(), &wt, EPS, gate).unwrap()),
                };
                (y.map(|y| values(&y)), values(&xt))
            });
            (cuda, cpu)
        };
        assert_same(&format!("{what}: residual"), &cuda.1, &cpu.1);
        if let (Some(cuda), Some(cpu)) = (cuda.0, cpu.0) {
            // The gated norm rounds twice, and the gate has two or three units of its own.
            let (extra, steps) = if matches!(kind, Kind::Gated(_)) { (1e-6, 2.0) } else { (0.0, 1.0) };
            assert_rounded(&what, dtype, &cuda, &cpu, relative(width) + extra, 1e-30, steps);
        }
    }
}

/// z as columns of a wider tensor, at an offset and a pitch that are and are not whole runs.
#[test]
fn the_gate_may_be_columns_of_a_wider_tensor() {
    for dtype in [DType::F32, DType::Bf16] {
        for (from, extra) in [(256, 0), (8, 8), (3, 0), (0, 1), (2, 6)] {
            let (rows, heads, width) = (7, 4, 128);
            let what = format!("{dtype} from {from} with {extra} more");
            let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), 10_000) else { continue };
            let (cols, pitch) = (heads * width, from + heads * width + extra);
            let mut rng = rng(from as u64);
            let o = random(&mut rng, dtype, rows * cols, 1.0);
            let fused = random(&mut rng, dtype, rows * pitch, 3.0);
            let w = random(&mut rng, DType::F32, width, 1.0);
            let (cpu, cuda) = pair.run(|rig| {
                let cx = rig.cx();
                let [ot, fused] = [(cols, &o), (pitch, &fused)].map(|(cols, v)| tensor(&cx, dtype, &[rows, cols], v));
                let wt = tensor(&cx, DType::F32, &[width], &w);
                values(&gated(&cx, &ot, fused.columns(from, cols), &wt, EPS, Gate::Silu).unwrap())
            });
            assert_rounded(&what, dtype, &cuda, &cpu, relative(width) + 1e-6, 1e-30, 2.0);
        }
    }
}

#[test]
fn a_row_is_the_same_alone_and_in_any_batch() {
    for dtype in [DType::F32, DType::Bf16] {
        let (rows, width) = (5, 1000);
        let Some(pair) = Pair::new("rows", numerics(dtype, DType::F32), 10_000) else { continue };
        let x = random(&mut rng(1), dtype, rows * width, 2.0);
        let w = random(&mut rng(2), DType::F32, width, 0.5);
        let cx = pair.cuda.cx();
        let wt = tensor(&cx, DType::F32, &[width], &w);
        let run = |x: &[f32]| {
            let xt = tensor(&cx, dtype, &[x.len() / width, width], x);
            values(&rms(&cx, &xt, &wt, EPS, "y").unwrap())
        };
        let all = run(&x);
        for (row, y) in x.chunks(width).zip(all.chunks(width)) {
            assert_same("row", &run(row), y);
        }
    }
}
