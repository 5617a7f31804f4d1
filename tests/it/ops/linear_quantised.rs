//! `linear` and `project` with quantised weights and inputs, against sums in float64.

use highwater::num::DType;
use highwater::ops::cost::Unit;
use highwater::ops::linear::{
    Input, Projection, Shape, cost, linear, linear_as, project, project_input, quantised_cases,
};
use highwater::ops::quantise::{Form, quantise};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{InputScale, LinearSpec, Weight};
use highwater::ops::{ActQuant, Meter, Numerics};

use super::quantise::oracle;
use super::weight::{SCHEMES, Synth};
use super::world::{blank, card, cx, device, message, numerics, on_threads, plan, stored, tensor, uniform};
use super::{bytes, rng, values};

/// Unit roundoff of f32 and of bf16.
const F32_ROUND: f64 = 1.0 / 16_777_216.0;
const BF16_ROUND: f64 = 1.0 / 256.0;

/// The form a weight's input is quantised in.
fn form(synth: &Synth) -> Option<Form> {
    let sense = if synth.spec.scheme == Scheme::Nvfp4(Global::Divides) { Global::Divides } else { Global::Multiplies };
    match synth.spec.act {
        ActScheme::None => None,
        ActScheme::Fp8Tensor => Some(Form::Fp8Tensor(synth.input)),
        ActScheme::Fp8Token => Some(Form::Fp8Token),
        ActScheme::Fp8Group => Some(Form::Fp8Group),
        ActScheme::Nvfp4 => Some(Form::Nvfp4(synth.input, sense)),
    }
}

#[test]
fn every_case_is_within_its_roundings_of_float64() {
    for (i, case) in quantised_cases().into_iter().enumerate() {
        let Shape { tokens, x: xd, w: spec, out } = case.shape;
        let mut rng = rng(i as u64);
        let synth = Synth::new(&mut rng, spec);
        let x = uniform(&mut rng, tokens * spec.cols, 2.0);
        let (device, meter) = (device(), Meter::default());
        let xt = tensor(&device, xd, &[tokens, spec.cols], &x);
        let y = linear_as(&cx(&device, &meter, numerics(xd)), xt.view(), &synth.on(&device), "y", out).unwrap();
        assert_eq!((y.shape(), y.dtype()), (&[tokens, spec.rows][..], out));
        let y = values(&y);
        let w: Vec<f64> =
            (0..spec.rows).flat_map(|n| (0..spec.cols).map(move |k| (n, k))).map(|(n, k)| synth.exact(n, k)).collect();
        for (t, x) in stored(xd, &x).chunks(spec.cols).enumerate() {
            let x = form(&synth).map_or_else(|| x.to_vec(), |form| oracle(x, form));
            for n in 0..spec.rows {
                let products = || x.iter().zip(&w[n * spec.cols..]).map(|(x, w)| f64::from(*x) * w);
                let (sum, magnitude) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                // The longest chain of additions, the product, and the two roundings of the weight.
                let chain = (spec.cols.div_ceil(16) + 4 + 1 + 2) as f64;
                let store = if out == DType::Bf16 { BF16_ROUND * sum.abs() } else { 0.0 };
                let bound = chain * F32_ROUND * magnitude * 1.01 + store + 1e-30;
                let got = f64::from(y[t * spec.rows + n]);
                assert!((got - sum).abs() <= bound, "{} {spec:?} [{t}, {n}]: {got} for {sum}", case.name);
            }
        }
    }
}

#[test]
fn the_written_order_is_that_of_the_widened_weight_as_floats() {
    // Widening inside the product gives the bits of an f32 weight that was widened before.
    for (i, (scheme, _)) in SCHEMES.into_iter().enumerate() {
        let spec = LinearSpec { rows: 150, cols: 1040, scheme, act: ActScheme::None, segment_rows: 75 };
        let mut rng = rng(i as u64);
        let synth = Synth::new(&mut rng, spec);
        let floats: Vec<f32> =
            (0..150).flat_map(|n| (0..1040).map(move |k| (n, k))).map(|(n, k)| synth.written(n, k)).collect();
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, Numerics::F32);
        let floats = Weight::plain(tensor(&device, DType::F32, &[150, 1040], &floats)).unwrap();
        for tokens in [1, 3, 4, 67] {
            let x = tensor(&device, DType::F32, &[tokens, 1040], &uniform(&mut rng, tokens * 1040, 1.0));
            let run = |w: &Weight| bytes(&linear(&cx, x.view(), w, "y").unwrap());
            assert_eq!(run(&synth.on(&device)), run(&floats), "{scheme:?}, {tokens} rows");
        }
    }
}

