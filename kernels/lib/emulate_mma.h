// Matrix instructions for emulate.h: a warp's last lane does the work of all, on the other lanes' registers.
//
// mma: products are exact in f32 and are added to the f32 accumulator one at a time in ascending k, each sum rounded to
// nearest even. Tensor cores add several at once with fewer bits: results agree to a tolerance, not bit by bit.
#ifndef LIB_EMULATE_MMA
#define LIB_EMULATE_MMA

namespace emulate {

typedef float Vector8 __attribute__((vector_size(32)));

struct MatrixArgs {
  void* d;
  const void *a, *b;
};
EMULATED const MatrixArgs& matrix_args(const Warp& w, int lane) {
  return *reinterpret_cast<const MatrixArgs*>(w.in[lane]);
}

struct Bf16 {
  typedef uint16_t Bits;
  EMULATED float decode(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }
};
struct Half {
  typedef uint16_t Bits;
  // Exactly: the exponent moves, 2^112 undoes the bias, infinities and NaN get the full exponent.
  EMULATED float decode(uint32_t bits) {
    float value = __builtin_bit_cast(float, (bits & 0x7FFFu) << 13) * 0x1p112f;
    uint32_t special = (bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | special | (bits & 0x8000u) << 16);
  }
};
struct E4m3 {
  typedef uint8_t Bits;
  EMULATED float decode(uint32_t bits) {
    float value = __builtin_bit_cast(float, (bits & 0x7Fu) << 20) * 0x1p120f;
    uint32_t nan = (bits & 0x7Fu) == 0x7Fu ? 0x7FC00000u : 0u;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | nan | (bits & 0x80u) << 24);
  }
};

// The fragments' places are in lib/ptx.cuh; a register holds N consecutive k, and there are K = 8 N of them.
template <class T>
static void do_mma(Warp& w, unsigned who) {
  typedef typename T::Bits Bits;
  constexpr int N = 4 / sizeof(Bits), K = 8 * N;
  if (who != EVERY_LANE) fail("mma by lanes 0x%08x: all 32 must take part", who);
  Bits a_bits[16 * K], b_bits[8 * K];  // row by row
  float a[16 * K];
  union {
    float at[8 * K];
    Vector8 row[K];
  } b;
  union {
    float at[16][8];
    Vector8 row[16];
  } d;
  for (int lane = 0; lane < 32; lane++) {
    const MatrixArgs& args = matrix_args(w, lane);
    const uint32_t *a_words = static_cast<const uint32_t*>(args.a), *b_words = static_cast<const uint32_t*>(args.b);
    const float* d_words = static_cast<const float*>(args.d);
    int g = lane / 4, t = lane % 4;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) memcpy(&a_bits[(g + i % 2 * 8) * K + N * t + i / 2 * 4 * N], &a_words[i], 4);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * N; i++)
      b_bits[(N * t + i / N * 4 * N + i % N) * 8 + g] = Bits(b_words[i / N] >> (32 / N * (i % N)));
    memcpy(&d.at[g][2 * t], d_words, 8);
    memcpy(&d.at[g + 8][2 * t], d_words + 2, 8);
  }
  for (int i = 0; i < 16 * K; i++) a[i] = T::decode(a_bits[i]);
  for (int i = 0; i < 8 * K; i++) b.at[i] = T::decode(b_bits[i]);
  for (int row = 0; row < 16; row += 8) {
    Vector8 sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sum[i] = d.row[row + i];
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) sum[i] += a[(row + i) * K + k] * b.row[k];
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) d.row[row + i] = sum[i];
  }
  for (int lane = 0; lane < 32; lane++) {
    float* to = static_cast<float*>(matrix_args(w, lane).d);
    memcpy(to, &d.at[lane / 4][lane % 4 * 2], 8);
    memcpy(to + 2, &d.at[lane / 4 + 8][lane % 4 * 2], 8);
  }
}

template <bool transposed>
static void do_ldmatrix(Warp& w, unsigned who) {
  if (who != EVERY_LANE) fail("ldmatrix by lanes 0x%08x: all 32 must take part", who);
  for (int i = 0; i < 4; i++) {
    uint16_t tile[8][8];
    for (int row = 0; row < 8; row++) memcpy(tile[row], matrix_args(w, i * 8 + row).a, 16);
    for (int lane = 0; lane < 32; lane++) {
      int g = lane / 4, t = lane % 4 * 2;
      uint32_t low = transposed ? tile[t][g] : tile[g][t], high = transposed ? tile[t + 1][g] : tile[g][t + 1];
      static_cast<uint32_t*>(matrix_args(w, lane).d)[i] = low | high << 16;
    }
  }
}

static const Collective LDMATRIX{"ldmatrix", do_ldmatrix<false>}, LDMATRIX_TRANS{"ldmatrix.trans", do_ldmatrix<true>},
    MMA_BF16{"mma bf16", do_mma<Bf16>}, MMA_F16{"mma f16", do_mma<Half>}, MMA_E4M3{"mma e4m3", do_mma<E4m3>};

EMULATED void matrix(const Collective* op, void* d, const void* a, const void* b) {
  MatrixArgs args{d, a, b};
  together(op, EVERY_LANE, reinterpret_cast<uint64_t>(&args));
}

EMULATED void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16) {
  matrix(is_bf16 ? &MMA_BF16 : &MMA_F16, d, a, b);
}
EMULATED void mma_e4m3_16832(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  matrix(&MMA_E4M3, d, a, b);
}

EMULATED void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix from %p, not a multiple of 16 bytes", row);
  matrix(transposed ? &LDMATRIX_TRANS : &LDMATRIX, r, row, nullptr);
}

EMULATED uint32_t e4m3x2_to_f16x2(uint32_t pair) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; i++) {
    uint32_t code = pair >> (8 * i) & 0xFFu, magnitude = code & 0x7Fu, half = (magnitude << 7) + (8u << 10);
    // Below 2^-6 the value is a multiple m of 2^-9, which half holds as a normal number.
    if (magnitude < 8) {
      unsigned top = magnitude ? 31 - __builtin_clz(magnitude) : 0;
      half = magnitude ? (top + 6) << 10 | ((magnitude << (10 - top)) & 0x3FFu) : 0;
    }
    if (magnitude == 0x7F) half = 0x7FFF;
    halves |= (half | (code & 0x80u) << 8) << (16 * i);
  }
  return halves;
}

}  // namespace emulate

#endif
