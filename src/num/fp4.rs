//! e2m1: a sign, two exponent bits of bias 1, one fraction bit; and pairs of them in a byte, the low nibble first.
//!
//! The FP4 element of the OCP Microscaling formats (MX, revision 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, no
//! infinity, no NaN.

/// The largest magnitude.
pub const MAX: f32 = 6.0;
/// The sign bit of a code.
pub const SIGN: u8 = 0x8;

/// The value of every code.
pub static VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The values of every byte: those of its low nibble, then of its high one.
pub static PAIRS: [[f32; 2]; 256] = pairs();

/// The value of a code; bits above the low four are ignored.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize & 15]
}

/// The values of the two codes in a byte, in the order of their columns.
#[inline]
pub fn decode_pair(byte: u8) -> [f32; 2] {
    PAIRS[byte as usize]
}

/// The code nearest to `value`, ties to the even code; magnitudes above 6, infinities among them, give ±6. There is no
/// NaN: it gives ±6 as well.
#[inline]
pub fn encode(value: f32) -> u8 {
    let magnitude = if value.is_nan() { f32::INFINITY } else { value.abs() };
    // A midpoint belongs to the even one of its neighbours: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to
    // 4, 5 to 4.
    let above = [
        magnitude > 0.25,
        magnitude >= 0.75,
        magnitude > 1.25,
        magnitude >= 1.75,
        magnitude > 2.5,
        magnitude >= 3.5,
        magnitude > 5.0,
    ];
    let code = above.into_iter().map(u8::from).sum::<u8>();
    (value.to_bits() >> 28) as u8 & SIGN | code
}

/// The byte of two columns' values, the even column in the low nibble.
#[inline]
pub fn encode_pair(even: f32, odd: f32) -> u8 {
    encode(even) | encode(odd) << 4
}

const fn pairs() -> [[f32; 2]; 256] {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [VALUES[byte & 15], VALUES[byte >> 4]];
        byte += 1;
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the specification's formula.
    fn formula(code: u8) -> f64 {
        let (e, f) = (i32::from(code >> 1 & 3), f64::from(code & 1));
        let magnitude = if e == 0 { f / 2.0 } else { (1.0 + f / 2.0) * 2f64.powi(e - 1) };
        if code & SIGN == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_nibble_is_the_formula_and_encodes_to_itself() {
        for code in 0..16u8 {
            assert_eq!(f64::from(decode(code)), formula(code), "{code:#x}");
            assert_eq!(decode(code).is_sign_negative(), code & SIGN != 0, "{code:#x}");
            assert_eq!(encode(decode(code)), code, "{code:#x}");
            assert_eq!(decode(0xF0 | code).to_bits(), decode(code).to_bits());
        }
    }

    #[test]
    fn every_byte_is_its_low_nibble_then_its_high_one() {
        for byte in 0..=255u8 {
            let [even, odd] = decode_pair(byte);
            assert_eq!([even.to_bits(), odd.to_bits()], [decode(byte & 15).to_bits(), decode(byte >> 4).to_bits()]);
            assert_eq!(encode_pair(even, odd), byte, "{byte:#x}");
        }
        assert_eq!(decode_pair(0x21), [0.5, 1.0]);
    }

    #[test]
    fn encoding_is_the_nearest_code_with_ties_to_even() {
        let nearest = |value: f32| {
            let sign = if value.is_sign_negative() { SIGN } else { 0 };
            // Far outside, distances would all round to the same.
            let value = f64::from(value).clamp(-1e3, 1e3);
            let distance = |code: u8| (formula(code) - value).abs();
            let mut best = sign;
            for code in (0..8).map(|code| sign | code) {
                if distance(code) < distance(best) || (distance(code) == distance(best) && code & 1 == 0) {
                    best = code;
                }
            }
            best
        };
        let fine = (-70_000..=70_000).map(|i| i as f32 / 8192.0);
        let bf16s = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        let midpoints = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let beside = midpoints
            .into_iter()
            .flat_map(|m| [m.to_bits() - 1, m.to_bits(), m.to_bits() + 1].map(f32::from_bits))
            .flat_map(|v| [v, -v]);
        for value in fine.chain(bf16s).chain(beside).filter(|v| !v.is_nan()) {
            assert_eq!(encode(value), nearest(value), "{value}");
        }
        let ties = midpoints.map(|m| decode(encode(m)));
        assert_eq!(ties, [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
        assert_eq!([encode(f32::INFINITY), encode(f32::NEG_INFINITY), encode(f32::NAN) & 7], [0x7, 0xF, 0x7]);
    }
}
