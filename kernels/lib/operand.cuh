// How each stored form of a matrix is read: element by element in f32 (the order of operations of src/ops/weight.rs), and
// 16 bytes of codes at a time as the operands of an mma.
//
// | form            | codes of a row             | scales                                                      |
// |---|---|---|
// | FORM_F32        | K f32                      |                                                             |
// | FORM_BF16       | K bf16                     |                                                             |
// | FORM_FP8        | K e4m3                     | f32, one of each row, or one for all                        |
// | FORM_FP8_BLOCK  | K e4m3                     | f32 [block rows, ceil(K/128)]                               |
// | FORM_NVFP4      | K/2 bytes, even k low      | e4m3 [rows, K/16], and an f32 global of each row, or one    |
#ifndef LIB_OPERAND
#define LIB_OPERAND
#include "lib/ptx.cuh"

constexpr int FORM_F32 = 0;
constexpr int FORM_BF16 = 1;
constexpr int FORM_FP8 = 2;
constexpr int FORM_FP8_BLOCK = 3;
constexpr int FORM_NVFP4 = 4;

// Rows and columns of an FP8 block; columns that share an NVFP4 scale.
constexpr int FP8_BLOCK = 128;
constexpr int NVFP4_GROUP = 16;

// The row of a block grid that covers `row`, where blocks start anew after every `segment_rows` rows. The first segment,
// which is often all, and rows that are segments need no division.
DEVICE int block_row(int row, int segment_rows) {
  if (segment_rows == 1) return row;
  if (row < segment_rows) return int(unsigned(row) / FP8_BLOCK);
  int segment = row / segment_rows, inside = row - segment * segment_rows;
  return segment * CEIL_DIV(segment_rows, FP8_BLOCK) + inside / FP8_BLOCK;
}

// --- element by element ---------------------------------------------------------------------------------------------

// A matrix of K columns as it is stored. Pitches are in elements: NVFP4's codes are dense.
struct Matrix {
  const void* codes;
  int64_t pitch;
  const void* scales;       // of blocks (f32) or of groups (e4m3)
  const float* row_scales;  // of rows; null where one serves all
  float one;                // that one
  int segment_rows;
  int cols;
  int form;
  int divides;  // whether an NVFP4 global divides
};

DEVICE float element(const Matrix& m, int64_t row, int k) {
  switch (m.form) {
    case FORM_F32:
      return static_cast<const float*>(m.codes)[row * m.pitch + k];
    case FORM_BF16:
      return to_f32(static_cast<const bf16*>(m.codes)[row * m.pitch + k]);
    case FORM_FP8: {
      float value = e4m3_to_f32(static_cast<const uint8_t*>(m.codes)[row * m.pitch + k]);
      return value * (m.row_scales ? m.row_scales[row] : m.one);
    }
    case FORM_FP8_BLOCK: {
      float value = e4m3_to_f32(static_cast<const uint8_t*>(m.codes)[row * m.pitch + k]);
      int64_t scale_row = block_row(int(row), m.segment_rows);
      return value * static_cast<const float*>(m.scales)[scale_row * CEIL_DIV(m.cols, FP8_BLOCK) + k / FP8_BLOCK];
    }
    default: {
      int64_t at = row * m.cols + k;
      uint32_t pair = static_cast<const uint8_t*>(m.codes)[at >> 1];
      float value = e2m1_to_f32(at & 1 ? pair >> 4 : pair);
      float scale = e4m3_to_f32(static_cast<const uint8_t*>(m.scales)[at / NVFP4_GROUP]);
      float global = m.row_scales ? m.row_scales[row] : m.one;
      return value * (m.divides ? scale / global : scale * global);
    }
  }
}

// --- 16 bytes at a time ---------------------------------------------------------------------------------------------

// Elements in 16 bytes of codes.
template <int FORM>
struct Piece {
  static constexpr int ELEMENTS = FORM == FORM_BF16 ? 8 : FORM == FORM_NVFP4 ? 32 : 16;
};

// NVFP4 pieces decode to 2^-9 of their values, so that code times scale needs one multiplication: 2^9 for each such
// operand belongs to the scale of the result.
constexpr int NVFP4_SHIFT = 9;
constexpr float NVFP4_UNSHIFT = 512.0f;

// Four of the eight bytes of a (0 .. 3) and b (4 .. 7), by the selector's nibbles from the lowest; with a nibble's high bit
// the selected byte's sign bit, eight times.
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
#ifdef HIGHWATER_EMULATE
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t byte = uint32_t(bytes >> (8 * (select >> 4 * i & 7)) & 0xFFu);
    if (select >> 4 * i & 8) byte = byte & 0x80u ? 0xFFu : 0;
    d |= byte << 8 * i;
  }
  return d;
#else
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
  return d;
#endif
}

// Makes the compiler keep a value instead of computing it again where it is used.
DEVICE void opaque(int& x) {
#ifndef HIGHWATER_EMULATE
  asm volatile("" : "+r"(x));
#endif
}

// Products of two pairs of bf16, subnormals kept; exact where a product fits bf16.
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#ifdef HIGHWATER_EMULATE
  return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
#else
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
#endif
}

// Four e4m3 codes as two pairs of halves, exactly; NaN stays NaN.
DEVICE void e4m3x4_to_f16(uint32_t codes, uint32_t& low, uint32_t& high) {
#if HAS_FP8 && !defined(HIGHWATER_EMULATE)
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = e4m3x2_to_f16x2(codes);
  high = e4m3x2_to_f16x2(codes >> 16);
#endif
}

