//! Seeded random mutations of quantised configs and headers: whatever the bytes, the reader returns, and what it accepts
//! reads.

use std::fs;
use std::time::{Duration, Instant};

use highwater::checkpoint::Checkpoint;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::{CASES, counts, fixture, open, read_all};

/// A place inside a value.
fn walk<'a>(rng: &mut ChaCha8Rng, value: &'a mut Value) -> &'a mut Value {
    let inside = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if inside == 0 || rng.random_range(0..8) == 0 {
        return value;
    }
    let at = rng.random_range(0..inside);
    let next = match value {
        Value::Object(map) => map.values_mut().nth(at),
        Value::Array(list) => list.get_mut(at),
        _ => None,
    };
    walk(rng, next.expect("an element that was counted"))
}

/// Another value for one place, or another key.
fn mutate(rng: &mut ChaCha8Rng, config: &mut Value) {
    const WORDS: [&str; 24] = [
        "Linear",
        "re:.*",
        "re:.*experts.*",
        "re:(",
        "*",
        "lm_head",
        "mtp*",
        "FP8",
        "NVFP4",
        "MIXED_PRECISION",
        "tensor",
        "channel",
        "block",
        "group",
        "tensor_group",
        "token",
        "local",
        "float",
        "int",
        "fp8",
        "modelopt",
        "compressed-tensors",
        "float-quantized",
        "nvfp4-pack-quantized",
    ];
    let place = walk(rng, config);
    let word = *WORDS.choose(rng).unwrap();
    match (rng.random_range(0..8), &mut *place) {
        (0, _) => *place = Value::Null,
        (1, _) => *place = json!(word),
        (2, _) => *place = json!([word]),
        (3, _) => *place = json!(rng.random_range(-2..200)),
        (4, _) => *place = json!(rng.next_u32() & 1 == 0),
        (5, Value::Object(map)) => drop(map.insert(word.into(), json!({"targets": [word], "quant_algo": word}))),
        (6, Value::Array(list)) => list.push(json!(word)),
        (_, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).unwrap().clone();
            map.remove(&key);
        }
        (_, Value::String(text)) => {
            let at = (0..=text.len()).filter(|i| text.is_char_boundary(*i)).collect::<Vec<_>>();
            text.insert_str(*at.choose(rng).unwrap(), ["(", "*", ".", "\\", "[", "$", "x"].choose(rng).unwrap());
        }
        _ => *place = json!({word: word}),
    }
}

#[test]
fn configs_of_every_producer() {
    let mut rng = ChaCha8Rng::seed_from_u64(0x5148);
    let (mut accepted, mut refused) = (0, 0);
    for case in CASES {
        let maker = fixture(case);
        let expected = counts(open(case).modules());
        let dir = maker.write();
        let mut slowest = Duration::ZERO;
        for _ in 0..250 {
            let mut config = maker.config.clone();
            for _ in 0..rng.random_range(1..=3) {
                mutate(&mut rng, &mut config["quantization_config"]);
            }
            fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let start = Instant::now();
            match Checkpoint::open(dir.path()) {
                Ok(c) => {
                    accepted += 1;
                    read_all(&c).unwrap_or_else(|e| panic!("{case}: {}: {e}", config["quantization_config"]));
                    // The tensors are what they were: only what becomes of inputs may be said differently.
                    let schemes = |counts: &[(String, usize)]| -> usize {
                        counts.iter().filter(|(k, _)| !k.starts_with("bf16")).map(|(_, n)| n).sum()
                    };
                    assert_eq!(schemes(&counts(c.modules())), schemes(&expected), "{case}: {config}");
                }
                Err(e) => {
                    refused += 1;
                    assert!(e.to_string().len() < 4000, "{e}");
                }
            }
            slowest = slowest.max(start.elapsed());
        }
        assert!(slowest < Duration::from_secs(5), "{case}: {slowest:?}");
    }
    assert!(accepted > 100 && refused > 1000, "{accepted} accepted, {refused} refused: the mutations test nothing");
}

#[test]
fn headers_of_quantised_tensors() {
    let mut rng = ChaCha8Rng::seed_from_u64(0x4e56);
    let parts = [
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "k_scale",
        "bias",
    ];
    let dtypes = [("BF16", 2), ("F32", 4), ("F8_E4M3", 1), ("U8", 1), ("F16", 2)];
    for case in ["ct_dense_nvfp4", "ct_fp8_block", "mo_mixed", "hf_fp8_block"] {
        let maker = fixture(case);
        for _ in 0..60 {
            let mut bent = maker.clone();
            for _ in 0..rng.random_range(1..=3) {
                let at = rng.random_range(0..bent.tensors.len());
                let t = &mut bent.tensors[at];
                match rng.random_range(0..4) {
                    0 => {
                        let stem = t.name.rsplit_once('.').map_or("", |(s, _)| s).to_owned();
                        t.name = format!("{stem}.{}", parts.choose(&mut rng).unwrap());
                    }
                    1 => {
                        let (dtype, size) = dtypes.choose(&mut rng).unwrap();
                        t.dtype = (*dtype).into();
                        t.bytes = vec![0x38; t.shape.iter().product::<u64>() as usize * size];
                    }
                    2 => t.shape.reverse(),
                    _ => drop(bent.tensors.remove(at)),
                }
            }
            bent.tensors.sort_by(|a, b| a.name.cmp(&b.name));
            bent.tensors.dedup_by(|a, b| a.name == b.name);
            let dir = bent.write();
            if let Ok(c) = Checkpoint::open(dir.path()) {
                read_all(&c).unwrap_or_else(|e| panic!("{case}: {e}"));
            }
            let _ = Checkpoint::survey(dir.path());
        }
    }
}
