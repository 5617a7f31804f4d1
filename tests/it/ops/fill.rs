//! Seeded values: the definition, any split, rounding, moments, refusals.

use highwater::num::philox::{normal4, philox4x32, stream_key, uniform};
use highwater::num::{DType, bf16, fp4, fp8};
use highwater::ops::fill::Code;
use highwater::ops::{Numerics, fill, reference};

use super::kit::{Kit, assert_refused, values};

const KEY: [u32; 2] = [0x1234_5678, 0x9ABC_DEF0];

#[test]
fn element_i_is_word_i_mod_4_of_block_i_div_4() {
    let kit = Kit::cpu(Numerics::F32);
    // The last start makes the block number cross 32 bits in the middle of the tensor.
    for first in [0, 1, 2, 3, 7, (1 << 34) - 5] {
        for case in fill::cases() {
            let mut dst = kit.empty(case.dtype, &[case.rows, case.cols]);
            fill::normal(&kit.cx(), &mut dst, 0..case.rows, KEY, first, 0.25, 1.5).unwrap();
            for (j, got) in values(&dst).into_iter().enumerate() {
                let i = first + j as u64;
                let words = philox4x32(KEY, [(i / 4) as u32, ((i / 4) >> 32) as u32, 0, 0]);
                let exact = 0.25 + 1.5 * normal4(words)[(i % 4) as usize];
                let want = if case.dtype == DType::F32 { exact } else { bf16::from_f32(exact).to_f32() };
                assert_eq!(got.to_bits(), want.to_bits(), "{} element {i}", case.name);
            }
        }
    }
}

#[test]
fn any_split_of_rows_writes_the_same_bits() {
    let kit = Kit::cpu(Numerics::F32);
    let (rows, cols) = (211, 331);
    let whole = {
        let mut dst = kit.empty(DType::F32, &[rows, cols]);
        fill::normal(&kit.cx(), &mut dst, 0..rows, KEY, 5, 0.0, 1.0).unwrap();
        values(&dst)
    };
    for cuts in [vec![0, 211], vec![0, 1, 211], vec![0, 70, 71, 140, 211], (0..=211).collect::<Vec<_>>()] {
        let mut dst = kit.empty(DType::F32, &[rows, cols]);
        for pair in cuts.windows(2) {
            let first = 5 + (pair[0] * cols) as u64;
            fill::normal(&kit.cx(), &mut dst, pair[0]..pair[1], KEY, first, 0.0, 1.0).unwrap();
        }
        assert!(values(&dst).iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{} pieces", cuts.len() - 1);
    }
    for threads in [1, 3] {
        let mut out = vec![0.0f32; rows * cols];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| reference::fill::normal(&mut out, KEY, 5, 0.0, 1.0));
        assert_eq!(out, whole, "{threads} threads");
    }
}

#[test]
fn rows_outside_the_range_are_left_alone() {
    let kit = Kit::cpu(Numerics::F32);
    let mut dst = kit.empty(DType::F32, &[5, 3]);
    fill::constant(&kit.cx(), &mut dst, 0..5, 7.0).unwrap();
    fill::normal(&kit.cx(), &mut dst, 1..2, KEY, 0, 100.0, 1.0).unwrap();
    fill::log_uniform(&kit.cx(), &mut dst, 3..4, KEY, 0, 1e30, 2e30).unwrap();
    fill::constant(&kit.cx(), &mut dst, 2..2, 1.0).unwrap();
    let got = values(&dst);
    for row in [0, 2, 4] {
        assert_eq!(got[row * 3..][..3], [7.0; 3], "row {row}");
    }
    assert!(got[3..6].iter().all(|v| *v > 90.0) && got[9..12].iter().all(|v| *v > 60.0 && *v < 90.0), "{got:?}");
}

#[test]
fn bf16_is_the_f32_value_rounded_to_nearest_even() {
    let kit = Kit::cpu(Numerics::BF16);
    let (mut wide, mut narrow) = (kit.empty(DType::F32, &[40, 100]), kit.empty(DType::Bf16, &[40, 100]));
    for (which, check) in [("normal", 0), ("log_uniform", 1), ("constant", 2)] {
        for dst in [&mut wide, &mut narrow] {
            match check {
                0 => fill::normal(&kit.cx(), dst, 0..40, KEY, 3, 0.5, 0.02).unwrap(),
                1 => fill::log_uniform(&kit.cx(), dst, 0..40, KEY, 3, 0.0, 16.0).unwrap(),
                _ => fill::constant(&kit.cx(), dst, 0..40, 1.0 + 3.0 / 256.0).unwrap(),
            }
        }
        for (w, n) in values(&wide).iter().zip(values(&narrow)) {
            assert_eq!(bf16::from_f32(*w).to_f32().to_bits(), n.to_bits(), "{which} {w}");
        }
    }
    // 1 + 3/256 lies between two bf16 neighbours, exactly in the middle: the even one is 1 + 4/256.
    assert_eq!(values(&narrow)[0], 1.0 + 4.0 / 256.0);
}

