// Root-mean-square norms, alone, with the residual add before them, with the quantisation of the result after them, and
// gated; and the add alone. A row is read once: it
// stays in registers between its sum and its scaling, as it is stored, while it has at most HELD runs a thread.
//
// Order of a row's sum of squares: a thread adds its own elements ascending, threads are added by base.cuh's trees. It
// depends on the row's length and type alone.
#include "lib/gates.cuh"
#include "lib/quantise.cuh"
#include "lib/vector.cuh"

// Runs of 16 bytes of a row that a thread keeps.
constexpr int HELD = 2;

template <class T>
DEVICE void widen(Words4 run, float (&x)[PER16<T>]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = bits_f32(run.w[i]);
    } else {
      x[2 * i] = bf16_low(run.w[i]);
      x[2 * i + 1] = bf16_high(run.w[i]);
    }
  }
}

template <class T>
DEVICE Words4 narrow(const float (&x)[PER16<T>]) {
  Words4 run;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      run.w[i] = f32_bits(x[i]);
    } else {
      run.w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
  }
  return run;
}

template <int V>
DEVICE float squares(const float (&x)[V]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) sum += x[i] * x[i];
  return sum;
}

DEVICE float inverse_rms(float sum, int width, float eps) { return 1.0f / sqrtf(sum / float(width) + eps); }

// x scale (1 + w) of one run.
template <class T>
DEVICE Words4 scale_run(Words4 run, const float* w, float scale) {
  constexpr int V = PER16<T>;
  float x[V], weight[V];
  widen<T>(run, x);
  load_run(w, weight);
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = x[i] * scale * (1.0f + weight[i]);
  return narrow<T>(x);
}

template <class T>
DEVICE uint32_t magnitude_of(Words4 run, uint32_t most) {
  constexpr int V = PER16<T>;
  float x[V];
  widen<T>(run, x);
#pragma unroll
  for (int i = 0; i < V; ++i) most = max(most, magnitude(x[i]));
  return most;
}

template <class T>
DEVICE void store_codes(uint8_t* codes, Words4 run, float scale) {
  float x[PER16<T>];
  widen<T>(run, x);
  store_e4m3(codes, x, scale);
}

// The scale of the largest of every thread's `most`.
DEVICE float block_fp8_scale(uint32_t most, uint32_t* scratch) {
  most = lanes_max<WARP>(most);
  int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  if (lane == 0) scratch[threadIdx.x >> 5] = most;
  __syncthreads();
  return fp8_scale(bits_f32(lanes_max<WARP>(lane < warps ? scratch[lane] : 0u)));
}

