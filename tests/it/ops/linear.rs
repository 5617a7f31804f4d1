//! `linear` against sums in float64.

use highwater::mem::ALIGN_BYTES;
use highwater::num::DType;
use highwater::ops::linear::{Shape, cases, cost, linear, linear_as};
use highwater::ops::scheme::Scheme;
use highwater::ops::weight::{LinearSpec, Weight};
use highwater::ops::{Meter, Numerics};
use highwater::tensor::Tensor;

use super::world::{blank, card, cx, device, message, numerics, on_threads, plan, stored, tensor, uniform};
use super::{bytes, rng, values};

/// Unit roundoff of f32 and of bf16.
const F32_ROUND: f64 = 1.0 / 16_777_216.0;
const BF16_ROUND: f64 = 1.0 / 256.0;

/// |error| of one element: as many roundings as its longest chain of additions has, plus the product's, times the sum of
/// magnitudes; and the rounding of the store.
fn bound(inputs: usize, magnitude: f64, value: f64, out: DType) -> f64 {
    let chain = (inputs.div_ceil(16) + 4 + 1) as f64;
    let store = if out == DType::Bf16 { BF16_ROUND * value.abs() } else { 0.0 };
    chain * F32_ROUND * magnitude * 1.01 + store + 1e-30
}

fn plain(matrix: Tensor) -> Weight {
    Weight::plain(matrix).unwrap()
}

/// The cases of floats, with the weight's type.
fn float_cases() -> impl Iterator<Item = (&'static str, Shape, DType)> {
    cases().into_iter().filter_map(|case| match case.shape.w.scheme {
        Scheme::Plain(w) => Some((case.name, case.shape, w)),
        _ => None,
    })
}

#[test]
fn every_case_is_within_the_rounding_of_its_longest_chain() {
    for (i, (name, shape, wd)) in float_cases().enumerate() {
        let Shape { tokens, w: LinearSpec { rows: outputs, cols: inputs, .. }, .. } = shape;
        let mut rng = rng(i as u64);
        let (x, w) = (uniform(&mut rng, tokens * inputs, 2.0), uniform(&mut rng, outputs * inputs, 1.0));
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, numerics(shape.x));
        let xt = tensor(&device, shape.x, &[tokens, inputs], &x);
        let wt = plain(tensor(&device, wd, &[outputs, inputs], &w));
        let y = linear_as(&cx, xt.view(), &wt, "y", shape.out).unwrap();
        assert_eq!((y.shape(), y.dtype()), (&[tokens, outputs][..], shape.out));
        let (x, w, y) = (stored(shape.x, &x), stored(wd, &w), values(&y));
        for t in 0..tokens {
            for n in 0..outputs {
                let (mut sum, mut magnitude) = (0.0, 0.0);
                for k in 0..inputs {
                    let product = f64::from(x[t * inputs + k]) * f64::from(w[n * inputs + k]);
                    sum += product;
                    magnitude += product.abs();
                }
                let error = (f64::from(y[t * outputs + n]) - sum).abs();
                let bound = bound(inputs, magnitude, sum, shape.out);
                assert!(
                    error <= bound,
                    "{}: [{t}, {n}] {} for {sum}, off by {error} > {bound}",
                    name,
                    y[t * outputs + n]
                );
            }
        }
    }
}

#[test]
fn a_row_is_the_same_alone_in_any_batch_and_on_any_threads() {
    const INPUTS: usize = 1030;
    const OUTPUTS: usize = 37;
    for (xd, wd) in [(DType::F32, DType::F32), (DType::F32, DType::Bf16), (DType::Bf16, DType::Bf16)] {
        let mut rng = rng(7);
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, numerics(xd));
        let x = uniform(&mut rng, 131 * INPUTS, 1.0);
        let w = plain(tensor(&device, wd, &[OUTPUTS, INPUTS], &uniform(&mut rng, OUTPUTS * INPUTS, 1.0)));
        let run = |rows: std::ops::Range<usize>| {
            let x = tensor(&device, xd, &[rows.len(), INPUTS], &x[rows.start * INPUTS..rows.end * INPUTS]);
            bytes(&linear_as(&cx, x.view(), &w, "y", DType::F32).unwrap())
        };
        let row_bytes = OUTPUTS * 4;
        let alone: Vec<Vec<u8>> = (0..131).map(|t| run(t..t + 1)).collect();
        // Below the packed path, a lone tile and its rests, one row either side of a panel, two panels and a rest.
        for tokens in [2, 3, 4, 5, 6, 7, 63, 64, 65, 131] {
            for (t, row) in run(0..tokens).chunks(row_bytes).enumerate() {
                assert_eq!(row, alone[t], "row {t} of {tokens}");
            }
        }
        for (t, row) in run(60..70).chunks(row_bytes).enumerate() {
            assert_eq!(row, alone[60 + t], "row {t} at another place of the panel");
        }
    }
    let threads = |n| {
        on_threads(n, || {
            let (device, meter) = (device(), Meter::default());
            let mut rng = rng(8);
            let x = tensor(&device, DType::F32, &[70, INPUTS], &uniform(&mut rng, 70 * INPUTS, 1.0));
            let w = plain(tensor(&device, DType::F32, &[OUTPUTS, INPUTS], &uniform(&mut rng, OUTPUTS * INPUTS, 1.0)));
            bytes(&linear(&cx(&device, &meter, Numerics::F32), x.view(), &w, "y").unwrap())
        })
    };
    assert_eq!(threads(1), threads(5));
}