#[test]
fn moments_are_those_asked_for() {
    let kit = Kit::cpu(Numerics::F32);
    let n = 400_000;
    let mut dst = kit.empty(DType::F32, &[400, n / 400]);
    let moments = |v: &[f64]| {
        let mean = v.iter().sum::<f64>() / v.len() as f64;
        let central = |k: i32| v.iter().map(|x| (x - mean).powi(k)).sum::<f64>() / v.len() as f64;
        (mean, central(2), central(3) / central(2).powf(1.5), central(4) / central(2).powi(2))
    };
    for (seed, mean, std) in [(1, 0.0, 1.0), (2, -3.0, 0.02), (3, 1.0, 5.0)] {
        fill::normal(&kit.cx(), &mut dst, 0..400, stream_key(seed, "w"), 0, mean, std).unwrap();
        let v: Vec<f64> = values(&dst).iter().map(|&v| f64::from(v)).collect();
        let (m, var, skew, kurtosis) = moments(&v);
        let (mean, std) = (f64::from(mean), f64::from(std));
        // Five standard errors of each.
        let error = 5.0 / (n as f64).sqrt();
        assert!((m - mean).abs() < std * error, "mean {m}");
        assert!((var / (std * std) - 1.0).abs() < 1.4 * error, "variance {var}");
        assert!(skew.abs() < 2.5 * error, "skew {skew}");
        // The sum of four uniform bytes has excess kurtosis -1.2 / 4.
        assert!((kurtosis - 2.7).abs() < 5.0 * error, "kurtosis {kurtosis}");
        // Neighbours are not correlated.
        let lag = v.windows(2).map(|w| (w[0] - m) * (w[1] - m)).sum::<f64>() / (n as f64 * var);
        assert!(lag.abs() < error, "lag-1 correlation {lag}");
    }
    fill::log_uniform(&kit.cx(), &mut dst, 0..400, stream_key(4, "A_log"), 0, 2.0, 16.0).unwrap();
    let v: Vec<f64> = values(&dst).iter().map(|&v| f64::from(v).exp()).collect();
    assert!(v.iter().all(|v| *v > 2.0 - 1e-5 && *v < 16.0 + 1e-5));
    let (m, var, skew, _) = moments(&v);
    let error = 5.0 / (n as f64).sqrt();
    assert!(
        (m - 9.0).abs() < 14.0 * error && (var / (14.0 * 14.0 / 12.0) - 1.0).abs() < error && skew.abs() < 2.0 * error
    );
}

#[test]
fn log_uniform_is_the_logarithm_of_the_uniform_value() {
    let kit = Kit::cpu(Numerics::F32);
    let mut dst = kit.empty(DType::F32, &[10, 77]);
    fill::log_uniform(&kit.cx(), &mut dst, 0..10, KEY, 6, 0.0, 16.0).unwrap();
    for (j, got) in values(&dst).into_iter().enumerate() {
        let i = 6 + j as u64;
        let word = philox4x32(KEY, [(i / 4) as u32, 0, 0, 0])[(i % 4) as usize];
        let exact = (16.0 * (1.0 - f64::from(uniform(word)))).ln();
        assert!((f64::from(got) - exact).abs() < 1e-6 * exact.abs().max(1.0), "{got} for {exact}");
    }
}

/// n of element i: the sum of the four bytes of its word less 510.
fn centred(i: u64) -> i32 {
    let words = philox4x32(KEY, [(i / 4) as u32, ((i / 4) >> 32) as u32, 0, 0]);
    words[(i % 4) as usize].to_le_bytes().iter().map(|b| i32::from(*b)).sum::<i32>() - 510
}

