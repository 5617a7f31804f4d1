//! exp and ln in binary32 with every operation written down: multiplication, addition, division, nothing contracted.
//!
//! A device that rounds each of those to nearest gives the same bits, which a math library's functions do not promise;
//! what is drawn from them is then the same token on every device. Both are plain series after an exact reduction, so
//! no table or fitted constant is needed.

/// ln 2 in two parts; `HI` has 10 significant bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Below this [`exp`] is 0: the result would near the subnormals, which some devices flush.
pub const EXP_FLOOR: f32 = -86.0;

/// e^x for x <= 0, within 2e-7 relative; 0 below [`EXP_FLOOR`] and for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of e^r to r^7 (its remainder is under 6e-9).
#[inline]
pub fn exp(x: f32) -> f32 {
    // Truncation of a value at or below -0.5 rounds to the nearest integer, since x is not positive.
    let n = (x * std::f32::consts::LOG2_E - 0.5) as i32;
    let nf = n as f32;
    let r = (x - nf * LN2_HI) - nf * LN2_LO;
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let scale = f32::from_bits(((n.max(-126) + 127) as u32) << 23);
    if x >= EXP_FLOOR { p * scale } else { 0.0 }
}

/// ln x for a positive normal x, within 3e-7 relative, near 1 too.
///
/// x = 2^e m with m in (sqrt(1/2), sqrt(2)], and ln m = 2 artanh(s), s = (m-1)/(m+1), to s^11.
#[inline]
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut e = (bits >> 23) as i32 - 127;
    let mut m = f32::from_bits((bits & 0x007F_FFFF) | 0x3F80_0000);
    if m > std::f32::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let q = s * s;
    let mut p = 2.0 / 11.0;
    for c in [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0] {
        p = p * q + c;
    }
    let ln_m = 2.0 * s + s * (q * p);
    let ef = e as f32;
    ef * LN2_HI + (ef * LN2_LO + ln_m)
}

/// A standard exponential variate from 64 random bits: -ln(1 - u), u = bits / 2^64.
///
/// u is rounded to 24 significant bits wherever it lies, so small values, which win races, keep their relative
/// precision; the result is between 2^-64 and 16.7.
#[inline]
pub fn exponential(bits: u64) -> f32 {
    const BELOW_ONE: f32 = 1.0 - 1.0 / 16_777_216.0;
    const SCALE: f32 = 1.0 / 18_446_744_073_709_551_616.0;
    let u = ((bits | 1) as f32 * SCALE).min(BELOW_ONE);
    let y = 1.0 - u;
    // What y lost to rounding, exactly; then ln(y + lost) = ln y + lost / y to first order.
    let lost = (1.0 - y) - u;
    -(ln(y) + lost / y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_its_bound() {
        for i in 0..860_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2e-7, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-86.001), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(f32::NAN), 0.0);
    }

    #[test]
    fn ln_is_within_its_bound() {
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(0x0080_0000 + i * 1_060);
            let exact = f64::from(x).ln();
            assert!((f64::from(ln(x)) - exact).abs() <= 3e-7 * exact.abs(), "{x}");
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn exponential_is_minus_ln_of_one_minus_u() {
        let cases = (0..64).flat_map(|s| [1u64 << s, 3u64.rotate_left(s), u64::MAX >> s, 0x9E37_79B9_7F4A_7C15 >> s]);
        for bits in cases {
            let u = ((bits | 1) as f64 / 2f64.powi(64)).min(1.0 - 2f64.powi(-24));
            let exact = -(-u).ln_1p();
            let got = f64::from(exponential(bits));
            // Rounding u to 24 bits moves 1 - u by up to 2^-25, which the logarithm magnifies where 1 - u is small.
            let slack = 4e-7 * exact + 2f64.powi(-24) * u / (1.0 - u) * 0.51;
            assert!((got - exact).abs() <= slack, "{bits:#x}: {got} for {exact}");
        }
        assert!(exponential(0) > 0.0);
        assert!(exponential(u64::MAX).is_finite());
    }
}
