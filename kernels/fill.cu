// Seeded values: element i of a stream is a function of (key, i) alone, the same bits as the CPU arm's. Compiled with
// --fmad=false. A thread makes 16 aligned bytes at a time; a range that starts elsewhere in them, or elsewhere in a
// generator's block of four, is shifted, never realigned. Weights are made here, which products read before they wait for
// earlier kernels: no kernel of this file lets the next one begin before it is done.
#include "lib/e2m1.cuh"
#include "lib/elementary.cuh"
#include "lib/philox.cuh"
#include "lib/ptx.cuh"
#include "lib/vector.cuh"

// 16-byte windows of one thread: enough that its key schedule and addresses cost nothing.
constexpr int WINDOWS = 8;
constexpr int THREADS = 256;

// Writes the T's of `window` that lie in 0..n; the first of them is number `from`, which may be negative.
template <class T>
DEVICE void store_window(T* dst, int64_t from, int64_t n, Words4 window) {
  constexpr int PER = 16 / int(sizeof(T));
  if (from >= 0 && from + PER <= n) {
    store16(dst + from, window);
    return;
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    uint32_t word = window.w[i * int(sizeof(T)) / 4] >> 8 * (i * int(sizeof(T)) % 4);
    if (from + i >= 0 && from + i < n) {
      if constexpr (sizeof(T) == 4) dst[from + i] = T(bits_f32(word));
      if constexpr (sizeof(T) == 2) dst[from + i] = T{uint16_t(word)};
      if constexpr (sizeof(T) == 1) dst[from + i] = T(word);
    }
  }
}

// COUNT words of the stream, the first of them word PHASE of block `block`.
template <int COUNT, int PHASE>
DEVICE void stream_words(uint32_t k0, uint32_t k1, uint64_t block, uint32_t (&words)[COUNT]) {
#pragma unroll
  for (int b = 0; b < CEIL_DIV(PHASE + COUNT, 4); ++b) {
    // Block numbers have 62 bits: what wraps is what comes before element 0.
    uint32_t high = uint32_t((block + b) >> 32) & 0x3FFFFFFFu;
    Words4 four = philox4x32(k0, k1, uint32_t(block + b), high, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = 4 * b + i - PHASE;
      if (at >= 0 && at < COUNT) words[at] = four.w[i];
    }
  }
}

template <int PHASE, int ELEMENTS, class T, class Make>
DEVICE void draw_phase(T* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, int64_t lead, Make make) {
  constexpr int PER = 16 / int(sizeof(T)), COUNT = PER * ELEMENTS;
  int64_t at = (int64_t(blockIdx.x) * (THREADS * WINDOWS) + threadIdx.x) * PER - lead;
  for (int i = 0; i < WINDOWS && at < n; ++i, at += THREADS * PER) {
    uint32_t words[COUNT];
    // Elements before the first are drawn for nothing, and may wrap round.
    stream_words<COUNT, PHASE>(k0, k1, (first + uint64_t(at) * ELEMENTS) >> 2, words);
    store_window(dst, at, n, make(words));
  }
}

// dst[j] for j in 0..n from elements first + ELEMENTS j and on; `make` turns the words of 16 bytes of T's into them.
template <int ELEMENTS, class T, class Make>
DEVICE void draw(T* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, Make make) {
  int64_t lead = int64_t(uint64_t(dst) & 15u) / int64_t(sizeof(T));
  switch ((first - uint64_t(lead) * ELEMENTS) & 3u) {
    case 0: return draw_phase<0, ELEMENTS>(dst, n, k0, k1, first, lead, make);
    case 1: return draw_phase<1, ELEMENTS>(dst, n, k0, k1, first, lead, make);
    case 2: return draw_phase<2, ELEMENTS>(dst, n, k0, k1, first, lead, make);
    default: return draw_phase<3, ELEMENTS>(dst, n, k0, k1, first, lead, make);
  }
}