#[test]
fn a_row_is_the_same_alone_in_any_batch_and_on_any_threads() {
    for (i, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        let spec = LinearSpec { rows: 37, cols: 1040, scheme, act, segment_rows: 37 };
        let x = uniform(&mut rng(50 + i as u64), 70 * 1040, 1.0);
        let run = |rows: std::ops::Range<usize>, threads| {
            on_threads(threads, || {
                let (device, meter) = (device(), Meter::default());
                let w = Synth::new(&mut rng(i as u64), spec).on(&device);
                let x = tensor(&device, DType::Bf16, &[rows.len(), 1040], &x[rows.start * 1040..rows.end * 1040]);
                bytes(&linear(&cx(&device, &meter, Numerics::BF16), x.view(), &w, "y").unwrap())
            })
        };
        let whole = run(0..70, 1);
        assert_eq!(run(0..70, 5), whole);
        for t in [0, 1, 5, 63, 64, 69] {
            assert_eq!(run(t..t + 1, 1), whole[t * 74..][..74], "{scheme:?} row {t}");
        }
        for rows in [0..2, 3..6, 10..15, 5..69] {
            assert_eq!(run(rows.clone(), 2), whole[rows.start * 74..rows.end * 74], "{scheme:?} {rows:?}");
        }
    }
}

#[test]
fn act_quant_off_is_the_weight_without_an_input_scheme() {
    for (i, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        let spec = LinearSpec { rows: 9, cols: 80, scheme, act, segment_rows: 9 };
        let asks = Synth::new(&mut rng(i as u64), spec);
        let silent = Synth { spec: LinearSpec { act: ActScheme::None, ..spec }, ..asks.clone() };
        let x = uniform(&mut rng(90), 5 * 80, 1.0);
        let run = |synth: &Synth, act_quant| {
            let (device, meter) = (device(), Meter::default());
            let cx = cx(&device, &meter, Numerics { act_quant, ..Numerics::F32 });
            let x = tensor(&device, DType::F32, &[5, 80], &x);
            let y = bytes(&linear(&cx, x.view(), &synth.on(&device), "y").unwrap());
            (y, meter.take().iter().map(|m| m.op).collect::<Vec<_>>())
        };
        let off = run(&asks, ActQuant::Off);
        assert_eq!(off, run(&silent, ActQuant::Checkpoint));
        assert_eq!(off.1, ["linear"]);
        let on = run(&asks, ActQuant::Checkpoint);
        assert_eq!(on.1, ["quantise", "linear"]);
        assert_ne!(on.0, off.0, "{scheme:?}: quantising the input must show");
    }
}

/// Parts of one input of 48 columns: two FP8, one of floats, two NVFP4 that share a global, one that does not.
fn parts(seed: u64) -> Vec<Synth> {
    let mut rng = rng(seed);
    let nvfp4 = (Scheme::Nvfp4(Global::Divides), ActScheme::Nvfp4);
    let fp8 = (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token);
    let block = (Scheme::Fp8(Grain::Block), ActScheme::Fp8Group);
    let mut parts: Vec<Synth> = [(20, fp8), (3, fp8), (16, nvfp4), (5, nvfp4), (33, nvfp4), (130, block)]
        .into_iter()
        .map(|(rows, (scheme, act))| {
            Synth::new(&mut rng, LinearSpec { rows, cols: 48, scheme, act, segment_rows: rows })
        })
        .collect();
    parts[3].input = parts[2].input;
    parts
}

