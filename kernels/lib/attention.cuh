// What the attention kernels share: the paged cache, pages from global to shared memory, the running softmax, e4m3 to bf16.
//
// All of them keep scores in units of log2: s = q.k * scale with scale = log2(e) / sqrt(head_dim), times k's scale where
// keys are codes. A row's running (max, sum) is over exp2(s - max), so one multiply-add and one ex2 make a weight.
#ifndef LIB_ATTENTION
#define LIB_ATTENTION
#include "lib/ptx.cuh"

// As DEVICE, for members.
#define METHOD __device__ __forceinline__

constexpr int PAGE_TOKENS = 64;

// The step's sequences and their pages, as they lie in device memory: nothing in it is trusted.
struct Sequences {
  const int* contexts;
  const int* table;  // [sequences, table_cols] pages; below 0 in a sequence's first place: inert
  int table_cols;
  int pages;  // of the cache
  int kv_heads;
  int group;  // query heads of a kv head

  // Whether the sequence is graph padding: its rows are zero.
  METHOD bool inert(int sequence) const { return table[int64_t(sequence) * table_cols] < 0; }

  // The page of tokens 64 index.. of a sequence; -1 where there is none inside the cache, and its tokens are left out.
  METHOD int page(int sequence, int index) const {
    int page = table[int64_t(sequence) * table_cols + index];
    return unsigned(page) < unsigned(pages) ? page : -1;
  }

  // Tokens that can be seen of `tokens`: no more than the table has room for.
  METHOD int visible(int64_t tokens) const {
    int64_t room = int64_t(table_cols) * PAGE_TOKENS;
    return int(tokens < 0 ? 0 : tokens < room ? tokens : room);
  }
};

DEVICE float minus_infinity() { return bits_f32(0xFF800000u); }

// 2^x; results below 2^-126 are 0.
DEVICE float exp2_fast(float x) {
#ifdef HIGHWATER_EMULATE
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Two f32 as a pair of IEEE halves, `low` in the low half.
DEVICE uint32_t pack_f16(float low, float high) {
#ifdef HIGHWATER_EMULATE
  _Float16 pair[2] = {_Float16(low), _Float16(high)};
  uint32_t bits;
  __builtin_memcpy(&bits, pair, 4);
  return bits;
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// What the products are taken in. Pages of bf16: bf16. Pages of codes: half, to which codes widen exactly in one instruction
// where the arch has it; queries and weights keep more bits in half than in bf16, once they are scaled into its range.
// Weights are 2^BIAS times themselves, so that those down to 2^-29 of the largest stay normal numbers.
template <bool CODES>
struct Operands {
  static constexpr int BIAS = 0;
  METHOD static uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  METHOD static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16(d, a, b); }
};
template <>
struct Operands<true> {
  static constexpr int BIAS = 15;
  METHOD static uint32_t pack(float low, float high) { return pack_f16(low, high); }
  METHOD static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16(d, a, b); }
};

// Four e4m3 codes (lowest byte first) as pairs of halves 0, 1 and 2, 3, exactly; NaN stays NaN.
DEVICE void widen(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = e4m3x2_to_f16x2(codes);
  high = e4m3x2_to_f16x2(codes >> 16);
}

// Turns ROWS bf16 queries in shared memory into halves, each row times the power of two that brings its largest element to
// 2^13..2^14: elements down to 2^-27 of that keep all their bits. factors[row] undoes it. By whole blocks, eight threads a
// row; a barrier must follow.
template <int D, int PITCH, int ROWS, int THREADS>
DEVICE void halve_queries(bf16* queries, float* factors) {
  static_assert(ROWS * 8 % THREADS == 0, "warps take part as a whole");
  int at = int(threadIdx.x) % 8;
#pragma unroll 1
  for (int row = int(threadIdx.x) / 8; row < ROWS; row += THREADS / 8) {
    uint32_t* words = reinterpret_cast<uint32_t*>(queries + row * PITCH);
    uint32_t most = 0;
    for (int i = at; i < D / 2; i += 8) {
      uint32_t low = words[i] & 0x7FFFu, high = words[i] >> 16 & 0x7FFFu;
      most = low > most ? low : most;
      most = high > most ? high : most;
    }
#pragma unroll
    for (int by = 1; by < 8; by *= 2) {
      uint32_t other = __shfl_xor_sync(ALL_LANES, most, by);
      most = other > most ? other : most;
    }
    // Both powers are f32's; what is smaller than 2^-113 altogether is of no consequence.
    uint32_t exponent = most >> 7 < 14 ? 14 : most >> 7;
    float factor = bits_f32((267 - exponent) << 23);
    for (int i = at; i < D / 2; i += 8) words[i] = pack_f16(bf16_low(words[i]) * factor, bf16_high(words[i]) * factor);
    if (at == 0) factors[row] = bits_f32((exponent - 13) << 23);
  }
}