// 16 bytes of T's, each `value` of one word.
template <class T, class Value>
DEVICE Words4 floats_of(const uint32_t (&words)[PER16<T>], Value value) {
  Words4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out.w[i] = f32_bits(value(words[i]));
    } else {
      out.w[i] = pack_bf16(value(words[2 * i]), value(words[2 * i + 1]));
    }
  }
  return out;
}

// value = mean + std n; rounded to bf16 before it is stored where `bf16_first`.
template <class T>
DEVICE void draw_normal(T* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float mean, float std,
                        int bf16_first) {
  draw<1>(dst, n, k0, k1, first, [=](const uint32_t(&words)[PER16<T>]) {
    return floats_of<T>(words, [=](uint32_t word) {
      float v = mean + std * normal(word);
      return bf16_first ? rounded<bf16>(v) : v;
    });
  });
}

// value = ln(low + span (1 - u)).
template <class T>
DEVICE void draw_log_uniform(T* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float low, float span) {
  draw<1>(dst, n, k0, k1, first, [=](const uint32_t(&words)[PER16<T>]) {
    return floats_of<T>(words, [=](uint32_t word) { return exact_ln(low + span * (1.0f - uniform(word))); });
  });
}

template <class T>
DEVICE void put_constant(T* dst, int64_t n, float value) {
  constexpr int PER = PER16<T>;
  int64_t lead = int64_t(uint64_t(dst) & 15u) / int64_t(sizeof(T));
  uint32_t word = sizeof(T) == 4 ? f32_bits(value) : pack_bf16(value, value);
  int64_t at = (int64_t(blockIdx.x) * (THREADS * WINDOWS) + threadIdx.x) * PER - lead;
  for (int i = 0; i < WINDOWS && at < n; ++i, at += THREADS * PER) {
    store_window(dst, at, n, Words4{{word, word, word, word}});
  }
}

// n of a quantised value: the sum of a word's bytes less its mean, -510 to 510.
DEVICE float centred(uint32_t word) { return float(int(byte_sum(word)) - 510); }

KERNEL LAUNCH_BOUNDS(THREADS) normal_f32(float* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float mean,
                                         float std, int bf16_first) {
  wait_for_earlier_kernels();
  draw_normal(dst, n, k0, k1, first, mean, std, bf16_first);
}
EXPORT(normal_f32)

KERNEL LAUNCH_BOUNDS(THREADS) normal_bf16(bf16* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float mean,
                                          float std, int bf16_first) {
  wait_for_earlier_kernels();
  draw_normal(dst, n, k0, k1, first, mean, std, bf16_first);
}
EXPORT(normal_bf16)

KERNEL LAUNCH_BOUNDS(THREADS) log_uniform_f32(float* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float low,
                                              float span) {
  wait_for_earlier_kernels();
  draw_log_uniform(dst, n, k0, k1, first, low, span);
}
EXPORT(log_uniform_f32)

KERNEL LAUNCH_BOUNDS(THREADS) log_uniform_bf16(bf16* dst, int64_t n, uint32_t k0, uint32_t k1, uint64_t first, float low,
                                               float span) {
  wait_for_earlier_kernels();
  draw_log_uniform(dst, n, k0, k1, first, low, span);
}
EXPORT(log_uniform_bf16)

KERNEL LAUNCH_BOUNDS(THREADS) constant_f32(float* dst, int64_t n, float value) {
  wait_for_earlier_kernels();
  put_constant(dst, n, value);
}
EXPORT(constant_f32)

KERNEL LAUNCH_BOUNDS(THREADS) constant_bf16(bf16* dst, int64_t n, float value) {
  wait_for_earlier_kernels();
  put_constant(dst, n, value);
}
EXPORT(constant_bf16)

// Positive scales (1 + m / 128) 2^exponent, m the top 7 bits of the word; `unit` is 2^(exponent - 7).
KERNEL LAUNCH_BOUNDS(THREADS) scales_f32(float* dst, int64_t n, uint32_t k0, uint32_t k1, float unit) {
  wait_for_earlier_kernels();
  draw<1>(dst, n, k0, k1, 0, [=](const uint32_t(&words)[4]) {
    return floats_of<float>(words, [=](uint32_t word) { return float(128 + (word >> 25)) * unit; });
  });
}
EXPORT(scales_f32)