#[test]
fn parts_of_a_projection_stand_side_by_side_and_share_a_quantised_input() {
    for (tokens, xd) in [(1, DType::F32), (3, DType::Bf16), (70, DType::Bf16)] {
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, numerics(xd));
        let x = tensor(&device, xd, &[tokens, 48], &uniform(&mut rng(1), tokens * 48, 1.0));
        let weights = || {
            let mut weights: Vec<Weight> = parts(2).iter().map(|part| part.on(&device)).collect();
            let floats = tensor(&device, DType::Bf16, &[7, 48], &uniform(&mut rng(3), 7 * 48, 1.0));
            weights.insert(2, Weight::plain(floats).unwrap());
            weights
        };
        let all = Projection::new(weights()).unwrap();
        assert_eq!((all.rows(), all.cols()), (20 + 3 + 7 + 16 + 5 + 33 + 130, 48));
        let y = project(&cx, x.view(), &all, "y").unwrap();
        assert_eq!((y.shape(), y.dtype()), (&[tokens, all.rows()][..], xd));
        let calls: Vec<_> = meter.take().into_iter().map(|m| (m.op, m.cost.unit, m.calls)).collect();
        // Token, the NVFP4 global of two, that of one, group: four in all for seven parts.
        let quantised: u64 = calls.iter().filter(|c| c.0 == "quantise").map(|c| c.2).sum();
        let products: u64 = calls.iter().filter(|c| c.0 == "linear").map(|c| c.2).sum();
        assert_eq!((quantised, products), (4, 7), "{calls:?}");
        let y = values(&y);
        let mut first = 0;
        for (i, w) in weights().into_iter().enumerate() {
            let alone = values(&linear(&cx, x.view(), &w, "y").unwrap());
            for (t, row) in alone.chunks(w.rows()).enumerate() {
                let columns = &y[t * all.rows() + first..][..w.rows()];
                assert!(columns.iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits()), "part {i}, row {t}");
            }
            first += w.rows();
        }
    }
}

/// What a layer does whose norm gives codes alone: the same bits, from codes that were made before.
#[test]
fn codes_by_token_give_the_bits_that_their_rows_give_and_no_other_codes_are_taken() {
    let mut rng = rng(11);
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, numerics(DType::Bf16));
    let spec = |rows, scheme, act| LinearSpec { rows, cols: 64, scheme, act, segment_rows: rows };
    let mut on = |spec| Synth::new(&mut rng, spec).on(&device);
    let token = ActScheme::Fp8Token;
    let w = Projection::new(vec![
        on(spec(24, Scheme::Fp8(Grain::Channel), token)),
        on(spec(8, Scheme::Fp8(Grain::Channel), token)),
    ])
    .unwrap();
    let mixed = Projection::new(vec![
        on(spec(24, Scheme::Fp8(Grain::Channel), token)),
        on(spec(8, Scheme::Fp8(Grain::Channel), ActScheme::None)),
    ])
    .unwrap();
    assert!(w.takes_token_codes(&cx).unwrap() && !mixed.takes_token_codes(&cx).unwrap());
    let x = tensor(&device, DType::Bf16, &[5, 64], &uniform(&mut super::rng(12), 5 * 64, 2.0));
    let of = |form| Input::Codes(quantise(&cx, x.view(), form).unwrap());
    let rows = project(&cx, x.view(), &w, "y").unwrap();
    assert_eq!(bytes(&project_input(&cx, &of(Form::Fp8Token), &w, "y").unwrap()), bytes(&rows));
    for (x, w) in [(of(Form::Fp8Group), &w), (of(Form::Fp8Token), &mixed)] {
        assert!(message(project_input(&cx, &x, w, "y")).contains("must be codes by token for both"));
    }
}

