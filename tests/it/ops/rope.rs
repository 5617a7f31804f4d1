//! `qk_norm_rope` and the frequencies, against float64.

use std::f64::consts::PI;

use highwater::num::DType;
use highwater::ops::attention::AttnDims;
use highwater::ops::rope::{Rope, Yarn, cost, inv_freq, qk_norm_rope};
use highwater::ops::{Limits, Meter};

use super::world::{Step, blank, cx, device, message, numerics, on_threads, plan, stored, tensor, uniform};
use super::{rng, values};

const DIMS: AttnDims = AttnDims { heads: 6, kv_heads: 2, head_dim: 32, rotary_dim: 8 };
const FULL: AttnDims = AttnDims { heads: 2, kv_heads: 1, head_dim: 256, rotary_dim: 64 };
const EPS: f32 = 1e-6;
const LAST_POSITION: usize = 262_143;

/// One head, normed and rotated in float64 at the f32 angle.
fn oracle(head: &[f32], w: &[f32], freqs: &[f32], factor: f32, position: usize) -> Vec<f64> {
    let mean = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / head.len() as f64;
    let mut y: Vec<f64> = head
        .iter()
        .zip(w)
        .map(|(&x, &w)| f64::from(x) / (mean + f64::from(EPS)).sqrt() * (1.0 + f64::from(w)))
        .collect();
    let half = freqs.len();
    for i in 0..half {
        let angle = f64::from(position as f32 * freqs[i]);
        let (sin, cos) = (angle.sin() * f64::from(factor), angle.cos() * f64::from(factor));
        (y[i], y[i + half]) = (y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin);
    }
    y
}

/// Runs sequences of (context, rows) and checks every column of every row.
fn check(dims: AttnDims, dtype: DType, factor: f32, sequences: &[(usize, usize)]) {
    let mut rng = rng(dims.head_dim as u64);
    let rows: usize = sequences.iter().map(|&(_, len)| len).sum();
    let context = sequences.iter().map(|&(context, len)| context + len).max().unwrap();
    let (device, meter) = (device(), Meter::default());
    let pages: Vec<Vec<i32>> = sequences.iter().map(|&(context, len)| vec![0; (context + len).div_ceil(64)]).collect();
    let limits = Limits { step_tokens: rows, batch: sequences.len(), context };
    let step = Step::new(&device, limits, sequences, 0, &pages);
    let given = uniform(&mut rng, rows * dims.qkv_cols(), 3.0);
    let mut qkv = tensor(&device, dtype, &[rows, dims.qkv_cols()], &given);
    let (qw, kw) = (uniform(&mut rng, dims.head_dim, 0.5), uniform(&mut rng, dims.head_dim, 0.5));
    let (freqs, _) = inv_freq(&Rope { theta: 1e7, rotary_dim: dims.rotary_dim, yarn: None }).unwrap();
    let vector = |v: &[f32]| tensor(&device, DType::F32, &[v.len()], v);
    let cx = cx(&device, &meter, numerics(dtype));
    qk_norm_rope(&cx, &mut qkv, &vector(&qw), &vector(&kw), &vector(&freqs), factor, EPS, dims, &step.batch()).unwrap();
    assert_eq!(meter.take()[0].cost, cost(rows, dims, dtype));
    let (before, after) = (stored(dtype, &given), values(&qkv));
    let positions = sequences.iter().flat_map(|&(context, len)| context..context + len);
    let d = dims.head_dim;
    for (t, position) in positions.enumerate() {
        let row = t * dims.qkv_cols()..(t + 1) * dims.qkv_cols();
        let (before, after) = (&before[row.clone()], &after[row]);
        for (block, (before, after)) in before.chunks(d).zip(after.chunks(d)).enumerate() {
            let weight = match block {
                b if b < 2 * dims.heads && b % 2 == 0 => &qw,
                b if (2 * dims.heads..2 * dims.heads + dims.kv_heads).contains(&b) => &kw,
                _ => {
                    let kept = before.iter().zip(after).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(kept, "row {t}: a gate or value (block {block}) was touched");
                    continue;
                }
            };
            for (i, (want, &got)) in oracle(before, weight, &freqs, factor, position).iter().zip(after).enumerate() {
                // A head's norm, sine and cosine are each a few roundings of values of about 4.
                let store = if dtype == DType::Bf16 { want.abs() / 256.0 } else { 0.0 };
                let error = (f64::from(got) - want).abs();
                assert!(error <= 3e-6 + store, "row {t} at {position}, block {block}[{i}]: {got} for {want}");
            }
        }
    }
}

