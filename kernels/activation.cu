// Element-wise activations, in f32, rounded once where they are stored.
#include "lib/gates.cuh"
#include "lib/vector.cuh"

// gate = silu(gate) up, in place, of rows of `width` gates and as many ups.
template <class T>
DEVICE void silu_mul(T* gate_up, int64_t rows, int64_t width, int shift) {
  constexpr int V = PER16<T>;
  RowShare share = row_share(shift);
  if (share.row >= rows) return;
  bool aligned = whole_runs<V>(gate_up, 2 * width, width);
  T* gates = gate_up + share.row * 2 * width;
  const T* ups = gates + width;
  if (aligned) {
    for (int64_t u = share.first; u < width / V; u += share.step) {
      float gate[V], up[V];
      load_run(gates + u * V, gate);
      load_run(ups + u * V, up);
#pragma unroll
      for (int i = 0; i < V; ++i) gate[i] = silu_as<T>(gate[i]) * up[i];
      store_run(gates + u * V, gate);
    }
  } else {
    for (int64_t i = share.first; i < width; i += share.step) {
      gates[i] = round_to<T>(silu_as<T>(to_f32(gates[i])) * to_f32(ups[i]));
    }
  }
}

// x *= sigmoid(gate) of rows of heads * dim elements; the gate of head h is at h * 2 dim + dim of a row of qkv.
template <class T>
DEVICE void sigmoid_mul(T* x, const T* qkv, int64_t rows, int heads, int dim, int64_t pitch, int shift) {
  constexpr int V = PER16<T>;
  RowShare share = row_share(shift);
  if (share.row >= rows) return;
  int64_t width = int64_t(heads) * dim;
  bool aligned = whole_runs<V>(x, width, dim) && whole_runs<V>(qkv, pitch, dim);
  x += share.row * width;
  qkv += share.row * pitch;
  // Element i of x belongs to head i / dim.
  auto gate_of = [&](int64_t i) { return qkv + i + (quotient(i, dim) + 1) * dim; };
  if (aligned) {
    for (int64_t u = share.first; u < width / V; u += share.step) {
      float a[V], gate[V];
      load_run(x + u * V, a);
      load_run(gate_of(u * V), gate);
#pragma unroll
      for (int i = 0; i < V; ++i) a[i] *= sigmoid_as<T>(gate[i]);
      store_run(x + u * V, a);
    }
  } else {
    for (int64_t i = share.first; i < width; i += share.step) {
      x[i] = round_to<T>(to_f32(x[i]) * sigmoid_as<T>(to_f32(*gate_of(i))));
    }
  }
}

// ln(1 + exp(x)) without overflow; above 20 it is x to the last bit.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias), of rows of `heads` b's and as many a's. The results are f32
// and feed a recurrence, so both are computed to the last place or two whatever T is.
template <class T>
DEVICE void gdn_gates(const T* ba, const float* a_log, const float* dt_bias, float* g, float* beta, int64_t rows,
                      int heads, int shift) {
  RowShare share = row_share(shift);
  if (share.row >= rows) return;
  const T* b = ba + share.row * 2 * heads;
  const T* a = b + heads;
  for (int64_t h = share.first; h < heads; h += share.step) {
    beta[share.row * heads + h] = sigmoid_as<float>(to_f32(b[h]));
    g[share.row * heads + h] = -expf(a_log[h]) * softplus(to_f32(a[h]) + dt_bias[h]);
  }
}

#define ENTRIES(T, SUFFIX)                                                                                           \
  KERNEL LAUNCH_BOUNDS(256) silu_mul_##SUFFIX(T* gate_up, int64_t rows, int64_t width, int shift) {                  \
    after_earlier_kernels();                                                                                         \
    silu_mul(gate_up, rows, width, shift);                                                                           \
  }                                                                                                                  \
  EXPORT(silu_mul_##SUFFIX)                                                                                          \
  KERNEL LAUNCH_BOUNDS(256)                                                                                          \
      sigmoid_mul_##SUFFIX(T* x, const T* qkv, int64_t rows, int heads, int dim, int64_t pitch, int shift) {         \
    after_earlier_kernels();                                                                                         \
    sigmoid_mul(x, qkv, rows, heads, dim, pitch, shift);                                                             \
  }                                                                                                                  \
  EXPORT(sigmoid_mul_##SUFFIX)                                                                                       \
  KERNEL LAUNCH_BOUNDS(256)                                                                                          \
      gdn_gates_##SUFFIX(const T* ba, const float* a_log, const float* dt_bias, float* g, float* beta, int64_t rows, \
                         int heads, int shift) {                                                                     \
    after_earlier_kernels();                                                                                         \
    gdn_gates(ba, a_log, dt_bias, g, beta, rows, heads, shift);                                                      \
  }                                                                                                                  \
  EXPORT(gdn_gates_##SUFFIX)

ENTRIES(float, f32)
ENTRIES(bf16, bf16)