// Row blockIdx.x: where ADD, x += delta first, stored as T; then y = x rsqrt(mean(x^2) + eps) (1 + w), stored as T, or,
// where CODES, rounded to T and quantised by the row's own largest magnitude.
template <bool ADD, bool CODES, class T>
DEVICE void rms(T* x, const T* delta, const float* w, T* y, uint8_t* codes, float* scales, int width, float eps) {
  constexpr int V = PER16<T>;
  __shared__ float scratch[32];
  __shared__ uint32_t maxima[32];
  bool aligned = whole_runs<V>(x, width, width) && whole_runs<V>(w, 4, width) &&
                 (!ADD || whole_runs<V>(delta, width, width)) &&
                 (CODES ? uint64_t(codes) % V == 0 : whole_runs<V>(y, width, width));
  int64_t row = int64_t(blockIdx.x) * width;
  x += row;
  delta += ADD ? row : 0;
  y += CODES ? 0 : row;
  codes += CODES ? row : 0;
  float sum = 0.0f;
  uint32_t most = 0;
  if (aligned) {
    // x once the delta is added to it.
    auto run_at = [&](int u) {
      Words4 run = load16(x + u * V);
      if constexpr (ADD) {
        float a[V], b[V];
        widen<T>(run, a);
        widen<T>(load16(delta + u * V), b);
#pragma unroll
        for (int i = 0; i < V; ++i) a[i] += b[i];
        run = narrow<T>(a);
        store16(x + u * V, run);
      }
      return run;
    };
    auto squares_of = [](Words4 run) {
      float a[V];
      widen<T>(run, a);
      return squares(a);
    };
    int runs = width / V, threads = blockDim.x;
    Words4 held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = threadIdx.x + k * threads;
      if (u < runs) held[k] = run_at(u);
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      if (int(threadIdx.x) + k * threads < runs) sum += squares_of(held[k]);
    }
    for (int u = threadIdx.x + HELD * threads; u < runs; u += threads) sum += squares_of(run_at(u));
    float scale = inverse_rms(block_sum(sum, scratch), width, eps);
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = threadIdx.x + k * threads;
      if (u >= runs) continue;
      held[k] = scale_run<T>(held[k], w + u * V, scale);
      if constexpr (CODES) {
        most = magnitude_of<T>(held[k], most);
      } else {
        store16(y + u * V, held[k]);
      }
    }
    for (int u = threadIdx.x + HELD * threads; u < runs; u += threads) {
      Words4 run = scale_run<T>(load16(x + u * V), w + u * V, scale);
      if constexpr (CODES) {
        most = magnitude_of<T>(run, most);
      } else {
        store16(y + u * V, run);
      }
    }
    if constexpr (CODES) {
      float fp8 = block_fp8_scale(most, maxima);
      if (threadIdx.x == 0) scales[blockIdx.x] = fp8;
#pragma unroll
      for (int k = 0; k < HELD; ++k) {
        int u = threadIdx.x + k * threads;
        if (u < runs) store_codes<T>(codes + u * V, held[k], fp8);
      }
      for (int u = threadIdx.x + HELD * threads; u < runs; u += threads) {
        store_codes<T>(codes + u * V, scale_run<T>(load16(x + u * V), w + u * V, scale), fp8);
      }
    }
  } else {
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      float a = to_f32(x[i]);
      if constexpr (ADD) {
        x[i] = round_to<T>(a + to_f32(delta[i]));
        a = to_f32(x[i]);
      }
      sum += a * a;
    }
    float scale = inverse_rms(block_sum(sum, scratch), width, eps);
    auto scaled = [&](int i) { return to_f32(x[i]) * scale * (1.0f + w[i]); };
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      if constexpr (CODES) {
        most = max(most, magnitude(rounded<T>(scaled(i))));
      } else {
        y[i] = round_to<T>(scaled(i));
      }
    }
    if constexpr (CODES) {
      float fp8 = block_fp8_scale(most, maxima);
      if (threadIdx.x == 0) scales[blockIdx.x] = fp8;
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        codes[i] = uint8_t(f32_to_e4m3(rounded<T>(scaled(i)) / fp8));
      }
    }
  }
}

// x += delta, stored as T, over n elements.
template <class T>
DEVICE void add(T* x, const T* delta, int64_t n) {
  constexpr int V = PER16<T>;
  int64_t u = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (((uint64_t(x) | uint64_t(delta)) & 15u) == 0 && u * V + V <= n) {
    float a[V], b[V];
    load_run(x + u * V, a);
    load_run(delta + u * V, b);
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] += b[i];
    store_run(x + u * V, a);
  } else {
    for (int64_t i = u * V; i < n && i < u * V + V; ++i) x[i] = round_to<T>(to_f32(x[i]) + to_f32(delta[i]));
  }
}