#[test]
fn fused_parts_keep_their_own_row_scales() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let x = tensor(&device, DType::F32, &[5, 304], &uniform(&mut rng(4), 5 * 304, 1.0));
    for (i, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        // Equal parts of 130 rows, so that FP8 blocks fuse too; every row has a scale of its own.
        let spec = LinearSpec { rows: 390, cols: 304, scheme, act, segment_rows: 130 };
        let fused = Synth::new(&mut rng(i as u64), spec);
        let apart = [0, 130, 260].map(|first| fused.slice(first, 130).on(&device));
        let fused = bytes(&linear(&cx, x.view(), &fused.on(&device), "y").unwrap());
        let apart = bytes(&project(&cx, x.view(), &Projection::new(apart.into()).unwrap(), "y").unwrap());
        assert_eq!(fused, apart, "{scheme:?}");
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_and_count_the_same_cost() {
    for (i, case) in quantised_cases().into_iter().enumerate() {
        let Shape { tokens, x, w, out } = case.shape;
        let synth = Synth::new(&mut rng(i as u64), w);
        let reports = [device(), plan()].map(|device| {
            let meter = Meter::default();
            let (xt, wt) = (blank(&device, x, &[tokens, w.cols]), synth.on(&device));
            device.begin_step();
            let y = linear_as(&cx(&device, &meter, numerics(x)), xt.view(), &wt, "y", out).unwrap();
            drop(y);
            (device.report(), meter.take())
        });
        assert_eq!(reports[0], reports[1], "{}", case.name);
        let noted = reports[0].1.last().unwrap();
        assert_eq!((noted.op, noted.cost), ("linear", cost(&card(), &case.shape).unwrap()));
        let (t, n, k) = (tokens as u64, w.rows as u64, w.cols as u64);
        let codes = if matches!(w.scheme, Scheme::Nvfp4(_)) { n * k / 2 } else { n * k };
        assert!(noted.cost.resident_bytes >= codes && noted.cost.flops == 2 * t * n * k);
        let unit = match (w.act, x) {
            (ActScheme::Fp8Tensor | ActScheme::Fp8Token | ActScheme::Fp8Group, _) => Unit::Fp8,
            (ActScheme::None, DType::F32) => Unit::F32,
            _ => Unit::Bf16,
        };
        assert_eq!(noted.cost.unit, unit, "{} {:?}", case.name, w.act);
    }
    let device = plan();
    let meter = Meter::default();
    let p = Projection::new(parts(2).iter().map(|part| part.on(&device)).collect()).unwrap();
    let x = blank(&device, DType::Bf16, &[9, 48]);
    device.begin_step();
    drop(project(&cx(&device, &meter, Numerics::BF16), x.view(), &p, "y").unwrap());
    // The result, and one quantised input at a time: 9 x 48 codes and 9 scales at most.
    assert_eq!(device.report().transient_peak, (9u64 * p.rows() as u64 * 2).next_multiple_of(256) + 512 + 256);
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    let (scheme, act) = (Scheme::Nvfp4(Global::Divides), ActScheme::Nvfp4);
    let spec = LinearSpec { rows: 6, cols: 48, scheme, act, segment_rows: 6 };
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, Numerics::BF16);
        let synth = Synth::new(&mut rng(1), spec);
        let x = blank(&device, DType::Bf16, &[4, 32]);
        let inner = message(linear(&cx, x.view(), &synth.on(&device), "y"));
        assert!(inner.contains("[4, 32]") && inner.contains("[6, 48]"), "{inner}");
        let x = blank(&device, DType::Bf16, &[4, 48]);
        let each = message(linear(&cx, x.view(), &synth.on_each(&device, &[1.0, 2.0]), "y"));
        assert!(each.contains("one input scale"), "{each}");
        let ints = message(linear(&cx, blank(&device, DType::I32, &[4, 48]).view(), &synth.on(&device), "y"));
        assert!(ints.contains("i32"), "{ints}");
        assert!(message(Projection::new(Vec::new())).contains("one or more"));
        let wide = Weight::plain(blank(&device, DType::Bf16, &[4, 32])).unwrap();
        let uneven = message(Projection::new(vec![synth.on(&device), wide]));
        assert!(uneven.contains("[48, 32]"), "{uneven}");
        assert!(matches!(synth.on(&device).input(), InputScale::One(_)));
        assert!(meter.take().is_empty(), "a refused call is not counted");
    }
}