#[test]
fn codes_are_the_nearest_of_the_stream_s_integers() {
    let kit = Kit::cpu(Numerics::F32);
    let (rows, cols) = (400, 331);
    let mut dst = kit.empty(DType::U8, &[rows, cols]);
    let mut seen = std::collections::BTreeSet::new();
    fill::codes(&kit.cx(), &mut dst, 0..rows, KEY, Code::E4m3).unwrap();
    for (i, code) in dst.host::<u8>().unwrap().iter().enumerate() {
        let n = centred(i as u64);
        // The encoder of num, which is tested against another crate's: no NaN, nothing out of range.
        assert_eq!(*code, fp8::encode(n as f32 / 2.0), "element {i}: {n}");
        assert!(fp8::decode(*code).abs() <= 256.0);
        seen.insert(*code);
    }
    assert!(seen.len() > 100, "{} codes", seen.len());
    fill::codes(&kit.cx(), &mut dst, 0..rows, KEY, Code::E2m1).unwrap();
    for (j, byte) in dst.host::<u8>().unwrap().iter().enumerate() {
        let [even, odd] = [0, 1].map(|k| centred(2 * j as u64 + k) as f32 / 44.0);
        assert_eq!(*byte, fp4::encode_pair(even, odd), "byte {j}: {even} {odd}");
    }
    let distinct = dst.host::<u8>().unwrap().iter().map(|b| b & 15).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(distinct.len(), 16, "every e2m1 code, -0 too");
    fill::codes(&kit.cx(), &mut dst, 0..rows, KEY, Code::ScaleE4m3).unwrap();
    let mut scales = std::collections::BTreeSet::new();
    for code in dst.host::<u8>().unwrap() {
        let value = fp8::decode(*code);
        assert!((96.0..=352.0).contains(&value), "{code:#x}");
        scales.insert(*code);
    }
    assert_eq!(scales.len(), 16);
}

/// Every n a word can give, each at its own rounding, the ties among them.
#[test]
fn codes_of_every_integer_are_the_nearest() {
    let mut tried = std::collections::BTreeSet::new();
    for first in (0..40_000_000u64).step_by(1 << 16) {
        let mut eight = vec![0u8; 1 << 16];
        reference::fill::codes(&mut eight, KEY, first, Code::E4m3);
        for (i, code) in eight.iter().enumerate() {
            let n = centred(first + i as u64);
            if tried.insert(n) {
                assert_eq!(*code, fp8::encode(n as f32 / 2.0), "{n}");
                let mut four = [0u8];
                let at = first + i as u64;
                reference::fill::codes(&mut four, KEY, at & !1, Code::E2m1);
                let nibble = if at.is_multiple_of(2) { four[0] & 15 } else { four[0] >> 4 };
                assert_eq!(nibble, fp4::encode(n as f32 / 44.0), "{n}");
            }
        }
        if tried.len() > 900 {
            break;
        }
    }
    assert!(tried.len() > 900, "{} of 1021 integers", tried.len());
}

#[test]
fn codes_and_scales_do_not_depend_on_the_split() {
    let size = 100_003;
    for code in [Code::E4m3, Code::E2m1, Code::ScaleE4m3] {
        let mut whole = vec![0u8; size];
        reference::fill::codes(&mut whole, KEY, 0, code);
        for cut in [1, 3, 16_384, 99_999] {
            let mut parts = vec![0u8; size];
            for (i, part) in parts.chunks_mut(cut).enumerate().take(300) {
                reference::fill::codes(part, KEY, (i * cut) as u64 * code.elements(), code);
            }
            let end = (300 * cut).min(size);
            assert_eq!(parts[..end], whole[..end], "{code:?} in pieces of {cut}");
        }
        for threads in [1, 3] {
            let mut again = vec![0u8; size];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| reference::fill::codes(&mut again, KEY, 0, code));
            assert_eq!(again, whole);
        }
    }
    let mut whole = vec![0.0f32; size];
    reference::fill::scales(&mut whole, KEY, 0, -12);
    let mut part = vec![0.0f32; 1000];
    reference::fill::scales(&mut part, KEY, 50_001, -12);
    assert_eq!(part, whole[50_001..51_001]);
}

#[test]
fn scales_are_positive_and_exact_in_bf16() {
    let kit = Kit::cpu(Numerics::F32);
    let mut dst = kit.empty(DType::F32, &[40, 100]);
    for exponent in [-40, -12, 0, 9] {
        fill::scales(&kit.cx(), &mut dst, 0..40, KEY, exponent).unwrap();
        let unit = 2f32.powi(exponent);
        for v in values(&dst) {
            assert!(v >= unit && v < 2.0 * unit, "{v} for 2^{exponent}");
            assert_eq!(bf16::from_f32(v).to_f32().to_bits(), v.to_bits());
        }
        let distinct = values(&dst).iter().map(|v| v.to_bits()).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(distinct.len(), 128);
    }
}

#[test]
fn a_bf16_value_may_be_kept_in_f32() {
    let kit = Kit::cpu(Numerics::F32);
    let (mut wide, mut narrow) = (kit.empty(DType::F32, &[9, 100]), kit.empty(DType::Bf16, &[9, 100]));
    fill::normal_bf16(&kit.cx(), &mut wide, 0..9, KEY, 7, 0.1, 0.3).unwrap();
    fill::normal(&kit.cx(), &mut narrow, 0..9, KEY, 7, 0.1, 0.3).unwrap();
    assert_eq!(values(&wide), values(&narrow));
    fill::normal_bf16(&kit.cx(), &mut narrow, 0..9, KEY, 7, 0.1, 0.3).unwrap();
    assert_eq!(values(&wide), values(&narrow));
}

