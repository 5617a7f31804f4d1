// exp, ln and exponential variates in binary32 with every operation written down: as src/num/elementary.rs, bit for bit,
// in a file that is compiled without contraction (multiplications and additions round one by one, divisions are IEEE).
#ifndef LIB_ELEMENTARY
#define LIB_ELEMENTARY
#include "lib/base.cuh"

constexpr float LN2_HI = 0.6933594f;
constexpr float LN2_LO = -2.1219444e-4f;

// e^x for x <= 0, within 2e-7 relative; 0 below -86 and for NaN.
DEVICE float exact_exp(float x) {
  if (!(x >= -86.0f)) return 0.0f;
  int n = int(x * 1.44269504088896341f - 0.5f);
  float nf = float(n);
  float r = (x - nf * LN2_HI) - nf * LN2_LO;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * bits_f32(uint32_t(n + 127) << 23);
}

// ln x for a positive normal x, within 3e-7 relative, near 1 too.
DEVICE float exact_ln(float x) {
  uint32_t bits = f32_bits(x);
  int e = int(bits >> 23) - 127;
  float m = bits_f32((bits & 0x007FFFFFu) | 0x3F800000u);
  if (m > 1.41421356237309505f) {
    m *= 0.5f;
    e += 1;
  }
  float f = m - 1.0f;
  float s = f / (2.0f + f);
  float q = s * s;
  float p = 2.0f / 11.0f;
  p = p * q + 2.0f / 9.0f;
  p = p * q + 2.0f / 7.0f;
  p = p * q + 2.0f / 5.0f;
  p = p * q + 2.0f / 3.0f;
  float ln_m = 2.0f * s + s * (q * p);
  float ef = float(e);
  return ef * LN2_HI + (ef * LN2_LO + ln_m);
}

// A standard exponential variate: -ln(1 - u), u = bits / 2^64. At least u (1 - 1e-6).
DEVICE float exponential(uint64_t bits) {
  float u = fminf(float(bits | 1u) * (1.0f / 18446744073709551616.0f), 1.0f - 1.0f / 16777216.0f);
  float y = 1.0f - u;
  float lost = (1.0f - y) - u;
  return -(exact_ln(y) + lost / y);
}

#endif