DEVICE float group_sum(float x, int lanes) {
  for (int offset = lanes >> 1; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}

// Per head of `width` elements y = round(o rsqrt(mean(o^2) + eps) w) gate(z), `lanes` (a power of two, at most 32)
// lanes a head. Rows of o and y have heads * width elements, rows of z are z_pitch elements apart.
template <class T>
DEVICE void gated(const T* o, const T* z, const float* w, T* y, int64_t rows, int heads, int width, int64_t z_pitch,
                  float eps, int silu_gate, int lanes) {
  constexpr int V = PER16<T>;
  // Of the pitches, not of one head's addresses: all heads are summed in the same order.
  bool aligned = whole_runs<V>(o, width, width) && whole_runs<V>(y, width, width) && whole_runs<V>(z, z_pitch, width) &&
                 whole_runs<V>(w, 4, width);
  int64_t head = quotient(int64_t(blockIdx.x) * blockDim.x + threadIdx.x, lanes);
  int lane = threadIdx.x & (lanes - 1);
  bool inside = head < rows * heads;  // shuffles want whole warps, so nobody leaves
  head = inside ? head : 0;
  int64_t row = quotient(head, heads);
  o += head * width;
  y += head * width;
  z += row * z_pitch + (head - row * heads) * width;
  auto gate = [&](float v) { return silu_gate ? silu_as<T>(v) : sigmoid_as<T>(v); };
  float sum = 0.0f;
  if (aligned) {
    int runs = inside ? width / V : 0;
    Words4 held[HELD], gates[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = lane + k * lanes;
      if (u < runs) {
        held[k] = load16(o + u * V);
        gates[k] = load16(z + u * V);
      }
    }
    auto squares_of = [](Words4 run) {
      float a[V];
      widen<T>(run, a);
      return squares(a);
    };
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      if (lane + k * lanes < runs) sum += squares_of(held[k]);
    }
    for (int u = lane + HELD * lanes; u < runs; u += lanes) sum += squares_of(load16(o + u * V));
    float scale = inverse_rms(group_sum(sum, lanes), width, eps);
    auto finish = [&](int u, Words4 run, Words4 gates) {
      float a[V], g[V], weight[V];
      widen<T>(run, a);
      widen<T>(gates, g);
      load_run(w + u * V, weight);
#pragma unroll
      for (int i = 0; i < V; ++i) a[i] = rounded<T>(a[i] * scale * weight[i]) * gate(g[i]);
      store16(y + u * V, narrow<T>(a));
    };
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      int u = lane + k * lanes;
      if (u < runs) finish(u, held[k], gates[k]);
    }
    for (int u = lane + HELD * lanes; u < runs; u += lanes) finish(u, load16(o + u * V), load16(z + u * V));
  } else {
    int count = inside ? width : 0;
    for (int i = lane; i < count; i += lanes) sum += to_f32(o[i]) * to_f32(o[i]);
    float scale = inverse_rms(group_sum(sum, lanes), width, eps);
    for (int i = lane; i < count; i += lanes) {
      y[i] = round_to<T>(rounded<T>(to_f32(o[i]) * scale * w[i]) * gate(to_f32(z[i])));
    }
  }
}

#define ENTRIES(T, SUFFIX)                                                                                        \
  KERNEL LAUNCH_BOUNDS(1024, 1) rms_##SUFFIX(const T* x, const float* w, T* y, int width, float eps) {            \
    after_earlier_kernels();                                                                                      \
    rms<false, false>(const_cast<T*>(x), x, w, y, nullptr, nullptr, width, eps);                                  \
  }                                                                                                               \
  EXPORT(rms_##SUFFIX)                                                                                            \
  KERNEL LAUNCH_BOUNDS(1024, 1)                                                                                   \
      add_rms_##SUFFIX(T* residual, const T* delta, const float* w, T* y, int width, float eps) {                 \
    after_earlier_kernels();                                                                                      \
    rms<true, false>(residual, delta, w, y, nullptr, nullptr, width, eps);                                        \
  }                                                                                                               \
  EXPORT(add_rms_##SUFFIX)                                                                                        \
  KERNEL LAUNCH_BOUNDS(1024, 1)                                                                                   \
      rms_fp8_##SUFFIX(const T* x, const float* w, uint8_t* codes, float* scales, int width, float eps) {         \
    after_earlier_kernels();                                                                                      \
    rms<false, true, T>(const_cast<T*>(x), x, w, nullptr, codes, scales, width, eps);                             \
  }                                                                                                               \
  EXPORT(rms_fp8_##SUFFIX)                                                                                        \
  KERNEL LAUNCH_BOUNDS(1024, 1)                                                                                   \
      add_rms_fp8_##SUFFIX(T* residual, const T* delta, const float* w, uint8_t* codes, float* scales, int width, \
                           float eps) {                                                                           \
    after_earlier_kernels();                                                                                      \
    rms<true, true, T>(residual, delta, w, nullptr, codes, scales, width, eps);                                   \
  }                                                                                                               \
  EXPORT(add_rms_fp8_##SUFFIX)                                                                                    \
  KERNEL LAUNCH_BOUNDS(256) add_##SUFFIX(T* residual, const T* delta, int64_t n) {                                \
    after_earlier_kernels();                                                                                      \
    add(residual, delta, n);                                                                                      \
  }                                                                                                               \
  EXPORT(add_##SUFFIX)                                                                                            \
  KERNEL LAUNCH_BOUNDS(256)                                                                                       \
      gated_##SUFFIX(const T* o, const T* z, const float* w, T* y, int64_t rows, int heads, int width,            \
                     int64_t z_pitch, float eps, int silu_gate, int lanes) {                                      \
    after_earlier_kernels();                                                                                      \
    gated(o, z, w, y, rows, heads, width, z_pitch, eps, silu_gate, lanes);                                        \
  }                                                                                                               \
  EXPORT(gated_##SUFFIX)

ENTRIES(float, f32)
ENTRIES(bf16, bf16)