#[test]
fn heads_are_normed_and_their_first_part_rotated_and_nothing_else_changes() {
    check(DIMS, DType::F32, 1.0, &[(0, 5), (63, 3)]);
    check(DIMS, DType::Bf16, 1.0, &[(0, 5), (1000, 2)]);
    check(DIMS, DType::F32, 1.138_629_4, &[(17, 4)]);
    check(AttnDims { rotary_dim: 32, ..DIMS }, DType::F32, 1.0, &[(9, 4)]);
}

#[test]
fn the_last_position_of_the_longest_context_is_as_exact_as_the_first() {
    check(FULL, DType::F32, 1.0, &[(LAST_POSITION, 1), (0, 1), (LAST_POSITION - 5, 6)]);
    check(FULL, DType::Bf16, 1.0, &[(LAST_POSITION, 1)]);
}

#[test]
fn the_f32_angle_is_off_the_true_one_by_the_roundings_of_its_frequency_and_product_only() {
    let (freqs, factor) = inv_freq(&Rope { theta: 1e7, rotary_dim: 64, yarn: None }).unwrap();
    assert_eq!((freqs.len(), factor, freqs[0]), (32, 1.0, 1.0));
    for (i, &f) in freqs.iter().enumerate() {
        let exact = 1e7f64.powf(-(i as f64) / 32.0);
        let angle = f64::from(LAST_POSITION as f32 * f);
        let bound = 2.0 * LAST_POSITION as f64 * exact / 16_777_216.0;
        assert!((angle - LAST_POSITION as f64 * exact).abs() <= bound, "pair {i}");
    }
}

#[test]
fn a_row_is_the_same_on_any_threads() {
    let run = |threads| {
        on_threads(threads, || {
            let (device, meter) = (device(), Meter::default());
            let rows = 50;
            let limits = Limits { step_tokens: rows, batch: 1, context: rows };
            let step = Step::new(&device, limits, &[(0, rows)], 0, &[vec![0]]);
            let given = uniform(&mut rng(4), rows * DIMS.qkv_cols(), 3.0);
            let mut qkv = tensor(&device, DType::F32, &[rows, DIMS.qkv_cols()], &given);
            let ones = tensor(&device, DType::F32, &[DIMS.head_dim], &[1.0; DIMS.head_dim]);
            let freqs = tensor(&device, DType::F32, &[4], &[1.0, 0.1, 0.01, 0.001]);
            let cx = cx(&device, &meter, numerics(DType::F32));
            qk_norm_rope(&cx, &mut qkv, &ones, &ones, &freqs, 1.0, EPS, DIMS, &step.batch()).unwrap();
            values(&qkv)
        })
    };
    assert_eq!(run(1), run(3));
}

/// The published formula once more, in another form: per pair, how far it lies between the two bounds.
fn yarn_oracle(theta: f64, dim: usize, yarn: Yarn) -> Vec<f64> {
    let bound = |turns: f64| {
        let wavelengths = yarn.original_max_position as f64 / (2.0 * PI * turns);
        dim as f64 / 2.0 * wavelengths.log(theta)
    };
    let low = bound(yarn.beta_fast).floor().max(0.0);
    let high = bound(yarn.beta_slow).ceil().min(dim as f64 - 1.0);
    (0..dim / 2)
        .map(|i| {
            let extrapolated = 1.0 / theta.powf(2.0 * i as f64 / dim as f64);
            let interpolated = extrapolated / yarn.factor;
            let keep = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            interpolated * (1.0 - keep) + extrapolated * keep
        })
        .collect()
}

#[test]
fn yarn_frequencies_follow_the_published_formula() {
    for (theta, dim, factor, trained) in
        [(1e7, 64, 4.0, 262_144), (5e6, 64, 2.0, 262_144), (1e4, 128, 8.0, 4096), (1e6, 128, 4.0, 32_768)]
    {
        let yarn = Yarn::new(factor, trained);
        let (got, attention_factor) = inv_freq(&Rope { theta, rotary_dim: dim, yarn: Some(yarn) }).unwrap();
        let want = yarn_oracle(theta, dim, yarn);
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((f64::from(*got) / want - 1.0).abs() < 1e-7, "{theta} {dim}: pair {i} is {got}, not {want}");
        }
        assert!((f64::from(attention_factor) - (0.1 * factor.ln() + 1.0)).abs() < 1e-7);
    }
}

