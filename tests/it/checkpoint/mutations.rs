//! The entry points of tests/fuzz over seeded random mutations of valid inputs: whatever the bytes, they return.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use highwater::checkpoint::{Checkpoint, Geometry, header, index};
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::maker::Maker;

/// Pieces that are wrong almost anywhere: numbers at the edges, JSON's own tokens, bytes that are no UTF-8.
const PIECES: [&[u8]; 24] = [
    b"0",
    b"-1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"9007199254740993",
    b"1e308",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b"[[[[[[[[[[[[[[[[",
    b"{\"a\":",
    b"\"",
    b"\\",
    b"\\u0000",
    b",",
    b":",
    b"}",
    b"]",
    b"\xff\xfe",
    b"../",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
];

fn mutate(rng: &mut ChaCha8Rng, seed: &[u8]) -> Vec<u8> {
    let mut b = seed.to_vec();
    for _ in 0..rng.random_range(1..=4) {
        let at = rng.random_range(0..=b.len());
        let span = rng.random_range(0..=(b.len() - at).min(40));
        match rng.random_range(0..7) {
            0 if !b.is_empty() => {
                let at = at % b.len();
                b[at] ^= 1 << rng.random_range(0..8);
            }
            1 => drop(b.splice(at..at + span, [])),
            2 => {
                let piece = b[at..at + span].to_vec();
                drop(b.splice(at..at, piece));
            }
            3 => drop(b.splice(at..at, PIECES.choose(rng).unwrap().iter().copied())),
            4 => drop(b.splice(at..at + span, PIECES.choose(rng).unwrap().iter().copied())),
            5 => b.truncate(at),
            _ => number(rng, &mut b),
        }
    }
    b
}

/// Puts another number in place of one that is there.
fn number(rng: &mut ChaCha8Rng, b: &mut Vec<u8>) {
    let starts: Vec<usize> = (1..b.len()).filter(|&i| b[i].is_ascii_digit() && !b[i - 1].is_ascii_digit()).collect();
    let Some(&start) = starts.choose(rng) else { return };
    let len = b[start..].iter().take_while(|c| c.is_ascii_digit()).count();
    let value = match rng.random_range(0..4) {
        0 => rng.next_u64(),
        1 => rng.next_u64() >> rng.random_range(0..64),
        2 => 1u64 << rng.random_range(0..64),
        _ => rng.random_range(0..70),
    };
    b.splice(start..start + len, value.to_string().into_bytes());
}

/// The seeds that tests/fuzz starts from.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no seeds for {target}");
    paths.iter().map(|p| fs::read(p).unwrap()).collect()
}

/// Runs `f`, true where the input was accepted, on every seed and on `count` mutations; some of both kinds must occur.
fn run(target: &str, count: usize, f: impl Fn(&[u8]) -> bool) {
    let seeds = corpus(target);
    for (i, seed) in seeds.iter().enumerate() {
        assert!(f(seed), "seed {i} of {target} is not valid");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(0x4857_4d4b);
    let (mut accepted, mut slowest) = (0, Duration::ZERO);
    for _ in 0..count {
        let seed = seeds.choose(&mut rng).unwrap();
        let input = mutate(&mut rng, seed);
        let start = Instant::now();
        accepted += usize::from(f(&input));
        slowest = slowest.max(start.elapsed());
    }
    assert!(accepted > 0 && accepted < count, "{target}: {accepted} of {count} accepted, the mutations test nothing");
    // A hang, or memory taken because a header says so, would show as seconds.
    assert!(slowest < Duration::from_secs(5), "{target}: one input took {slowest:?}");
}

#[test]
fn configs() {
    run("config", 4000, |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return false };
        let Ok(g) = Geometry::from_config(Path::new("config.json"), text) else { return false };
        // What was accepted can be computed with.
        assert!(g.param_count() > 0 && g.param_count() < 1 << 44);
        assert!(g.rotary_dim.is_multiple_of(2) && (2..=g.head_dim).contains(&g.rotary_dim));
        assert!(g.heads.is_multiple_of(g.kv_heads) && g.gdn.value_heads.is_multiple_of(g.gdn.key_heads));
        assert!(g.eps > 0.0 && g.rope.theta.is_finite() && g.max_context > 0 && !g.layers.is_empty());
        assert!(g.eos.iter().all(|id| (*id as usize) < g.vocab) && g.decodable <= g.vocab);
        true
    });
}

#[test]
fn headers() {
    run("header", 4000, |bytes| {
        // As the fuzz target: 4 bytes of length beyond what is given, then the beginning of a file.
        let Some((more, bytes)) = bytes.split_first_chunk::<4>() else { return false };
        let file_len = bytes.len() as u64 + u64::from(u32::from_le_bytes(*more));
        let Ok(h) = header::parse(Path::new("model.safetensors"), bytes, file_len) else { return false };
        let mut at = h.data_start;
        for t in &h.tensors {
            assert_eq!(t.offset, at);
            at += t.bytes;
            assert_eq!(t.shape.iter().product::<usize>() as u64 * t.dtype.bits(), t.bytes * 8);
        }
        assert_eq!(at, file_len);
        true
    });
}

#[test]
fn indices() {
    run("index", 4000, |bytes| {
        let Ok(i) = index::parse(Path::new("model.safetensors.index.json"), bytes) else { return false };
        assert!(i.tensors.values().all(|at| *at < i.files.len()) && !i.tensors.is_empty());
        assert!(i.files.iter().all(|f| Path::new(f).components().count() == 1 && f.ends_with(".safetensors")));
        true
    });
}

#[test]
fn whole_folders() {
    let maker = Maker::moe();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let dir = maker.write_sharded(2);
    let names: Vec<PathBuf> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let originals: Vec<(PathBuf, Vec<u8>)> = names.into_iter().map(|p| (p.clone(), fs::read(p).unwrap())).collect();
    for _ in 0..600 {
        let (path, bytes) = originals.choose(&mut rng).unwrap();
        // Only the header: the data may be anything.
        let header =
            bytes.len().min(8 + bytes.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize % (1 << 20)));
        let mut bent = mutate(&mut rng, &bytes[..header]);
        bent.extend(&bytes[header..]);
        fs::write(path, bent).unwrap();
        if let Ok(c) = Checkpoint::open(dir.path()) {
            for p in c.geometry().params() {
                let e = c.entry(&p.name).unwrap();
                let mut out = vec![0; e.bytes() as usize];
                c.read(&p.name, 0..e.rows(), &mut out).unwrap();
            }
        }
        fs::write(path, bytes).unwrap();
    }
}
