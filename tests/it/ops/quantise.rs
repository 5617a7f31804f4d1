//! Quantised activations against the same arithmetic written here, with codes found by looking at all of them.

use highwater::mem::ALIGN_BYTES;
use highwater::num::DType;
use highwater::ops::quantise::{self, Form, Quantised, cases, cost, quantise, widened_cost};
use highwater::ops::reference::weight::Matrix;
use highwater::ops::scheme::Global;
use highwater::ops::{Meter, Numerics};

use super::weight::{e2m1, e4m3};
use super::world::{blank, cx, device, message, numerics, on_threads, plan, stored, tensor, uniform};
use super::{bytes, rng, values};

/// The value of the code nearest to `v`, ties to the even code, out of the first `codes` of `decode`, which rise.
fn nearest(v: f32, codes: u8, decode: fn(u8) -> f64) -> f32 {
    // Far outside, distances would all round to the same.
    let magnitude = f64::from(v.abs()).min(1e4);
    let distance = |code: u8| (decode(code) - magnitude).abs();
    let mut best = 0;
    for code in 1..codes {
        if distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0) {
            best = code;
        }
    }
    if v < 0.0 { -decode(best) as f32 } else { decode(best) as f32 }
}

pub(super) fn to_e4m3(v: f32) -> f32 {
    nearest(v, 0x7F, e4m3)
}

fn amax(row: &[f32]) -> f32 {
    row.iter().map(|v| v.abs()).fold(0.0, f32::max)
}

/// A row after quantisation, in f32 operations in the peers' order.
pub(super) fn oracle(row: &[f32], form: Form) -> Vec<f32> {
    let by = |row: &[f32], scale: f32| row.iter().map(|v| to_e4m3(v / scale) * scale).collect::<Vec<_>>();
    let dynamic = |row: &[f32]| {
        let scale = amax(row) / 448.0;
        by(row, if scale == 0.0 { 2f32.powi(-23) } else { scale })
    };
    match form {
        Form::Fp8Tensor(scale) => by(row, scale),
        Form::Fp8Token => dynamic(row),
        Form::Fp8Group => row.chunks(128).flat_map(dynamic).collect(),
        Form::Nvfp4(global, sense) => {
            let group = |row: &[f32]| {
                let wanted = match sense {
                    Global::Divides => global * (amax(row) / 6.0),
                    Global::Multiplies => amax(row) / (6.0 * global),
                };
                let scale = to_e4m3(wanted);
                let scale = if scale == 0.0 { 0.125 } else { scale };
                let scale = if sense == Global::Divides { scale / global } else { scale * global };
                row.iter().map(|v| nearest(v / scale, 8, e2m1) * scale).collect::<Vec<_>>()
            };
            row.chunks(16).flat_map(group).collect()
        }
    }
}

/// Every form, with stored scales that saturate some values of -2..2 and that leave room.
fn forms() -> Vec<Form> {
    vec![
        Form::Fp8Tensor(2.0 / 448.0),
        Form::Fp8Tensor(0.001_3),
        Form::Fp8Token,
        Form::Fp8Group,
        Form::Nvfp4(2688.0 / 2.0, Global::Divides),
        Form::Nvfp4(7777.7, Global::Divides),
        Form::Nvfp4(2.0 / 2688.0, Global::Multiplies),
        Form::Nvfp4(0.000_123, Global::Multiplies),
    ]
}

fn widened(x: &Quantised, cols: usize) -> Vec<f32> {
    let mut all = vec![f32::NAN; x.rows() * cols];
    for (r, row) in all.chunks_mut(cols).enumerate() {
        Matrix::quantised(x).unwrap().widen(r, 0, row);
    }
    all
}

/// Rows of every size a model has: ordinary, tiny, of one outlier, zero.
fn rows(seed: u64, tokens: usize, cols: usize) -> Vec<f32> {
    let mut rng = rng(seed);
    let mut x = uniform(&mut rng, tokens * cols, 2.0);
    for (t, row) in x.chunks_mut(cols).enumerate() {
        match t % 4 {
            1 => row.iter_mut().for_each(|v| *v *= 1e-4),
            2 => row[0] = 300.0,
            3 => row.fill(0.0),
            _ => {}
        }
    }
    x
}