// Four e4m3 codes as f32, exactly; NaN stays NaN.
DEVICE void e4m3x4_to_f32(uint32_t codes, float (&v)[4]) {
#if HAS_FP8 && !defined(HIGHWATER_EMULATE)
  uint32_t pairs[2];
  e4m3x4_to_f16(codes, pairs[0], pairs[1]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
        : "r"(pairs[i]));
  }
#else
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = e4m3_to_f32(codes >> 8 * i & 0xFFu);
#endif
}

// Four e4m3 codes as two pairs of bf16, exactly; NaN stays NaN.
DEVICE void e4m3x4_to_bf16(uint32_t codes, uint32_t& low, uint32_t& high) {
#if HAS_FP8
  float v[4];
  e4m3x4_to_f32(codes, v);
  low = pack_bf16(v[0], v[1]);
  high = pack_bf16(v[2], v[3]);
#else
  // Seven bits move to the bottom of bf16's exponent and the top of its mantissa; 2^120 undoes the bias. NaN is put back.
  uint32_t pairs[2] = {permute(codes, 0, 0x1400), permute(codes, 0, 0x3424)};
  uint32_t nan = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t t = pairs[i];
    t = mul_bf16x2((t >> 4 & 0x07F007F0u) | (t & 0x80008000u), 0x7B807B80u);
    if (nan & (i == 0 ? 0x80u : 0x800000u)) t |= 0x7FFFu;
    if (nan & (i == 0 ? 0x8000u : 0x80000000u)) t |= 0x7FFF0000u;
    (i == 0 ? low : high) = t;
  }
#endif
}

// Two e4m3 scales (low byte first) as pairs of equal bf16, times 2^(126 - NVFP4_SHIFT).
DEVICE void nvfp4_scales(uint32_t codes, uint32_t (&pairs)[2]) {
  const float up = bits_f32((127u + 126u - NVFP4_SHIFT) << 23);
  float v[4];
  e4m3x4_to_f32(codes, v);
  pairs[0] = pack_bf16(v[0] * up, v[0] * up);
  pairs[1] = pack_bf16(v[1] * up, v[1] * up);
}

// Eight e2m1 codes as pairs of nibbles in the low bits of halves, in order: d[i] holds codes 2 i and 2 i + 1.
DEVICE void e2m1x8_spread(uint32_t codes, uint32_t (&d)[4]) {
  uint32_t even = codes & 0x0F0F0F0Fu, odd = codes >> 4 & 0x0F0F0F0Fu;
  // The sign bits of such bytes are zero: where the selector's high bit is set.
  d[0] = permute(even, odd, 0xC480);
  d[1] = permute(even, odd, 0xD591);
  d[2] = permute(even, odd, 0xE6A2);
  d[3] = permute(even, odd, 0xF7B3);
}

// Such a pair times a scale from nvfp4_scales, as bf16, exactly. Three bits move to the bottom of bf16's exponent and the
// top of its mantissa, which is 2^-126 of the value, the sign to the top: both by one multiplication.
DEVICE uint32_t e2m1x2_to_bf16(uint32_t nibbles, uint32_t scale) {
  return mul_bf16x2(nibbles * 0x1040u & 0x81C081C0u, scale);
}

// What mma number j takes of a piece: elements 4 j .. 4 j + 3, `low` the first two, `high` the others, as halves where
// HALF_TYPE, else bf16; with CODES e4m3 codes as they are, 8 j .. 8 j + 7. `scales` are an NVFP4 piece's, of its two groups.
template <int FORM, bool HALF_TYPE, bool CODES>
DEVICE void decode(const Words4& piece, const uint32_t (&scales)[2], int j, uint32_t& low, uint32_t& high) {
  if constexpr (CODES) {
    low = piece.w[2 * j];
    high = piece.w[2 * j + 1];
  } else if constexpr (FORM == FORM_BF16) {
    static_assert(!HALF_TYPE, "bf16 does not fit half");
    low = piece.w[2 * j];
    high = piece.w[2 * j + 1];
  } else if constexpr (FORM == FORM_NVFP4) {
    static_assert(!HALF_TYPE, "NVFP4 decodes to bf16");
    uint32_t nibbles[4];
    e2m1x8_spread(piece.w[j / 2], nibbles);
    low = e2m1x2_to_bf16(nibbles[2 * (j % 2)], scales[j / 4]);
    high = e2m1x2_to_bf16(nibbles[2 * (j % 2) + 1], scales[j / 4]);
  } else if constexpr (HALF_TYPE) {
    e4m3x4_to_f16(piece.w[j], low, high);
  } else {
    e4m3x4_to_bf16(piece.w[j], low, high);
  }
}

// 16 bytes of shared memory, read here even where they were read before: not kept in registers in between.
DEVICE Words4 reload16(const void* p) {
#ifdef HIGHWATER_EMULATE
  return load16(p);
#else
  Words4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(shared_address(p)));
  return v;
#endif
}

// UNIT (4 or 16) bytes from global to shared memory where `present`, not through registers; `to` is from shared_address and,
// as `from`, a multiple of UNIT. `bytes` (0 or UNIT) are read, the rest is zeros.
template <int UNIT>
DEVICE void cp_async_if(bool present, uint32_t to, const void* from, int bytes) {
  static_assert(UNIT == 4 || UNIT == 16, "what there is a use for");
#ifdef HIGHWATER_EMULATE
  unsigned char* shared = emulate::dynamic_shared() + to;
  if (present && UNIT == 16) cp_async16(shared, from, bytes);
  if (present && UNIT == 4) {
    uint32_t word = 0;
    __builtin_memcpy(&word, from, bytes);
    __builtin_memcpy(shared, &word, 4);
  }
#else
  if constexpr (UNIT == 16) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(int(present))
                 : "memory");
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], 4, %2;}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(int(present))
                 : "memory");
  }
#endif
}

#endif
