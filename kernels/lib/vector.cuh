// Runs of elements between memory and f32 registers, in the widest pieces their size allows, and how rows of such runs
// are spread over threads.
#ifndef LIB_VECTOR
#define LIB_VECTOR
#include "lib/base.cuh"

// Elements of T in 16 bytes.
template <class T>
constexpr int PER16 = 16 / int(sizeof(T));

// V elements from an address that is a multiple of their bytes, or of 16.
template <int V>
DEVICE void load_run(const float* p, float (&x)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      Words4 w = load16(p + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = bits_f32(w.w[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = p[i];
  }
}

template <int V>
DEVICE void load_run(const bf16* p, float (&x)[V]) {
  if constexpr (V % 8 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 8) {
      Words4 w = load16(p + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[i + 2 * j] = bf16_low(w.w[j]);
        x[i + 2 * j + 1] = bf16_high(w.w[j]);
      }
    }
  } else if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      Words2 w = *reinterpret_cast<const Words2*>(p + i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        x[i + 2 * j] = bf16_low(w.w[j]);
        x[i + 2 * j + 1] = bf16_high(w.w[j]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = to_f32(p[i]);
  }
}

// V elements, rounded to the type they are stored in, to an address as load_run takes it.
template <int V>
DEVICE void store_run(float* p, const float (&x)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      Words4 w;
#pragma unroll
      for (int j = 0; j < 4; ++j) w.w[j] = f32_bits(x[i + j]);
      store16(p + i, w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) p[i] = x[i];
  }
}

template <int V>
DEVICE void store_run(bf16* p, const float (&x)[V]) {
  if constexpr (V % 8 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 8) {
      Words4 w;
#pragma unroll
      for (int j = 0; j < 4; ++j) w.w[j] = pack_bf16(x[i + 2 * j], x[i + 2 * j + 1]);
      store16(p + i, w);
    }
  } else if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      Words2 w;
#pragma unroll
      for (int j = 0; j < 2; ++j) w.w[j] = pack_bf16(x[i + 2 * j], x[i + 2 * j + 1]);
      *reinterpret_cast<Words2*>(p + i) = w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) p[i] = to_bf16(x[i]);
  }
}

// Whether rows of `cols` elements that start at p and are `pitch` elements apart are whole runs of V aligned elements.
template <int V, class T>
DEVICE bool whole_runs(const T* p, int64_t pitch, int64_t cols) {
  return aligned16(p, pitch * int64_t(sizeof(T))) && cols % V == 0;
}

// a / b of two numbers that are not negative; most a are below 2^32, where division is much shorter.
DEVICE int64_t quotient(int64_t a, int b) { return a >> 32 ? a / b : int64_t(uint32_t(a) / uint32_t(b)); }

// A thread's share of rows of units of work: units `first`, `first + step`, ... of `row`. `1 << shift` threads share a
// row, so a block takes `blockDim.x >> shift` rows, and gridDim.y blocks share them.
struct RowShare {
  int64_t row;
  int64_t first, step;
};

DEVICE RowShare row_share(int shift) {
  int threads = 1 << shift;
  int64_t rows = blockDim.x >> shift;
  return RowShare{blockIdx.x * rows + (threadIdx.x >> shift),
                  int64_t(blockIdx.y) * threads + (threadIdx.x & (threads - 1)), int64_t(threads) * gridDim.y};
}

#endif