#[test]
fn every_value_is_that_of_the_peers_order_of_operations() {
    for (i, case) in cases().into_iter().enumerate() {
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, numerics(case.x));
        let x = rows(i as u64, case.tokens, case.cols);
        let xt = tensor(&device, case.x, &[case.tokens, case.cols], &x);
        for form in forms() {
            let got = widened(&quantise(&cx, xt.view(), form).unwrap(), case.cols);
            for (t, row) in stored(case.x, &x).chunks(case.cols).enumerate() {
                for (c, (got, want)) in got[t * case.cols..].iter().zip(oracle(row, form)).enumerate() {
                    assert_eq!(*got, want, "{} {form:?} [{t}, {c}] of {}", case.name, row[c]);
                }
            }
        }
    }
}

#[test]
fn widened_rows_are_the_codes_times_their_groups_scales() {
    for (i, case) in cases().into_iter().enumerate() {
        for form in forms() {
            let Form::Nvfp4(_, sense) = form else { continue };
            let (device, meter) = (device(), Meter::default());
            let cx = cx(&device, &meter, numerics(case.x));
            let x = tensor(&device, case.x, &[case.tokens, case.cols], &rows(i as u64, case.tokens, case.cols));
            let codes = quantise(&cx, x.view(), form).unwrap();
            let wide = quantise::widened(&cx, x.view(), form).unwrap();
            // Under a global of one nothing else is left.
            let one = Quantised { form: Form::Nvfp4(1.0, sense), ..codes };
            assert_eq!(values(&wide.codes), widened(&one, case.cols), "{} {form:?}", case.name);
        }
    }
}

#[test]
fn quantising_moves_a_value_by_half_a_step_at_most() {
    // Against the input itself, so that oracle and op cannot be wrong together.
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let x = uniform(&mut rng(5), 8 * 256, 2.0);
    let xt = tensor(&device, DType::F32, &[8, 256], &x);
    for (form, group, relative, steps) in [
        (Form::Fp8Token, 256, 1.0 / 16.0, 448.0 * 512.0),
        (Form::Fp8Group, 128, 1.0 / 16.0, 448.0 * 512.0),
        (Form::Fp8Tensor(2.0 / 448.0), 256, 1.0 / 16.0, 448.0 * 512.0),
        // Half of the widest gap, 4 to 6, and what the block's scale lost to its own rounding.
        (Form::Nvfp4(1344.0, Global::Divides), 16, 1.0 / 5.0 + 1.0 / 16.0, 12.0),
        (Form::Nvfp4(1.0 / 1344.0, Global::Multiplies), 16, 1.0 / 5.0 + 1.0 / 16.0, 12.0),
    ] {
        let got = widened(&quantise(&cx, xt.view(), form).unwrap(), 256);
        for (got, x) in got.chunks(group).zip(x.chunks(group)) {
            let largest = f64::from(amax(x));
            for (got, x) in got.iter().zip(x) {
                let error = f64::from((got - x).abs());
                let bound = f64::from(x.abs()) * relative + largest.max(2.0) / steps;
                assert!(error <= bound, "{form:?}: {got} for {x}");
            }
        }
    }
}

#[test]
fn a_row_is_the_same_alone_in_any_batch_on_any_threads_and_out_of_a_wider_tensor() {
    let x = rows(9, 13, 272);
    for form in forms() {
        let run = |rows: std::ops::Range<usize>, threads| {
            on_threads(threads, || {
                let (device, meter) = (device(), Meter::default());
                let wide: Vec<f32> = x[rows.start * 272..rows.end * 272]
                    .chunks(272)
                    .flat_map(|r| [&[9e9; 3], r, &[9e9]].concat())
                    .collect();
                let x = tensor(&device, DType::F32, &[rows.len(), 276], &wide);
                let q = quantise(&cx(&device, &meter, Numerics::F32), x.columns(3, 272), form).unwrap();
                (bytes(&q.codes), q.scales.as_ref().map(bytes))
            })
        };
        let (codes, scales) = run(0..13, 1);
        assert_eq!(run(0..13, 5), (codes.clone(), scales.clone()));
        for t in 0..13 {
            let (row, scale) = run(t..t + 1, 1);
            assert_eq!(row, codes[t * row.len()..][..row.len()], "{form:?} row {t}");
            if let (Some(row), Some(all)) = (scale, &scales) {
                assert_eq!(row, all[t * row.len()..][..row.len()], "{form:?} row {t}");
            }
        }
    }
}

