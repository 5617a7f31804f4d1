//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//!
//! A value depends on (key, counter) alone, never on who asked before: any device, split or order gives the same bits.

use std::hash::Hasher;

use super::fnv::Fnv1a;

const MUL: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The four 32-bit words of block `counter` under `key`.
pub fn philox4x32(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut k, mut c) = (key, counter);
    for _ in 0..ROUNDS {
        let p0 = u64::from(MUL[0]) * u64::from(c[0]);
        let p1 = u64::from(MUL[1]) * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The key of a named stream under a user's seed: the seed mixed with the FNV-1a hash of the name.
pub fn stream_key(seed: u64, name: &str) -> [u32; 2] {
    let mut hash = Fnv1a::default();
    hash.write(name.as_bytes());
    let hash = hash.finish();
    let mixed = philox4x32([seed as u32, (seed >> 32) as u32], [hash as u32, (hash >> 32) as u32, 0, 0]);
    [mixed[0], mixed[1]]
}

/// A uniform value in [0, 1) with 24 bits, from one word.
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Four near-normal values (mean 0, variance 1): each the centred sum of the four bytes of one word.
///
/// A sum of four uniform bytes is exact in binary32 and the one multiplication rounds once, so every device that
/// multiplies in round-to-nearest gives the same bits; a logarithm or cosine would not.
pub fn normal4(words: [u32; 4]) -> [f32; 4] {
    // The variance of one byte is (256^2 - 1) / 12; of four, 21845.
    const SCALE: f32 = 0.006_765_87; // 1 / sqrt(21845)
    words.map(|w| {
        let sum: u32 = w.to_le_bytes().iter().map(|&b| u32::from(b)).sum();
        (sum as f32 - 510.0) * SCALE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_random123_distribution() {
        assert_eq!(philox4x32([0, 0], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([!0, !0], [!0; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let values: Vec<f64> =
            (0..50_000u32).flat_map(|i| normal4(philox4x32([7, 9], [i, 0, 0, 0]))).map(f64::from).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((var - 1.0).abs() < 0.01, "{var}");
    }

    #[test]
    fn uniform_is_below_one() {
        assert_eq!(uniform(0), 0.0);
        assert!(uniform(u32::MAX) < 1.0);
    }

    #[test]
    fn streams_differ_by_name_and_seed() {
        assert_ne!(stream_key(1, "a"), stream_key(1, "b"));
        assert_ne!(stream_key(1, "a"), stream_key(2, "a"));
    }
}
