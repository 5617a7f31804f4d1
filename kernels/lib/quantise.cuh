// What quantising a row of activations is made of; the order of operations is that of src/ops/quantise.rs, and so are
// the bits: divisions are IEEE, nothing here can be contracted.
#ifndef LIB_QUANTISE
#define LIB_QUANTISE
#include "lib/e2m1.cuh"
#include "lib/ptx.cuh"

// Bits of |x|: they order as magnitudes do, with NaN above all, so that an integer maximum keeps a NaN.
DEVICE uint32_t magnitude(float x) { return f32_bits(x) & 0x7FFFFFFFu; }

// The greatest magnitude of eight values and `most`.
DEVICE uint32_t magnitude8(const float (&v)[8], uint32_t most) {
#pragma unroll
  for (int i = 0; i < 8; i++) most = magnitude(v[i]) > most ? magnitude(v[i]) : most;
  return most;
}

// The largest of all lanes that differ in the lane bits below `lanes` (a power of two).
template <int lanes>
DEVICE uint32_t lanes_max(uint32_t x) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset >>= 1) {
    uint32_t other = __shfl_xor_sync(ALL_LANES, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// The scale of values of this largest magnitude, per token or per group.
DEVICE float fp8_scale(float amax) {
  float scale = amax / 448.0f;
  return scale == 0.0f ? bits_f32(0x34000000u) : scale;  // 2^-23
}

// The e4m3 codes of V values (a multiple of 4) under a scale, to an address that is a multiple of V.
template <int V>
DEVICE void store_e4m3(uint8_t* codes, const float (&x)[V], float scale) {
  uint32_t words[V / 4];
#pragma unroll
  for (int i = 0; i < V / 4; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[i] |= f32_to_e4m3(x[4 * i + j] / scale) << 8 * j;
  }
  if constexpr (V == 8) {
    *reinterpret_cast<Words2*>(codes) = Words2{{words[0], words[1]}};
  } else {
#pragma unroll
    for (int i = 0; i < V / 4; ++i) reinterpret_cast<uint32_t*>(codes)[i] = words[i];
  }
}

// The e4m3 code of the scale of 16 values of this largest magnitude, under a global that divides or multiplies.
DEVICE uint32_t nvfp4_scale_code(float amax, float global, bool divides) {
  float wanted = divides ? global * (amax / 6.0f) : amax / (6.0f * global);
  uint32_t code = f32_to_e4m3(wanted);
  return code == 0 ? 0x20u : code;
}

// The scale that code stands for.
DEVICE float nvfp4_scale(uint32_t code, float global, bool divides) {
  float scale = e4m3_to_f32(code);
  return divides ? scale / global : scale * global;
}

#endif