// Where one kv head's tokens of a page begin: tokens are kv_heads * D elements apart.
template <class KV, int D>
DEVICE const unsigned char* tokens_of(const KV* cache, int page, int kv_heads, int kv_head, int first = 0) {
  int64_t token = int64_t(page < 0 ? 0 : page) * PAGE_TOKENS + first;
  return reinterpret_cast<const unsigned char*>(cache + (token * kv_heads + kv_head) * D);
}

// Starts the copy of TOKENS rows of ROW_BYTES to shared memory; rows from `count` on become zeros and are not read.
template <int TOKENS, int ROW_BYTES, int PITCH_BYTES, int THREADS>
DEVICE void copy_tokens(unsigned char* shared, const unsigned char* from, unsigned token_bytes, int count) {
  constexpr int CHUNKS = ROW_BYTES / 16, STEP = THREADS / CHUNKS;
  if constexpr (THREADS % CHUNKS == 0 && TOKENS % STEP == 0) {
    int token = int(threadIdx.x) / CHUNKS, at = int(threadIdx.x) % CHUNKS * 16;
    shared += token * PITCH_BYTES + at;
    from += unsigned(token) * token_bytes + at;
    // Addresses are added up: kept from page to page they would take the registers of the accumulators.
#pragma unroll
    for (int first = 0; first < TOKENS; first += STEP) {
      cp_async16(shared + first * PITCH_BYTES, from, first + token < count ? 16 : 0);
      from += unsigned(STEP) * token_bytes;
    }
  } else {
#pragma unroll 2
    for (int i = int(threadIdx.x); i < TOKENS * CHUNKS; i += THREADS) {
      int token = i / CHUNKS, at = i % CHUNKS * 16;
      bool there = token < count;
      cp_async16(shared + token * PITCH_BYTES + at, from + (there ? unsigned(token) * token_bytes : 0u) + at,
                 there ? 16 : 0);
    }
  }
}

// The sum over the four lanes that share a row of a fragment; the maximum over them.
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// The running softmax of a fragment's two rows, g and g + 8. `sum` is this lane's part until quad_sum.
struct Running {
  float max[2], sum[2];

  METHOD void start() {
    max[0] = max[1] = minus_infinity();
    sum[0] = sum[1] = 0.0f;
  }

  // Turns scores (hidden ones are -infinity) of N tiles of 8 tokens, times each row's scale, into 2^BIAS times weights, and
  // scales what was accumulated before to the new maximum. Tiles nobody sees change nothing, not even by rounding.
  template <int BIAS, int N, int O>
  METHOD void add(float (&s)[N][4], float (&acc)[O][4], const float (&scale)[2]) {
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float most = minus_infinity();
#pragma unroll
      for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      float raised = fmaxf(max[half], quad_max(most) * scale[half]);
      // A row that has seen nothing yet: any finite reference gives weights of 0.
      float reference = raised == minus_infinity() ? 0.0f : raised;
      shrink[half] = exp2_fast(max[half] - reference);
      reference -= float(BIAS);
      max[half] = raised;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[n][e] = exp2_fast(fmaf(s[n][e], scale[half], -reference));
          added += s[n][e];
        }
      }
      sum[half] = fmaf(sum[half], shrink[half], added);
    }
    if (!__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < O; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) acc[n][e] *= shrink[e / 2];
    }
  }

  // What row `half`'s accumulators are multiplied by at the end; 0 for a row that saw nothing.
  METHOD float finish(int half, float v_scale) const {
    float total = quad_sum(sum[half]);
    return total == 0.0f ? 0.0f : v_scale / total;
  }
};

#endif