#[test]
fn what_cannot_be_filled_is_refused() {
    let kit = Kit::cpu(Numerics::F32);
    let cx = kit.cx();
    let mut dst = kit.empty(DType::F32, &[4, 3]);
    assert_refused(fill::normal(&cx, &mut dst, 2..5, KEY, 0, 0.0, 1.0), &["rows 2..5", "[4, 3]"]);
    #[allow(clippy::reversed_empty_ranges)] // what is refused
    let reversed = 3..2;
    assert_refused(fill::constant(&cx, &mut dst, reversed, 0.0), &["rows 3..2"]);
    assert_refused(fill::normal(&cx, &mut dst, 0..4, KEY, u64::MAX - 5, 0.0, 1.0), &["past the stream's end"]);
    assert_refused(fill::normal(&cx, &mut dst, 0..4, KEY, 0, f32::NAN, 1.0), &["NaN"]);
    assert_refused(fill::normal(&cx, &mut dst, 0..4, KEY, 0, 0.0, f32::INFINITY), &["inf"]);
    assert_refused(fill::normal(&cx, &mut dst, 0..4, KEY, 0, 0.0, -1.0), &["-1"]);
    for (low, high) in [(1.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (f32::NAN, 1.0), (0.0, f32::INFINITY), (0.0, f32::NAN)] {
        assert_refused(fill::log_uniform(&cx, &mut dst, 0..4, KEY, 0, low, high), &["low < high"]);
    }
    let mut ints = kit.empty(DType::I32, &[4, 3]);
    assert_refused(fill::constant(&cx, &mut ints, 0..4, 0.0), &["i32", "f32 or bf16"]);
    assert_refused(fill::normal_bf16(&cx, &mut dst, 2..5, KEY, 0, 0.0, 1.0), &["rows 2..5"]);
    assert_refused(fill::normal_bf16(&cx, &mut dst, 0..4, KEY, 0, 0.0, -1.0), &["-1"]);
    assert_refused(fill::scales(&cx, &mut dst, 0..5, KEY, 0), &["rows 0..5"]);
    assert_refused(fill::scales(&cx, &mut dst, 0..4, KEY, 101), &["2^101"]);
    assert_refused(fill::scales(&cx, &mut ints, 0..4, KEY, 0), &["i32", "f32"]);
    assert_refused(fill::codes(&cx, &mut dst, 0..4, KEY, Code::E4m3), &["f32", "u8"]);
    let mut bytes = kit.empty(DType::U8, &[4, 3]);
    assert_refused(fill::codes(&cx, &mut bytes, 3..5, KEY, Code::E4m3), &["rows 3..5"]);
    assert!(values(&dst).iter().all(|v| v.is_nan()), "a refused fill writes nothing");
}

#[test]
fn the_plan_device_checks_and_counts_the_same() {
    let plan = Kit::plan(Numerics::F32);
    let cpu = Kit::cpu(Numerics::F32);
    for case in fill::cases() {
        for kit in [&plan, &cpu] {
            let mut dst = kit.empty(case.dtype, &[case.rows, case.cols]);
            fill::normal(&kit.cx(), &mut dst, 0..case.rows, KEY, 0, 0.0, 1.0).unwrap();
            assert_refused(fill::constant(&kit.cx(), &mut dst, 0..case.rows + 1, 1.0), &["rows"]);
        }
        let (a, b) = (plan.meter.take(), cpu.meter.take());
        assert_eq!(a, b);
        assert_eq!(a[0].cost.resident_bytes, (case.rows * case.cols) as u64 * case.dtype.bytes());
    }
    for kit in [&plan, &cpu] {
        let mut bytes = kit.empty(DType::U8, &[4, 6]);
        fill::codes(&kit.cx(), &mut bytes, 0..4, KEY, Code::E2m1).unwrap();
        let mut floats = kit.empty(DType::F32, &[4, 6]);
        fill::scales(&kit.cx(), &mut floats, 0..4, KEY, 0).unwrap();
        fill::normal_bf16(&kit.cx(), &mut floats, 0..4, KEY, 0, 0.0, 1.0).unwrap();
        assert_refused(fill::codes(&kit.cx(), &mut bytes, 0..5, KEY, Code::E2m1), &["rows"]);
    }
    assert_eq!(plan.meter.take(), cpu.meter.take());
}
