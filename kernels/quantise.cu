// Rows of an activation to codes and scales, each row by itself: the same codes and scales as the CPU arm's. Compiled
// with --fmad=false, and divisions are IEEE, in the order of operations that src/ops/quantise.rs writes down.
#include "lib/quantise.cuh"
#include "lib/vector.cuh"

// Columns that a thread takes together: 8 codes of e4m3, or one group of e2m1 in two halves.
constexpr int RUN = 8;
// Columns under one NVFP4 scale, and under one scale of an FP8 group.
constexpr int NVFP4_GROUP = 16;
constexpr int FP8_GROUP = 128;
constexpr int THREADS = 256;

// The largest magnitude of a run and of `most`.
template <int V>
DEVICE uint32_t magnitude_of(const float (&x)[V], uint32_t most) {
#pragma unroll
  for (int i = 0; i < V; ++i) most = max(most, magnitude(x[i]));
  return most;
}

// Whether rows are whole runs of RUN, aligned at both ends.
template <class T>
DEVICE bool by_runs(const T* x, int64_t pitch, int cols, const uint8_t* codes) {
  return whole_runs<RUN>(x, pitch, cols) && (uint64_t(codes) & 7u) == 0;
}

// By one stored scale.
template <class T>
DEVICE void fp8_tensor(const T* x, int64_t pitch, uint8_t* codes, int64_t rows, int cols, float scale, int shift) {
  RowShare share = row_share(shift);
  if (share.row >= rows) return;
  bool runs = by_runs(x, pitch, cols, codes);
  x += share.row * pitch;
  codes += share.row * cols;
  if (runs) {
    for (int64_t u = share.first; u < cols / RUN; u += share.step) {
      float v[RUN];
      load_run(x + u * RUN, v);
      store_e4m3(codes + u * RUN, v, scale);
    }
  } else {
    for (int64_t c = share.first; c < cols; c += share.step) codes[c] = uint8_t(f32_to_e4m3(to_f32(x[c]) / scale));
  }
}

// By a scale per row; a block a row. A thread keeps its first HELD runs between the maximum and the codes.
constexpr int HELD = 2;

template <class T>
DEVICE void fp8_token(const T* x, int64_t pitch, uint8_t* codes, float* scales, int cols) {
  __shared__ uint32_t scratch[32];
  int64_t row = blockIdx.x;
  bool runs = by_runs(x, pitch, cols, codes);
  x += row * pitch;
  codes += row * cols;
  int units = cols / RUN, threads = blockDim.x;
  float held[HELD][RUN];
  uint32_t most = 0;
  if (runs) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = threadIdx.x + k * threads;
      if (u < units) {
        load_run(x + u * RUN, held[k]);
        most = magnitude_of(held[k], most);
      }
    }
    for (int u = threadIdx.x + HELD * threads; u < units; u += threads) {
      float v[RUN];
      load_run(x + u * RUN, v);
      most = magnitude_of(v, most);
    }
  } else {
    for (int c = threadIdx.x; c < cols; c += threads) most = max(most, magnitude(to_f32(x[c])));
  }
  most = lanes_max<WARP>(most);
  int lane = threadIdx.x & 31, warps = threads >> 5;
  if (lane == 0) scratch[threadIdx.x >> 5] = most;
  __syncthreads();
  float scale = fp8_scale(bits_f32(lanes_max<WARP>(lane < warps ? scratch[lane] : 0u)));
  if (threadIdx.x == 0) scales[row] = scale;
  if (runs) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = threadIdx.x + k * threads;
      if (u < units) store_e4m3(codes + u * RUN, held[k], scale);
    }
    for (int u = threadIdx.x + HELD * threads; u < units; u += threads) {
      float v[RUN];
      load_run(x + u * RUN, v);
      store_e4m3(codes + u * RUN, v, scale);
    }
  } else {
    for (int c = threadIdx.x; c < cols; c += threads) codes[c] = uint8_t(f32_to_e4m3(to_f32(x[c]) / scale));
  }
}

// By a scale per row and 128 columns: 16 lanes a group, the last group of a row partial.
template <class T>
DEVICE void fp8_group(const T* x, int64_t pitch, uint8_t* codes, float* scales, int64_t rows, int cols) {
  constexpr int LANES = FP8_GROUP / RUN;
  bool runs = by_runs(x, pitch, cols, codes);
  int groups = CEIL_DIV(cols, FP8_GROUP);
  int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / LANES;
  bool inside = at < rows * groups;  // shuffles want whole warps, so nobody leaves
  int64_t row = quotient(inside ? at : 0, groups);
  int group = int((inside ? at : 0) - row * groups);
  int lane = threadIdx.x & (LANES - 1);
  // This lane's columns: RUN that lie together, or every LANES-th.
  int first = group * FP8_GROUP + (runs ? lane * RUN : lane), step = runs ? 1 : LANES;
  int last = inside ? min(cols, (group + 1) * FP8_GROUP) : 0;
  x += row * pitch;
  codes += row * cols;
  float v[RUN];
#pragma unroll
  for (int i = 0; i < RUN; ++i) v[i] = 0.0f;
  if (runs) {
    if (first < last) load_run(x + first, v);
  } else {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (first + i * step < last) v[i] = to_f32(x[first + i * step]);
    }
  }
  float scale = fp8_scale(bits_f32(lanes_max<LANES>(magnitude_of(v, 0u))));
  if (inside && lane == 0) scales[at] = scale;
  if (runs) {
    if (first < last) store_e4m3(codes + first, v, scale);
  } else {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (first + i * step < last) codes[first + i * step] = uint8_t(f32_to_e4m3(v[i] / scale));
    }
  }
}

