//! Dequantised weights: bit-equal to each peer's own order of float32 operations, and to each other.

use std::fs;

use float8::F8E4M3;
use highwater::checkpoint::{Checkpoint, Module, RowScale};
use highwater::num::{bf16, fp4, fp8};
use highwater::ops::scheme::{Global, Grain, Scheme};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::{CASES, fixture, folder, open};

/// A module's weight by what the checkpoint gives a loader, in the order that `Scheme` documents.
fn ours(c: &Checkpoint, m: &Module) -> Vec<f32> {
    let (n, k) = (m.rows, m.cols);
    let width = if matches!(m.scheme, Scheme::Nvfp4(_)) { k / 2 } else { k };
    let mut codes = vec![0; n * width];
    c.read_codes(&m.name, 0..n, &mut codes).unwrap();
    let mut rows = vec![f32::NAN; n];
    if m.scheme != Scheme::Fp8(Grain::Block) {
        c.row_scale(&m.name).unwrap().write(&m.name, &mut rows).unwrap();
    }
    match m.scheme {
        Scheme::Plain(_) => unreachable!("asked of quantised modules"),
        Scheme::Fp8(Grain::Block) => {
            let grid = c.block_scales(&m.name).unwrap();
            let across = k.div_ceil(128);
            let scale = |i: usize| grid[i / k / 128 * across + i % k / 128];
            codes.iter().enumerate().map(|(i, q)| fp8::decode(*q) * scale(i)).collect()
        }
        Scheme::Fp8(_) => codes.iter().enumerate().map(|(i, q)| fp8::decode(*q) * rows[i / k]).collect(),
        Scheme::Nvfp4(global) => {
            let mut scales = vec![0; n * k / 16];
            c.read_group_scales(&m.name, 0..n, &mut scales).unwrap();
            let value = |i: usize| {
                let (s, g) = (fp8::decode(scales[i / 16]), rows[i / k]);
                let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                fp4::decode(code) * if global == Global::Divides { s / g } else { s * g }
            };
            (0..n * k).map(value).collect()
        }
    }
}

/// The same from the file's bytes, by the peer's own source: compressed-tensors' `_dequantize` divides the scale by the
/// global and multiplies the codes with that; modelopt's `NVFP4QTensor.dequantize` multiplies the scale by it first;
/// `FP8QTensor.dequantize` and transformers' `Fp8Dequantize` multiply codes by scales. Scales of a bf16 model count as
/// float32. With it the product in float64.
fn theirs(file: &SafeTensors<'_>, name: &str, n: usize, k: usize) -> (Vec<f32>, Vec<f64>) {
    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let get = |part: &str| file.tensor(&format!("{name}.{part}")).ok();
    let floats = |part: &str| -> Option<Vec<f32>> {
        let t = get(part)?;
        Some(match t.dtype() {
            Dtype::F32 => t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => t.data().as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F8_E4M3 => t.data().iter().map(|b| F8E4M3::from_bits(*b).to_f32()).collect(),
            _ => return None,
        })
    };
    let (mut out, mut exact) = (Vec::new(), Vec::new());
    let mut push = |code: f32, scale: f32, wide: f64| {
        out.push(code * scale);
        exact.push(f64::from(code) * wide);
    };
    if let Some(codes) = get("weight_packed").or(get("weight")).filter(|t| t.dtype() == Dtype::U8) {
        let scales = floats("weight_scale").unwrap();
        let divisor = floats("weight_global_scale").map(|g| g[0]);
        let factor = floats("weight_scale_2").map(|g| g[0]);
        for i in 0..n * k {
            let code = codes.data()[i / 2] >> (4 * (i % 2)) & 15;
            let value = if code < 8 { E2M1[code as usize] } else { -E2M1[code as usize - 8] };
            let s = scales[i / 16];
            match (divisor, factor) {
                (Some(g), None) => push(value, s / g, f64::from(s) / f64::from(g)),
                (None, Some(g)) => push(value, s * g, f64::from(s) * f64::from(g)),
                other => panic!("{name}: {other:?}"),
            }
        }
    } else {
        let codes = floats("weight").unwrap();
        let scales = floats("weight_scale").or(floats("weight_scale_inv")).unwrap();
        let shape = get("weight_scale").or(get("weight_scale_inv")).unwrap().shape().to_vec();
        for (i, code) in codes.into_iter().enumerate() {
            let (row, col) = (i / k, i % k);
            let s = match shape.as_slice() {
                [] | [1] => scales[0],
                [rows] | [rows, 1] if *rows == n => scales[row],
                [_, across] => scales[row / 128 * across + col / 128],
                other => panic!("{name}: {other:?}"),
            };
            push(code, s, f64::from(s));
        }
    }
    (out, exact)
}

