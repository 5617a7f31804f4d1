// Per-head norm of queries and keys and their rotation, in place on the fused projection. A warp takes a head at a
// time.
//
// The angle is position * inv_freq in f32, as the published models compute it; its sine and cosine are those of that
// f32 to the last place at any position: the reduction and the series are f64, a handful of operations for each of a
// row's angles.
#include "lib/vector.cuh"

// Runs of 16 bytes of a head that a lane keeps.
constexpr int HELD = 2;

struct Turn {
  float sin, cos;
};

// Sine and cosine of x, |x| below 2^31: x less the nearest multiple of pi / 2, which stands here as the sum of two f64,
// and Taylor's series to terms that are below 1e-12 on what is left, |r| <= pi / 4.
DEVICE Turn turn(float x, float factor) {
  // 1 / n!, from 13 and from 12 down.
  constexpr double SIN[] = {1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0,
                            -1.0 / 5040.0,      1.0 / 120.0,       -1.0 / 6.0};
  constexpr double COS[] = {1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5};
  double n = rint(double(x) * 0.63661977236758134308);
  double r = fma(-n, 6.123233995736766036e-17, fma(-n, 1.57079632679489661923, double(x)));
  double q = r * r, sine = SIN[0], cosine = COS[0];
#pragma unroll
  for (int i = 1; i < 6; ++i) {
    sine = sine * q + SIN[i];
    cosine = cosine * q + COS[i];
  }
  sine = r + r * (q * sine);
  cosine = 1.0 + q * cosine;
  int quadrant = int(int64_t(n) & 3);
  double s = quadrant & 1 ? cosine : sine, c = quadrant & 1 ? sine : cosine;
  if (quadrant & 2) s = -s;
  if ((quadrant + 1) & 2) c = -c;
  return Turn{float(s) * factor, float(c) * factor};
}

DEVICE float inverse_rms(float sum, int width, float eps) { return 1.0f / sqrtf(sum / float(width) + eps); }

// One head whose rotated columns are at most one run of each lane, and whose halves are whole runs: partners are
// exchanged between lanes.
template <class T>
DEVICE void turn_runs(T* head, const float* w, const Turn* turns, int dim, int half, float eps) {
  constexpr int V = PER16<T>;
  int lane = threadIdx.x & 31, runs = dim / V, apart = half / V;
  float x[HELD][V], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    int u = lane + k * WARP;
    if (u < runs) {
      load_run(head + u * V, x[k]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) x[k][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) sum += x[k][i] * x[k][i];
  }
  float scale = inverse_rms(warp_sum(sum), dim, eps);
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    int u = lane + k * WARP;
    float weight[V];
    if (u < runs) {
      load_run(w + u * V, weight);
#pragma unroll
      for (int i = 0; i < V; ++i) x[k][i] = x[k][i] * scale * (1.0f + weight[i]);
    }
    if (k == 0) {
      bool low = lane < apart, rotated = lane < 2 * apart;
      int partner = low ? lane + apart : rotated ? lane - apart : lane;
      int first = (low ? lane : partner) * V;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float other = __shfl_sync(ALL_LANES, x[0][i], partner);
        if (rotated) {
          Turn t = turns[first + i];
          x[0][i] = low ? x[0][i] * t.cos - other * t.sin : x[0][i] * t.cos + other * t.sin;
        }
      }
    }
    if (u < runs) store_run(head + u * V, x[k]);
  }
}

// Any head, through `normed`, `dim` floats of shared memory of the warp's own.
template <class T>
DEVICE void turn_any(T* head, const float* w, const Turn* turns, float* normed, int dim, int half, float eps) {
  int lane = threadIdx.x & 31;
  float sum = 0.0f;
  for (int i = lane; i < dim; i += WARP) {
    normed[i] = to_f32(head[i]);
    sum += normed[i] * normed[i];
  }
  float scale = inverse_rms(warp_sum(sum), dim, eps);
  for (int i = lane; i < dim; i += WARP) normed[i] = normed[i] * scale * (1.0f + w[i]);
  __syncwarp();
  for (int i = lane; i < dim; i += WARP) {
    float y = normed[i];
    if (i < half) y = y * turns[i].cos - normed[i + half] * turns[i].sin;
    if (i >= half && i < 2 * half) y = y * turns[i - half].cos + normed[i - half] * turns[i - half].sin;
    head[i] = round_to<T>(y);
  }
  __syncwarp();
}

// Rows of qkv are `pitch` elements: query head h at 2 h dim, key head h at k_col + h dim. Blocks (row, y); the blocks
// of a row share its heads. Dynamic shared memory: `half` turns, then dim floats for each warp where heads are not
// whole runs.
template <class T>
DEVICE void qk_norm_rope(T* qkv, const float* q_norm, const float* k_norm, const float* inv_freq, const int* positions,
                         float factor, float eps, int heads, int kv_heads, int dim, int half, int64_t pitch, int k_col) {
  constexpr int V = PER16<T>;
  DYNAMIC_SHARED(memory);
  Turn* turns = reinterpret_cast<Turn*>(memory);
  float position = float(positions[blockIdx.x]);
  for (int i = threadIdx.x; i < half; i += blockDim.x) turns[i] = turn(position * inv_freq[i], factor);
  __syncthreads();
  bool runs = whole_runs<V>(qkv, pitch, dim) && k_col % V == 0 && half % V == 0 && 2 * half <= WARP * V &&
              dim <= HELD * WARP * V && aligned16(q_norm, 0) && aligned16(k_norm, 0);
  T* row = qkv + blockIdx.x * pitch;
  int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  float* normed = reinterpret_cast<float*>(turns + half) + warp * dim;
  for (int h = blockIdx.y * warps + warp; h < heads + kv_heads; h += warps * gridDim.y) {
    bool query = h < heads;
    T* head = query ? row + int64_t(h) * 2 * dim : row + k_col + int64_t(h - heads) * dim;
    const float* w = query ? q_norm : k_norm;
    if (runs) {
      turn_runs(head, w, turns, dim, half, eps);
    } else {
      turn_any(head, w, turns, normed, dim, half, eps);
    }
  }
}

KERNEL LAUNCH_BOUNDS(256)
    qk_norm_rope_f32(float* qkv, const float* q_norm, const float* k_norm, const float* inv_freq, const int* positions,
                     float factor, float eps, int heads, int kv_heads, int dim, int half, int64_t pitch, int k_col) {
  after_earlier_kernels();
  qk_norm_rope(qkv, q_norm, k_norm, inv_freq, positions, factor, eps, heads, kv_heads, dim, half, pitch, k_col);
}
EXPORT(qk_norm_rope_f32)

KERNEL LAUNCH_BOUNDS(256)
    qk_norm_rope_bf16(bf16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq, const int* positions,
                      float factor, float eps, int heads, int kv_heads, int dim, int half, int64_t pitch, int k_col) {
  after_earlier_kernels();
  qk_norm_rope(qkv, q_norm, k_norm, inv_freq, positions, factor, eps, heads, kv_heads, dim, half, pitch, k_col);
}
EXPORT(qk_norm_rope_bf16)