// Group `at` of rows of `groups`; `runs` from by_runs.
template <class T>
DEVICE void load_group(const T* x, int64_t pitch, int64_t at, int groups, bool runs, float (&v)[NVFP4_GROUP]) {
  int64_t row = quotient(at, groups);
  x += row * pitch + (at - row * groups) * NVFP4_GROUP;
  if (runs) {
    load_run(x, v);
  } else {
#pragma unroll
    for (int i = 0; i < NVFP4_GROUP; ++i) v[i] = to_f32(x[i]);
  }
}

// To e2m1 by an e4m3 scale for each 16 columns, under a global that divides or multiplies; a thread a group.
template <class T>
DEVICE void nvfp4(const T* x, int64_t pitch, uint8_t* codes, uint8_t* scales, int64_t rows, int cols, float global,
                  int divides) {
  int groups = cols / NVFP4_GROUP;
  int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= rows * groups) return;
  float v[NVFP4_GROUP];
  load_group(x, pitch, at, groups, by_runs(x, pitch, cols, codes), v);
  codes += at * (NVFP4_GROUP / 2);
  uint32_t code = nvfp4_scale_code(bits_f32(magnitude_of(v, 0u)), global, divides);
  float scale = nvfp4_scale(code, global, divides);
  scales[at] = uint8_t(code);
  Words2 out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out.w[i] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) out.w[i] |= f32_to_e2m1(v[8 * i + j] / scale) << 4 * j;
  }
  *reinterpret_cast<Words2*>(codes) = out;
}

// The same codes, each times its group's scale, which is exact in bf16; the global is left out.
template <class T>
DEVICE void nvfp4_widened(const T* x, int64_t pitch, bf16* values, int64_t rows, int cols, float global, int divides) {
  int groups = cols / NVFP4_GROUP;
  int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= rows * groups) return;
  float v[NVFP4_GROUP];
  load_group(x, pitch, at, groups, whole_runs<RUN>(x, pitch, cols), v);
  uint32_t code = nvfp4_scale_code(bits_f32(magnitude_of(v, 0u)), global, divides);
  float scale = nvfp4_scale(code, global, divides), group = e4m3_to_f32(code);
  values += at * NVFP4_GROUP;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = e2m1_to_f32(f32_to_e2m1(v[8 * i + j] / scale)) * group;
    store_run(values + 8 * i, w);
  }
}

#define ENTRIES(T, SUFFIX)                                                                                             \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                        \
      fp8_tensor_##SUFFIX(const T* x, int64_t pitch, uint8_t* codes, int64_t rows, int cols, float scale, int shift) { \
    after_earlier_kernels();                                                                                           \
    fp8_tensor(x, pitch, codes, rows, cols, scale, shift);                                                             \
  }                                                                                                                    \
  EXPORT(fp8_tensor_##SUFFIX)                                                                                          \
  KERNEL LAUNCH_BOUNDS(1024, 1)                                                                                        \
      fp8_token_##SUFFIX(const T* x, int64_t pitch, uint8_t* codes, float* scales, int cols) {                         \
    after_earlier_kernels();                                                                                           \
    fp8_token(x, pitch, codes, scales, cols);                                                                          \
  }                                                                                                                    \
  EXPORT(fp8_token_##SUFFIX)                                                                                           \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                        \
      fp8_group_##SUFFIX(const T* x, int64_t pitch, uint8_t* codes, float* scales, int64_t rows, int cols) {           \
    after_earlier_kernels();                                                                                           \
    fp8_group(x, pitch, codes, scales, rows, cols);                                                                    \
  }                                                                                                                    \
  EXPORT(fp8_group_##SUFFIX)                                                                                           \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                        \
      nvfp4_##SUFFIX(const T* x, int64_t pitch, uint8_t* codes, uint8_t* scales, int64_t rows, int cols, float global, \
                     int divides) {                                                                                    \
    after_earlier_kernels();                                                                                           \
    nvfp4(x, pitch, codes, scales, rows, cols, global, divides);                                                       \
  }                                                                                                                    \
  EXPORT(nvfp4_##SUFFIX)                                                                                               \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                        \
      nvfp4_widened_##SUFFIX(const T* x, int64_t pitch, bf16* values, int64_t rows, int cols, float global,            \
                             int divides) {                                                                            \
    after_earlier_kernels();                                                                                           \
    nvfp4_widened(x, pitch, values, rows, cols, global, divides);                                                      \
  }                                                                                                                    \
  EXPORT(nvfp4_widened_##SUFFIX)

ENTRIES(float, f32)
ENTRIES(bf16, bf16)