/// How many steps of f32 lie between two finite values.
fn steps(a: f32, b: f32) -> u32 {
    let place = |v: f32| if v.is_sign_negative() { -i64::from(v.abs().to_bits()) } else { i64::from(v.to_bits()) };
    place(a).abs_diff(place(b)) as u32
}

#[test]
fn weights_are_the_peers_own_bits_and_within_one_ulp_of_the_product() {
    for case in CASES {
        let c = open(case);
        let bytes = fs::read(folder(case).join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut checked, mut worst) = (0usize, 0);
        for m in c.modules().iter().filter(|m| !matches!(m.scheme, Scheme::Plain(_))) {
            let part = if m.scheme == Scheme::Nvfp4(Global::Divides) { "weight_packed" } else { "weight" };
            let disk = c.disk_name(c.entry(&format!("{}.{part}", m.name)).unwrap());
            let name = disk.strip_suffix(&format!(".{part}")).unwrap();
            let (ours, (theirs, exact)) = (ours(&c, m), theirs(&file, name, m.rows, m.cols));
            assert_eq!(ours.len(), theirs.len(), "{case}: {name}");
            for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{case}: {name}[{i}]: {a} and {b}");
                worst = worst.max(steps(*a, exact[i] as f32));
            }
            checked += ours.len();
            assert!(ours.iter().any(|v| *v > 0.0) && ours.iter().any(|v| *v < 0.0), "{case}: {name}");
        }
        assert!(checked > 10_000 && worst <= 1, "{case}: {checked} weights, at worst {worst} ulp away");
    }
}

#[test]
fn both_exporters_files_of_the_same_weights_dequantise_alike() {
    // Globals that are powers of two, so that a quotient and a product are the same number.
    let mut ct = fixture("ct_nvfp4");
    let mut mo = fixture("ct_nvfp4");
    mo.config["quantization_config"] = fixture("mo_nvfp4").config["quantization_config"].clone();
    let mut globals = 0;
    for (a, b) in ct.tensors.iter_mut().zip(&mut mo.tensors) {
        let Some((module, part)) = b.name.rsplit_once('.') else { continue };
        let new = match part {
            "weight_packed" => "weight",
            "weight_global_scale" => "weight_scale_2",
            "input_global_scale" => "input_scale",
            _ => continue,
        };
        if part != "weight_packed" {
            let exponent = 9 + globals % 5;
            globals += 1;
            let global = f32::from_bits((127 + exponent) << 23);
            a.bytes = global.to_le_bytes().to_vec();
            b.bytes = (1.0 / global).to_le_bytes().to_vec();
            b.shape = vec![];
        }
        b.name = format!("{module}.{new}");
    }
    assert_eq!(globals, 242);
    let (ct, mo) = (ct.write(), mo.write());
    let (ct, mo) = (Checkpoint::open(ct.path()).unwrap(), Checkpoint::open(mo.path()).unwrap());
    let quantised = |c: &Checkpoint| -> Vec<Module> {
        c.modules().iter().filter(|m| !matches!(m.scheme, Scheme::Plain(_))).cloned().collect()
    };
    let (a, b) = (quantised(&ct), quantised(&mo));
    assert_eq!((a.len(), b.len()), (121, 121));
    for (a, b) in a.iter().zip(&b) {
        assert_eq!((a.scheme, b.scheme), (Scheme::Nvfp4(Global::Divides), Scheme::Nvfp4(Global::Multiplies)));
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(ours(&ct, a)) == bits(ours(&mo, b)), "{}", a.name);
        let input = |c: &Checkpoint| c.verdict(&a.name).unwrap().input_scale.unwrap();
        assert_eq!(input(&ct) * input(&mo), 1.0, "{}", a.name);
    }
}

#[test]
fn scales_stored_in_bf16_are_the_same_numbers_in_f32() {
    let c = open("ct_fp8_static");
    let maker = fixture("ct_fp8_static");
    for m in c.modules().iter().filter(|m| m.scheme == Scheme::Fp8(Grain::Tensor)) {
        let stored = |part: &str| {
            let name = format!("model.{}.{part}", m.name);
            let t = maker.tensors.iter().find(|t| t.name == name).unwrap();
            assert_eq!(t.dtype, "BF16");
            f32::from_le_bytes([0, 0, t.bytes[0], t.bytes[1]])
        };
        assert_eq!(c.row_scale(&m.name).unwrap(), RowScale::One(stored("weight_scale")));
        assert_eq!(c.verdict(&m.name).unwrap().input_scale, Some(stored("input_scale")));
    }
    // Each part of a fused projection keeps its own.
    let scale = |part: &str| c.row_scale(&format!("layers.3.self_attn.{part}")).unwrap();
    assert_ne!(scale("q_proj"), scale("k_proj"));
    assert_eq!(json!(c.verdict("lm_head").unwrap())["act"], json!("none"));
}
