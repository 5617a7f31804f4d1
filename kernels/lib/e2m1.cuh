// f32 to e2m1 codes.
#ifndef LIB_E2M1
#define LIB_E2M1
#include "lib/base.cuh"

// The code nearest to x (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign), ties to the even code, 6 at most; NaN gives 6 as well.
DEVICE uint32_t f32_to_e2m1(float x) {
  uint32_t bits = f32_bits(x), sign = bits >> 28 & 8u;
  float magnitude = fminf(bits_f32(bits & 0x7FFFFFFFu), 6.0f);  // of a NaN and 6 that is 6
  // Below 1 codes count halves: those are the unit in the last place of 2^22.
  uint32_t halves = f32_bits(magnitude + 4194304.0f) - f32_bits(4194304.0f);
  // From 1 on one fraction bit stays of 23, and a bias of 1 of 127; a carry runs into the exponent.
  uint32_t m = f32_bits(magnitude);
  uint32_t normal = ((m + 0x1FFFFFu + (m >> 22 & 1u)) >> 22) - (126u << 1);
  return sign | (magnitude < 1.0f ? halves : normal);
}

#endif
