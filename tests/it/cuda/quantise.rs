//! Quantised rows: the CPU arm's codes and scales, bit for bit. NaN is compared as NaN: which of its bits a division
//! leaves is the processor's own affair.

use highwater::num::{DType, fp8};
use highwater::ops::Numerics;
use highwater::ops::quantise::{Form, Quantised, cases, quantise, widened};
use highwater::ops::scheme::Global;

use super::{Pair, assert_same};
use crate::ops::{Rig, bytes, numerics, random, rng, tensor, values};

fn forms(cols: usize) -> Vec<Form> {
    let mut forms = vec![Form::Fp8Tensor(2.0 / 448.0), Form::Fp8Tensor(0.001_3), Form::Fp8Token, Form::Fp8Group];
    if cols.is_multiple_of(16) {
        forms.extend([
            Form::Nvfp4(2688.0 / 2.0, Global::Divides),
            Form::Nvfp4(7777.7, Global::Divides),
            Form::Nvfp4(2.0 / 2688.0, Global::Multiplies),
            Form::Nvfp4(0.000_123, Global::Multiplies),
        ]);
    }
    forms
}

/// Rows of every size a model has: ordinary, tiny, of one outlier, zero, and of exact multiples of a quarter, whose
/// quotients are often midpoints.
fn rows(seed: u64, dtype: DType, tokens: usize, cols: usize) -> Vec<f32> {
    let mut x = random(&mut rng(seed), dtype, tokens * cols, 2.0);
    for (t, row) in x.chunks_mut(cols).enumerate() {
        match t % 6 {
            1 => row.iter_mut().for_each(|v| *v *= 1e-4),
            2 => row[0] = 300.0,
            3 => row.fill(0.0),
            4 => {
                row.iter_mut().for_each(|v| *v = (*v * 4.0).round() / 4.0);
                row[0] = 448.0;
            }
            5 => row.iter_mut().for_each(|v| *v *= 1e-39),
            _ => {}
        }
    }
    x
}

/// Codes and scales, with one pattern for NaN, and no codes under an NVFP4 scale that is NaN: they have no value.
fn plain(q: &Quantised) -> (Vec<u8>, Vec<u32>) {
    let mut codes = bytes(&q.codes);
    let fp8 = |code: u8| if code & 0x7F == 0x7F { 0x7F } else { code };
    let scales = match (&q.scales, q.form) {
        (None, _) => Vec::new(),
        (Some(scales), Form::Nvfp4(..)) => {
            let scales: Vec<u8> = bytes(scales).into_iter().map(fp8).collect();
            for (codes, &scale) in codes.chunks_mut(8).zip(&scales) {
                if scale == 0x7F {
                    codes.fill(0);
                }
            }
            scales.into_iter().map(u32::from).collect()
        }
        (Some(scales), _) => {
            values(scales).into_iter().map(|s| if s.is_nan() { u32::MAX } else { s.to_bits() }).collect()
        }
    };
    if !matches!(q.form, Form::Nvfp4(..)) {
        codes.iter_mut().for_each(|code| *code = fp8(*code));
    }
    (codes, scales)
}

#[track_caller]
fn same(what: &str, pair: &Pair, run: impl Fn(&Rig) -> Quantised) {
    let (cpu, cuda) = pair.run(|rig| plain(&run(rig)));
    assert_same(&format!("{what}: scales"), &cuda.1, &cpu.1);
    assert_same(&format!("{what}: codes"), &cuda.0, &cpu.0);
}

#[test]
fn every_case_is_the_cpu_arms_bits() {
    let shapes = cases().into_iter().map(|c| (c.tokens, c.cols, c.x));
    let awkward = [(7, 37, DType::Bf16), (7, 300, DType::F32), (6, 20_480, DType::Bf16), (6, 136, DType::Bf16)];
    for (seed, (tokens, cols, dtype)) in shapes.chain(awkward).enumerate() {
        for form in forms(cols) {
            let what = format!("[{tokens}, {cols}] {dtype} {form:?}");
            let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), (tokens * cols) as u64) else { continue };
            let x = rows(seed as u64, dtype, tokens, cols);
            same(&what, &pair, |rig| {
                quantise(&rig.cx(), tensor(&rig.cx(), dtype, &[tokens, cols], &x).view(), form).unwrap()
            });
        }
    }
}