// 16 codes, `code` of a word each.
template <class Code>
DEVICE Words4 bytes_of(const uint32_t (&words)[16], Code code) {
  Words4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.w[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) out.w[i] |= code(words[4 * i + j]) << 8 * j;
  }
  return out;
}

// n / 2 to e4m3; at most 255, so nothing saturates.
KERNEL LAUNCH_BOUNDS(THREADS) codes_e4m3(uint8_t* dst, int64_t n, uint32_t k0, uint32_t k1) {
  wait_for_earlier_kernels();
  draw<1>(dst, n, k0, k1, 0, [=](const uint32_t(&words)[16]) {
    return bytes_of(words, [](uint32_t word) { return f32_to_e4m3(centred(word) * 0.5f); });
  });
}
EXPORT(codes_e4m3)

// 96 to 352, as e4m3.
KERNEL LAUNCH_BOUNDS(THREADS) codes_scale_e4m3(uint8_t* dst, int64_t n, uint32_t k0, uint32_t k1) {
  wait_for_earlier_kernels();
  draw<1>(dst, n, k0, k1, 0, [=](const uint32_t(&words)[16]) {
    return bytes_of(words, [](uint32_t word) { return 0x6Cu + (word >> 28); });
  });
}
EXPORT(codes_scale_e4m3)

// n / 44 to e2m1, two a byte, the even element in the low nibble. Midpoints are 11, 33, 55, 77, 110, 154 and 220 times
// 1 / 44: the products of those with the rounded 1 / 44 are exact, and no other integer is near one.
KERNEL LAUNCH_BOUNDS(THREADS) codes_e2m1(uint8_t* dst, int64_t n, uint32_t k0, uint32_t k1) {
  wait_for_earlier_kernels();
  draw<2>(dst, n, k0, k1, 0, [=](const uint32_t(&words)[32]) {
    Words4 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.w[i] = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out.w[i] |= f32_to_e2m1(centred(words[8 * i + j]) * (1.0f / 44.0f)) << 4 * j;
      }
    }
    return out;
  });
}
EXPORT(codes_e2m1)

// One tensor of which whole rows are drawn. Row j of the list is elements j x `elements` and on of the stream.
struct PrimeTarget {
  uint64_t address;
  int64_t elements;   // of a row
  int64_t rows_from;  // the first of its entries in the list of row numbers
  int64_t rows;       // how many
  uint32_t k0, k1;
  float std, scale;
  int kind;  // 0 f32, 1 bf16, 2 e4m3 codes of value / scale
  int unused;
};

// Near-normal values in all rows of all targets: blocks along x cut a row, y takes rows, z is the target.
KERNEL LAUNCH_BOUNDS(THREADS) prime(const PrimeTarget* targets, const int* rows) {
  wait_for_earlier_kernels();
  PrimeTarget t = targets[blockIdx.z];
  for (int64_t j = blockIdx.y; j < t.rows; j += gridDim.y) {
    int64_t at = int64_t(rows[t.rows_from + j]) * t.elements;
    uint64_t first = uint64_t(j) * uint64_t(t.elements);
    if (t.kind == 0) {
      draw_normal(reinterpret_cast<float*>(t.address) + at, t.elements, t.k0, t.k1, first, 0.0f, t.std, 0);
    } else if (t.kind == 1) {
      draw_normal(reinterpret_cast<bf16*>(t.address) + at, t.elements, t.k0, t.k1, first, 0.0f, t.std, 0);
    } else {
      draw<1>(reinterpret_cast<uint8_t*>(t.address) + at, t.elements, t.k0, t.k1, first, [=](const uint32_t(&words)[16]) {
        return bytes_of(words, [=](uint32_t word) { return f32_to_e4m3((0.0f + t.std * normal(word)) / t.scale); });
      });
    }
  }
}
EXPORT(prime)
