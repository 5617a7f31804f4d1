// A step's keys and values to their slots in the paged cache: copied, rounded, or encoded to e4m3 under a scale.
#include "lib/quantise.cuh"
#include "lib/vector.cuh"

// An e4m3 code.
struct e4m3 {
  uint8_t bits;
};

// V elements of a cache. `scale` is what codes are multiplied by; 1 for floats.
template <int V, class C>
DEVICE void store_cached(C* p, const float (&x)[V], float scale) {
  if constexpr (sizeof(C) != 1) {
    store_run(p, x);
  } else if constexpr (V % 4 == 0) {
    store_e4m3(&p->bits, x, scale);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) p[i].bits = uint8_t(f32_to_e4m3(x[i] / scale));
  }
}

// The keys of row t are columns k_col to k_col + cols of qkv, its values the cols after them; both go to slots[t],
// `cols` elements a slot. A slot below 0 or not below `end` is left out. One block a row.
template <class T, class C>
DEVICE void write(const T* qkv, C* k, C* v, const int* slots, int64_t end, int64_t pitch, int64_t k_col, int64_t cols,
                  float k_scale, float v_scale) {
  constexpr int V = 8;
  int64_t slot = slots[blockIdx.x];
  if (slot < 0 || slot >= end) return;
  const T* from = qkv + blockIdx.x * pitch + k_col;
  k += slot * cols;
  v += slot * cols;
  constexpr uint64_t unaligned = sizeof(C) == 1 ? 7 : 15;
  if (whole_runs<V>(from, pitch, cols) && ((uint64_t(k) | uint64_t(v)) & unaligned) == 0) {
    int64_t units = cols / V;
    for (int64_t u = threadIdx.x; u < 2 * units; u += blockDim.x) {
      float x[V];
      load_run(from + u * V, x);
      if (u < units) {
        store_cached(k + u * V, x, k_scale);
      } else {
        store_cached(v + (u - units) * V, x, v_scale);
      }
    }
  } else {
    for (int64_t c = threadIdx.x; c < 2 * cols; c += blockDim.x) {
      float x[1] = {to_f32(from[c])};
      if (c < cols) {
        store_cached(k + c, x, k_scale);
      } else {
        store_cached(v + (c - cols), x, v_scale);
      }
    }
  }
}

#define ENTRY(NAME, T, C)                                                                                           \
  KERNEL LAUNCH_BOUNDS(256)                                                                                         \
      NAME(const T* qkv, C* k, C* v, const int* slots, int64_t end, int64_t pitch, int64_t k_col, int64_t cols,     \
           float k_scale, float v_scale) {                                                                          \
    after_earlier_kernels();                                                                                        \
    write(qkv, k, v, slots, end, pitch, k_col, cols, k_scale, v_scale);                                             \
  }                                                                                                                 \
  EXPORT(NAME)

ENTRY(kv_write_f32_f32, float, float)
ENTRY(kv_write_f32_bf16, float, bf16)
ENTRY(kv_write_f32_u8, float, e4m3)
ENTRY(kv_write_bf16_f32, bf16, float)
ENTRY(kv_write_bf16_bf16, bf16, bf16)
ENTRY(kv_write_bf16_u8, bf16, e4m3)