#[test]
fn nan_and_infinity_are_not_lost_and_stay_in_their_row() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let mut x = vec![1.0f32; 3 * 32];
    x[32 + 5] = f32::NAN;
    for form in forms() {
        let xt = tensor(&device, DType::F32, &[3, 32], &x);
        let got = widened(&quantise(&cx, xt.view(), form).unwrap(), 32);
        assert!(got[32..64].iter().any(|v| v.is_nan()), "{form:?}");
        assert!(got[..32].iter().chain(&got[64..]).all(|v| v.is_finite()), "{form:?}");
    }
    x[32 + 5] = f32::INFINITY;
    for form in [Form::Fp8Token, Form::Fp8Group] {
        let xt = tensor(&device, DType::F32, &[3, 32], &x);
        let got = widened(&quantise(&cx, xt.view(), form).unwrap(), 32);
        assert!(got[32..64].iter().any(|v| v.is_nan()), "{form:?}");
        assert!(got[..32].iter().chain(&got[64..]).all(|v| v.is_finite()), "{form:?}");
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_and_count_the_same_cost() {
    for case in cases() {
        for form in forms() {
            let reports = [device(), plan()].map(|device| {
                let meter = Meter::default();
                let x = blank(&device, case.x, &[case.tokens, case.cols]);
                device.begin_step();
                let q = quantise(&cx(&device, &meter, numerics(case.x)), x.view(), form).unwrap();
                assert_eq!(q.form, form);
                (device.report(), meter.take())
            });
            assert_eq!(reports[0], reports[1], "{} {form:?}", case.name);
            assert_eq!(reports[0].1[0].cost, cost(case.tokens, case.cols, case.x, form.scheme()));
            let (t, k) = (case.tokens as u64, case.cols as u64);
            let buffers = match form {
                Form::Fp8Tensor(_) => [t * k, 0],
                Form::Fp8Token => [t * k, 4 * t],
                Form::Fp8Group => [t * k, 4 * t * k.div_ceil(128)],
                Form::Nvfp4(..) => [t * k / 2, t * k / 16],
            };
            let bytes: u64 = buffers.iter().map(|b| b.next_multiple_of(ALIGN_BYTES)).sum();
            assert_eq!(reports[0].0.transient_peak, bytes, "{} {form:?}", case.name);
            let mut owners: Vec<String> = reports[0].0.owners.iter().map(|(owner, _)| owner.to_string()).collect();
            owners.sort();
            let scales = matches!(form, Form::Fp8Tensor(_)).then_some(1).unwrap_or(2);
            assert_eq!(owners, ["attention.quantise.codes", "attention.quantise.scales"][..scales]);
        }
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_for_widened_rows() {
    for case in cases() {
        let reports = [device(), plan()].map(|device| {
            let meter = Meter::default();
            let x = blank(&device, case.x, &[case.tokens, case.cols]);
            device.begin_step();
            let form = Form::Nvfp4(1.0, Global::Divides);
            let _held = quantise::widened(&cx(&device, &meter, numerics(case.x)), x.view(), form).unwrap();
            (device.report(), meter.take())
        });
        assert_eq!(reports[0], reports[1], "{}", case.name);
        assert_eq!(reports[0].1[0].cost, widened_cost(case.tokens, case.cols, case.x));
        let bytes = (2 * case.tokens * case.cols) as u64;
        assert_eq!(reports[0].0.transient_peak, bytes.next_multiple_of(ALIGN_BYTES), "{}", case.name);
    }
}

#[test]
fn what_cannot_be_quantised_is_refused_with_its_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, Numerics::F32);
        let f32s = |shape: &[usize]| blank(&device, DType::F32, shape);
        let x = f32s(&[4, 40]);
        let nvfp4 = Form::Nvfp4(1.0, Global::Divides);
        assert!(message(quantise(&cx, x.view(), nvfp4)).contains("[4, 40]"));
        assert!(quantise(&cx, x.columns(8, 32), nvfp4).is_ok());
        assert!(message(quantise(&cx, x.columns(9, 32), Form::Fp8Token)).contains("column 9 of 40"));
        assert!(message(quantise(&cx, f32s(&[0, 8]).view(), Form::Fp8Token)).contains("[0, 8]"));
        let ints = blank(&device, DType::I32, &[4, 8]);
        assert!(message(quantise(&cx, ints.view(), Form::Fp8Token)).contains("i32"));
        let token = quantise::widened(&cx, f32s(&[4, 32]).view(), Form::Fp8Token);
        assert!(message(token).contains("must be NVFP4"));
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(message(quantise(&cx, x.view(), Form::Fp8Tensor(scale))).contains(&format!("{scale}")));
        }
    }
}
