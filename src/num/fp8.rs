//! e4m3fn: a sign, four exponent bits of bias 7, three fraction bits; no infinities, one NaN per sign.
//!
//! The format of the OCP 8-bit floating point specification (OFP8, revision 1.0): values to ±448, subnormals in steps of
//! 2^-9.

/// The largest magnitude.
pub const MAX: f32 = 448.0;
/// The codes of the two NaNs are this, with and without [`SIGN`].
pub const NAN: u8 = 0x7F;
/// The sign bit of a code.
pub const SIGN: u8 = 0x80;

/// The value of every code; NaN at 0x7F and 0xFF.
pub static VALUES: [f32; 256] = values();

/// The value of a code.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// The code nearest to `value`, ties to the even code; magnitudes above 448, infinities among them, give ±448, NaN gives
/// the NaN of its sign.
#[inline]
pub fn encode(value: f32) -> u8 {
    // The smallest normal; below it codes count steps of 2^-9, one step being one unit in the last place of STEP_BASE.
    const NORMAL: f32 = 1.0 / 64.0;
    const STEP_BASE: f32 = 16_384.0;
    let sign = (value.to_bits() >> 24) as u8 & SIGN;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | NAN;
    }
    let magnitude = magnitude.min(MAX);
    let code = if magnitude < NORMAL {
        (magnitude + STEP_BASE).to_bits() - STEP_BASE.to_bits()
    } else {
        // Round the 20 fraction bits that go, half to even; a carry runs into the exponent. Then bias 127 becomes 7.
        let bits = magnitude.to_bits();
        ((bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    sign | code as u8
}

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, fraction) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = if exponent == 15 && fraction == 7 {
            f32::NAN
        } else if exponent == 0 {
            fraction as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | fraction << 20)
        };
        values[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    values
}

#[cfg(test)]
mod tests {
    use float8::F8E4M3;

    use super::*;

    /// The value of a finite code by the specification's formula.
    fn formula(code: u8) -> f64 {
        let (e, f) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = if e == 0 { f / 8.0 * 2f64.powi(-6) } else { (1.0 + f / 8.0) * 2f64.powi(e - 7) };
        if code & SIGN == 0 { magnitude } else { -magnitude }
    }

    /// The finite code of `value`'s sign nearest to it, ties to the even code, by looking at all of them.
    fn nearest(value: f32) -> u8 {
        let sign = if value.is_sign_negative() { SIGN } else { 0 };
        // Far outside, distances would all round to the same.
        let value = f64::from(value).clamp(-1e3, 1e3);
        let distance = |code: u8| (formula(code) - value).abs();
        let mut best = sign;
        for code in (0..NAN).map(|code| sign | code) {
            if distance(code) < distance(best) || (distance(code) == distance(best) && code & 1 == 0) {
                best = code;
            }
        }
        best
    }

    /// f32 values to try: every bf16, both neighbours of every code and of every midpoint between two, and a stride over
    /// all of f32.
    fn sweep() -> impl Iterator<Item = f32> {
        let near = |v: f64| {
            let bits = (v as f32).to_bits();
            [bits.wrapping_sub(1), bits, bits.wrapping_add(1)].map(f32::from_bits)
        };
        let codes = (0..NAN).flat_map(move |code| {
            let next = if code + 1 < NAN { formula(code + 1) } else { 480.0 };
            near(formula(code)).into_iter().chain(near(f64::midpoint(formula(code), next)))
        });
        let bf16s = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        let stride = (0..u32::MAX / 60_013).map(|i| f32::from_bits(i * 60_013));
        codes.flat_map(|v| [v, -v]).chain(bf16s).chain(stride)
    }

    #[test]
    fn every_code_is_the_formula_and_the_other_crate() {
        for code in 0..=255u8 {
            let (value, other) = (decode(code), F8E4M3::from_bits(code).to_f32());
            if code & NAN == NAN {
                assert!(value.is_nan() && other.is_nan(), "{code:#x}");
            } else {
                assert_eq!(f64::from(value), formula(code), "{code:#x}");
                assert_eq!(value.to_bits(), other.to_bits(), "{code:#x}");
            }
        }
    }

    #[test]
    fn every_code_encodes_to_itself() {
        for code in 0..=255u8 {
            assert_eq!(encode(decode(code)) & NAN, code & NAN, "{code:#x}");
            if code & NAN != NAN {
                assert_eq!(encode(decode(code)), code, "{code:#x}");
            }
        }
    }

    #[test]
    fn encoding_is_the_nearest_code_and_the_other_crate() {
        for value in sweep() {
            let code = encode(value);
            if value.is_nan() {
                assert_eq!(code & NAN, NAN, "{value}");
                continue;
            }
            assert_eq!(code, nearest(value), "{value}");
            assert_eq!(code, F8E4M3::from_f32(value).to_bits(), "{value}");
        }
        assert_eq!([encode(f32::INFINITY), encode(f32::NEG_INFINITY), encode(449.0)], [0x7E, 0xFE, 0x7E]);
        assert_eq!([encode(0.0), encode(-0.0), encode(-1e-30)], [0, SIGN, SIGN]);
    }
}