#[test]
fn columns_of_a_wider_tensor_are_the_cpu_arms_bits() {
    for dtype in [DType::F32, DType::Bf16] {
        for (from, extra) in [(3, 1), (8, 0), (16, 8), (0, 5)] {
            for form in forms(272) {
                let what = format!("{dtype} from {from} with {extra} more, {form:?}");
                let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), 10_000) else { continue };
                let pitch = from + 272 + extra;
                let x = rows(5, dtype, 13, pitch);
                same(&what, &pair, |rig| {
                    let x = tensor(&rig.cx(), dtype, &[13, pitch], &x);
                    quantise(&rig.cx(), x.columns(from, 272), form).unwrap()
                });
            }
        }
    }
}

#[test]
fn widened_rows_are_the_cpu_arms_bits() {
    for (seed, case) in cases().into_iter().enumerate() {
        for form in forms(case.cols).into_iter().filter(|form| matches!(form, Form::Nvfp4(..))) {
            let what = format!("{} {form:?}", case.name);
            let work = (case.tokens * case.cols) as u64;
            let Some(pair) = Pair::new(&what, numerics(case.x, DType::F32), work) else { continue };
            let pitch = case.cols + 8 * (seed % 2);
            let mut x = rows(seed as u64, case.x, case.tokens, pitch);
            x[case.cols / 2] = f32::NAN;
            let (cpu, cuda) = pair.run(|rig| {
                let x = tensor(&rig.cx(), case.x, &[case.tokens, pitch], &x);
                let q = widened(&rig.cx(), x.columns(0, case.cols), form).unwrap();
                values(&q.codes)
                    .into_iter()
                    .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
                    .collect::<Vec<_>>()
            });
            assert_same(&what, &cuda, &cpu);
        }
    }
}

/// `v` and its two neighbours.
fn beside(v: f32) -> [f32; 3] {
    [f32::from_bits(v.to_bits() - 1), v, f32::from_bits(v.to_bits() + 1)]
}

/// Where one rounding too many, or another order of operations, moves a code: quotients and scales beside the midpoints
/// between codes.
#[test]
fn quotients_beside_midpoints_are_the_cpu_arms_bits() {
    let e4m3 = |code: u8| fp8::decode(code);
    for form in forms(16) {
        let mut x = Vec::new();
        if let Form::Nvfp4(global, sense) = form {
            // A group for each scale: its largest value beside where the scale's code turns, the others beside where
            // their own codes turn under the scale that is stored then.
            for code in 0x08..0x7E {
                let middle = f32::midpoint(e4m3(code), e4m3(code + 1));
                let amax = if sense == Global::Divides { middle / global * 6.0 } else { middle * (6.0 * global) };
                for largest in beside(amax) {
                    let s = if sense == Global::Divides { e4m3(code) / global } else { e4m3(code) * global };
                    x.push(largest);
                    x.extend([0.25f32, 0.75, 1.25, 1.75, 2.5].map(|m| beside(m * s)).concat());
                }
            }
        } else {
            let scale = if let Form::Fp8Tensor(scale) = form { scale } else { 0.731 / 448.0 };
            let mut midpoints = (0x10..0x7E).flat_map(|code| beside(f32::midpoint(e4m3(code), e4m3(code + 1)) * scale));
            // Rows of 16 whose largest value, 448 scales, decides nothing but the scale.
            while let Some(first) = midpoints.next() {
                x.extend([448.0 * scale, first]);
                x.extend(midpoints.by_ref().take(14));
                x.resize(x.len().next_multiple_of(16), 0.0);
            }
        }
        let tokens = x.len() / 16;
        let what = format!("{form:?}");
        let Some(pair) = Pair::new(&what, Numerics::F32, x.len() as u64) else { return };
        same(&what, &pair, |rig| {
            quantise(&rig.cx(), tensor(&rig.cx(), DType::F32, &[tokens, 16], &x).view(), form).unwrap()
        });
    }
}

#[test]
fn nan_and_infinity_are_the_cpu_arms() {
    for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = rows(6, DType::F32, 5, 160);
        for t in 0..4 {
            x[t * 160 + 37 * t] = value;
        }
        for form in forms(160) {
            let Some(pair) = Pair::new("not finite", Numerics::F32, 1000) else { return };
            same(&format!("{value} {form:?}"), &pair, |rig| {
                quantise(&rig.cx(), tensor(&rig.cx(), DType::F32, &[5, 160], &x).view(), form).unwrap()
            });
        }
    }
}