#[test]
fn some_columns_of_a_wider_tensor_are_the_same_as_a_copy_of_them() {
    const TOKENS: usize = 9;
    let mut rng = rng(3);
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::BF16);
    let wide = uniform(&mut rng, TOKENS * 100, 1.0);
    let copy: Vec<f32> = wide.chunks(100).flat_map(|row| row[13..13 + 40].to_vec()).collect();
    let w = plain(tensor(&device, DType::Bf16, &[11, 40], &uniform(&mut rng, 11 * 40, 1.0)));
    let wide = tensor(&device, DType::Bf16, &[TOKENS, 100], &wide);
    let copy = tensor(&device, DType::Bf16, &[TOKENS, 40], &copy);
    let from_view = linear(&cx, wide.columns(13, 40), &w, "y").unwrap();
    assert_eq!(bytes(&from_view), bytes(&linear(&cx, copy.view(), &w, "y").unwrap()));
}

#[test]
fn a_nan_or_infinity_stays_in_its_row() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let mut x = vec![1.0; 6 * 20];
    x[2 * 20 + 19] = f32::NAN;
    x[4 * 20] = f32::INFINITY;
    let (x, w) = (tensor(&device, DType::F32, &[6, 20], &x), plain(tensor(&device, DType::F32, &[3, 20], &[0.5; 60])));
    for (t, row) in values(&linear(&cx, x.view(), &w, "y").unwrap()).chunks(3).enumerate() {
        match t {
            2 => assert!(row.iter().all(|v| v.is_nan()), "{row:?}"),
            4 => assert!(row.iter().all(|v| *v == f32::INFINITY), "{row:?}"),
            _ => assert_eq!(row, [10.0; 3]),
        }
    }
}

#[test]
fn an_infinite_weight_stays_in_its_output() {
    // Two blocks of inputs, the second one not whole: what the first left behind must not be multiplied.
    const INPUTS: usize = 530;
    const OUTPUTS: usize = 17;
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let x = tensor(&device, DType::F32, &[4, INPUTS], &[1.0; 4 * INPUTS]);
    for k in 0..INPUTS {
        let mut w = vec![0.5; OUTPUTS * INPUTS];
        w[k] = f32::INFINITY;
        let w = plain(tensor(&device, DType::F32, &[OUTPUTS, INPUTS], &w));
        for row in values(&linear(&cx, x.view(), &w, "y").unwrap()).chunks(OUTPUTS) {
            assert_eq!(row[0], f32::INFINITY);
            assert_eq!(row[1..], [265.0; OUTPUTS - 1], "weight [0, {k}]");
        }
    }
}

#[test]
fn sums_are_in_the_written_order() {
    const INPUTS: usize = 1030;
    let mut rng = rng(9);
    let (device, meter) = (device(), Meter::default());
    let (x, w) = (uniform(&mut rng, 6 * INPUTS, 1.0), uniform(&mut rng, 3 * INPUTS, 1.0));
    let (xt, wt) =
        (tensor(&device, DType::F32, &[6, INPUTS], &x), plain(tensor(&device, DType::F32, &[3, INPUTS], &w)));
    let y = values(&linear(&cx(&device, &meter, Numerics::F32), xt.view(), &wt, "y").unwrap());
    for (i, &y) in y.iter().enumerate() {
        let mut lanes = [0.0f32; 16];
        for k in 0..INPUTS {
            lanes[k % 16] += x[i / 3 * INPUTS + k] * w[i % 3 * INPUTS + k];
        }
        let eight: [f32; 8] = std::array::from_fn(|l| lanes[l] + lanes[l + 8]);
        let four: [f32; 4] = std::array::from_fn(|l| eight[l] + eight[l + 4]);
        let want = (four[0] + four[2]) + (four[1] + four[3]);
        assert_eq!(y.to_bits(), want.to_bits(), "element {i}");
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_and_count_the_same_cost() {
    for (name, shape, wd) in float_cases() {
        let Shape { tokens, x, w: LinearSpec { rows, cols, .. }, out } = shape;
        let reports = [device(), plan()].map(|device| {
            let meter = Meter::default();
            let (xt, wt) = (blank(&device, x, &[tokens, cols]), plain(blank(&device, wd, &[rows, cols])));
            device.begin_step();
            let y = linear_as(&cx(&device, &meter, numerics(x)), xt.view(), &wt, "y", out).unwrap();
            drop(y);
            (device.report(), meter.take())
        });
        assert_eq!(reports[0], reports[1], "{name}");
        assert_eq!(reports[0].1[0].cost, cost(&card(), &shape).unwrap());
        let bytes = ((tokens * rows) as u64 * out.bytes()).next_multiple_of(ALIGN_BYTES);
        assert_eq!(reports[0].0.transient_peak, bytes, "{name}");
    }
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, Numerics::F32);
        let f32s = |shape: &[usize]| blank(&device, DType::F32, shape);
        let x = f32s(&[4, 8]);
        let inner = message(linear(&cx, x.view(), &plain(f32s(&[5, 9])), "y"));
        assert!(inner.contains("[4, 8]") && inner.contains("[5, 9]"), "{inner}");
        let rank = message(Weight::plain(f32s(&[5, 8, 1])));
        assert!(rank.contains("[5, 8, 1]"), "{rank}");
        let past = message(linear(&cx, x.columns(5, 4), &plain(f32s(&[5, 4])), "y"));
        assert!(past.contains("5..9"), "{past}");
        let w = plain(f32s(&[5, 8]));
        let types = message(linear(&cx, blank(&device, DType::Bf16, &[4, 8]).view(), &w, "y"));
        assert!(types.contains("bf16"), "{types}");
        let ints = message(linear_as(&cx, x.view(), &w, "y", DType::I32));
        assert!(ints.contains("i32"), "{ints}");
        let none = message(linear(&cx, f32s(&[0, 8]).view(), &w, "y"));
        assert!(none.contains("[0, 8]"), "{none}");
        assert!(meter.take().is_empty(), "a refused call is not counted");
    }
}