#[test]
fn yarn_of_the_published_extension_has_these_numbers() {
    let yarn = Yarn::new(4.0, 262_144);
    let (got, attention_factor) = inv_freq(&Rope { theta: 1e7, rotary_dim: 64, yarn: Some(yarn) }).unwrap();
    // Evaluated apart from this crate, in double precision: the ramp runs over pairs 14 to 22.
    for (i, want) in [
        (0, 1.0),
        (13, 0.001_433_012_570_236_962_7),
        (14, 0.000_865_964_323_360_065_4),
        (15, 0.000_474_239_822_680_104_6),
        (18, 7.217_387_404_309_113e-5),
        (21, 8.759_770_071_179_004e-6),
        (22, 3.849_816_315_148_730_5e-6),
        (31, 4.137_042_749_857_954e-8),
    ] {
        assert!((f64::from(got[i]) / want - 1.0f64).abs() < 1e-7, "pair {i} is {}, not {want}", got[i]);
    }
    assert!((attention_factor - 1.138_629_4).abs() < 1e-6);
    let given = Yarn { attention_factor: Some(1.25), ..yarn };
    let factor = inv_freq(&Rope { theta: 1e7, rotary_dim: 64, yarn: Some(given) }).unwrap().1;
    assert_eq!(factor.to_bits(), 1.25f32.to_bits());
}

#[test]
fn parameters_out_of_range_are_named() {
    let rope = Rope { theta: 1e7, rotary_dim: 64, yarn: None };
    let yarn = Yarn::new(4.0, 262_144);
    for bad in [
        Rope { theta: 1.0, ..rope },
        Rope { theta: f64::NAN, ..rope },
        Rope { rotary_dim: 7, ..rope },
        Rope { rotary_dim: 0, ..rope },
        Rope { yarn: Some(Yarn { factor: 0.5, ..yarn }), ..rope },
        Rope { yarn: Some(Yarn { factor: f64::INFINITY, ..yarn }), ..rope },
        Rope { yarn: Some(Yarn { original_max_position: 0, ..yarn }), ..rope },
        Rope { yarn: Some(Yarn { beta_fast: 1.0, beta_slow: 32.0, ..yarn }), ..rope },
        Rope { yarn: Some(Yarn { beta_slow: f64::NAN, ..yarn }), ..rope },
        Rope { yarn: Some(Yarn { attention_factor: Some(0.0), ..yarn }), ..rope },
    ] {
        message(inv_freq(&bad));
    }
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, numerics(DType::F32));
        let limits = Limits { step_tokens: 3, batch: 1, context: 8 };
        let step = Step::new(&device, limits, &[(0, 3)], 0, &[vec![0]]);
        let f32s = |shape: &[usize]| blank(&device, DType::F32, shape);
        let mut qkv = f32s(&[3, DIMS.qkv_cols()]);
        let call =
            |qkv: &mut _, q: &_, k: &_, freqs: &_| qk_norm_rope(&cx, qkv, q, k, freqs, 1.0, EPS, DIMS, &step.batch());
        let (norm, freqs) = (f32s(&[32]), f32s(&[4]));
        let said = message(call(&mut f32s(&[3, 7]), &norm, &norm, &freqs));
        assert!(said.contains("[3, 7]") && said.contains(&DIMS.qkv_cols().to_string()), "{said}");
        let said = message(call(&mut f32s(&[4, DIMS.qkv_cols()]), &norm, &norm, &freqs));
        assert!(said.contains("4 rows"), "{said}");
        let said = message(call(&mut qkv, &f32s(&[31]), &norm, &freqs));
        assert!(said.contains("q_norm") && said.contains("[31]") && said.contains("[32]"), "{said}");
        let said = message(call(&mut qkv, &norm, &blank(&device, DType::Bf16, &[32]), &freqs));
        assert!(said.contains("k_norm") && said.contains("bf16"), "{said}");
        let said = message(call(&mut qkv, &norm, &norm, &f32s(&[3])));
        assert!(said.contains("inv_freq") && said.contains("[4]"), "{said}");
        assert!(meter.take().is_empty());
    }
}
