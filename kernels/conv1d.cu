// The short causal convolution of a GDN layer, with what each sequence keeps of its inputs. Compiled with --fmad=false:
// the taps are summed in the CPU arm's order with its roundings, so that only SiLU's last place can differ.
//
// `step` is for steps of single rows: convolution and state in one pass. Else `causal` computes the rows and only reads
// the state, and `keep`, launched after it, writes the state.
//
// A sequence with slot_in -1 is inert: zero rows, no state. One with another slot outside the state gets NaN rows and
// leaves no state, since a device cannot give an error.
#include "lib/gates.cuh"
#include "lib/vector.cuh"

// Inputs per output, 2 to 5 as a compile-time value; 0: any number, read from memory one by one.
#ifndef TAPS
#error "TAPS is set by the launch"
#endif

constexpr int THREADS = 128;

// Rows starts[i] to starts[i + 1] are sequence i's, after contexts[i] rows of earlier steps.
struct Sequences {
  const int *starts, *contexts, *slot_in, *slot_out;
  int count;
};

enum class Kind { Live, Inert, Outside };

DEVICE Kind kind_of(const Sequences& s, int i, int64_t slots) {
  int from = s.slot_in[i], to = s.slot_out[i];
  if (from < 0) return Kind::Inert;
  return from < slots && to >= 0 && to < slots ? Kind::Live : Kind::Outside;
}

template <class T>
DEVICE float silu_of_sum(float sum) {
  return silu_as<T>(rounded<T>(sum));
}

template <class T, int V>
DEVICE void fill_run(T* y, float value) {
  float out[V];
#pragma unroll
  for (int i = 0; i < V; ++i) out[i] = value;
  store_run(y, out);
}

DEVICE float blank_of(Kind kind) { return kind == Kind::Inert ? 0.0f : bits_f32(0x7FC00000u); }

#if TAPS > 0

constexpr int KEPT = TAPS - 1;
// Rows whose loads are in flight at a time.
constexpr int AHEAD = 4;

// The kept inputs of V channels, KEPT of each, oldest first.
template <class T, int V>
DEVICE void load_kept(const T* state, float (&kept)[KEPT][V]) {
  float flat[V * KEPT];
  load_run(state, flat);
#pragma unroll
  for (int c = 0; c < V; ++c) {
#pragma unroll
    for (int j = 0; j < KEPT; ++j) kept[j][c] = flat[c * KEPT + j];
  }
}

template <class T, int V>
DEVICE void store_kept(T* state, const float (&kept)[KEPT][V]) {
  float flat[V * KEPT];
#pragma unroll
  for (int c = 0; c < V; ++c) {
#pragma unroll
    for (int j = 0; j < KEPT; ++j) flat[c * KEPT + j] = kept[j][c];
  }
  store_run(state, flat);
}

template <int V>
DEVICE void clear(float (&kept)[KEPT][V]) {
#pragma unroll
  for (int j = 0; j < KEPT; ++j) {
#pragma unroll
    for (int c = 0; c < V; ++c) kept[j][c] = 0.0f;
  }
}

// The window moves on by one input.
template <int V>
DEVICE void push(float (&kept)[KEPT][V], const float (&x)[V]) {
#pragma unroll
  for (int c = 0; c < V; ++c) {
#pragma unroll
    for (int j = 0; j + 1 < KEPT; ++j) kept[j][c] = kept[j + 1][c];
    kept[KEPT - 1][c] = x[c];
  }
}

template <class T, int V>
DEVICE void convolve(T* y, const float (&kept)[KEPT][V], const float (&x)[V], const float (&w)[V * TAPS]) {
  float out[V];
#pragma unroll
  for (int c = 0; c < V; ++c) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; ++j) sum += kept[j][c] * w[c * TAPS + j];
    out[c] = silu_of_sum<T>(sum + x[c] * w[c * TAPS + KEPT]);
  }
  store_run(y, out);
}

// Sequence blockIdx.y has row blockIdx.y and no other.
template <int V, class T>
DEVICE void step_run(const T* x, const float* w, T* state, T* y, const Sequences& s, int64_t slots, int64_t pitch,
                     int channels, int channel) {
  int64_t row = blockIdx.y;
  Kind kind = kind_of(s, row, slots);
  y += row * channels + channel;
  if (kind != Kind::Live) {
    fill_run<T, V>(y, blank_of(kind));
    return;
  }
  float kept[KEPT][V], in[V], weights[V * TAPS];
  load_run(x + row * pitch + channel, in);
  load_run(w + int64_t(channel) * TAPS, weights);
  if (s.contexts[row] > 0) {
    load_kept(state + (int64_t(s.slot_in[row]) * channels + channel) * KEPT, kept);
  } else {
    clear(kept);
  }
  convolve<T>(y, kept, in, weights);
  push(kept, in);
  store_kept(state + (int64_t(s.slot_out[row]) * channels + channel) * KEPT, kept);
}

// Rows first to last of every sequence among them.
template <int V, class T>
DEVICE void causal_run(const T* x, const float* w, const T* state, T* y, const Sequences& s, int64_t slots, int64_t pitch,
                       int channels, int channel, int first, int last) {
  // The last sequence that starts at or before the first row.
  int low = 0, high = s.count;
  while (high - low > 1) {
    int middle = (low + high) >> 1;
    if (s.starts[middle] <= first) {
      low = middle;
    } else {
      high = middle;
    }
  }
  float weights[V * TAPS];
  load_run(w + int64_t(channel) * TAPS, weights);
  x += channel;
  y += channel;
  for (int i = low, row = first; row < last && i < s.count; ++i) {
    int start = s.starts[i], end = min(s.starts[i + 1], last);
    Kind kind = kind_of(s, i, slots);
    if (kind != Kind::Live) {
      for (; row < end; ++row) fill_run<T, V>(y + int64_t(row) * channels, blank_of(kind));
      continue;
    }
    float kept[KEPT][V];
    clear(kept);
    if (row - start < KEPT && s.contexts[i] > 0) {
      load_kept(state + (int64_t(s.slot_in[i]) * channels + channel) * KEPT, kept);
    }
    for (int before = max(start, row - KEPT); before < row; ++before) {
      float in[V];
      load_run(x + before * pitch, in);
      push(kept, in);
    }
    for (; row + AHEAD <= end; row += AHEAD) {
      float in[AHEAD][V];
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) load_run(x + (row + k) * pitch, in[k]);
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        convolve<T>(y + int64_t(row + k) * channels, kept, in[k], weights);
        push(kept, in[k]);
      }
    }
    for (; row < end; ++row) {
      float in[V];
      load_run(x + row * pitch, in);
      convolve<T>(y + int64_t(row) * channels, kept, in, weights);
      push(kept, in);
    }
  }
}

// What sequence blockIdx.y keeps: its last KEPT inputs, those before the step moved up where it has fewer rows.
template <int V, class T>
DEVICE void keep_run(const T* x, T* state, const Sequences& s, int64_t slots, int64_t pitch, int channels, int channel) {
  int i = blockIdx.y;
  if (kind_of(s, i, slots) != Kind::Live) return;
  int start = s.starts[i], end = s.starts[i + 1];
  float kept[KEPT][V];
  clear(kept);
  if (end - start < KEPT && s.contexts[i] > 0) {
    load_kept(state + (int64_t(s.slot_in[i]) * channels + channel) * KEPT, kept);
  }
  for (int row = max(start, end - KEPT); row < end; ++row) {
    float in[V];
    load_run(x + row * pitch + channel, in);
    push(kept, in);
  }
  store_kept(state + (int64_t(s.slot_out[i]) * channels + channel) * KEPT, kept);
}

#else
// Any number of taps, an input at a time.

// Input `at` of a sequence, counted from its first row of this step: negative ones are the state's.
template <class T>
DEVICE float input(const T* x, const T* kept, bool fresh, int at, int64_t pitch, int taps) {
  if (at >= 0) return to_f32(x[at * pitch]);
  return fresh || at < 1 - taps ? 0.0f : to_f32(kept[taps - 1 + at]);
}

template <class T>
DEVICE void any_row(const T* x, const float* w, const T* state, T* y, const Sequences& s, int i, int row, int64_t slots,
                    int64_t pitch, int channels, int channel, int taps) {
  Kind kind = kind_of(s, i, slots);
  if (kind != Kind::Live) {
    y[int64_t(row) * channels + channel] = round_to<T>(blank_of(kind));
    return;
  }
  int start = s.starts[i];
  const T* kept = state + (int64_t(s.slot_in[i]) * channels + channel) * (taps - 1);
  const T* inputs = x + start * pitch + channel;
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < taps; ++j) {
    float in = input(inputs, kept, s.contexts[i] <= 0, row - start - (taps - 1) + j, pitch, taps);
    sum += in * w[int64_t(channel) * taps + j];
  }
  y[int64_t(row) * channels + channel] = round_to<T>(silu_of_sum<T>(sum));
}

template <class T>
DEVICE void any_keep(const T* x, T* state, const Sequences& s, int i, int64_t slots, int64_t pitch, int channels,
                     int channel, int taps) {
  if (kind_of(s, i, slots) != Kind::Live) return;
  int start = s.starts[i], rows = s.starts[i + 1] - start;
  const T* from = state + (int64_t(s.slot_in[i]) * channels + channel) * (taps - 1);
  T* to = state + (int64_t(s.slot_out[i]) * channels + channel) * (taps - 1);
  // Ascending: an input is read before its place is written.
#pragma unroll 1
  for (int j = 0; j < taps - 1; ++j) {
    to[j] = round_to<T>(input(x + start * pitch + channel, from, s.contexts[i] <= 0, rows - (taps - 1) + j, pitch, taps));
  }
}
#endif

// Channels a thread takes together: those of 16 bytes where rows and state are aligned for it.
template <class T>
DEVICE bool by_runs(const T* x, const float* w, const T* state, const T* y, int64_t pitch, int channels) {
  constexpr int V = PER16<T>;
  return TAPS > 0 && whole_runs<V>(x, pitch, channels) && whole_runs<V>(y, channels, channels) && aligned16(state, 0) &&
         aligned16(w, 0);
}

// The kernels: x has rows of `pitch` elements, `channels` of them; w [channels, taps]; y [rows, channels];
// state [slots, channels, taps - 1]. Blocks along x take channels.

template <class T>
DEVICE void step(const T* x, const float* w, T* state, T* y, Sequences s, int64_t slots, int64_t pitch, int channels,
                 int taps) {
  int thread = blockIdx.x * THREADS + threadIdx.x;
#if TAPS > 0
  if (by_runs(x, w, state, y, pitch, channels)) {
    if (thread < channels / PER16<T>) step_run<PER16<T>>(x, w, state, y, s, slots, pitch, channels, thread * PER16<T>);
    return;
  }
  for (int c = thread; c < channels; c += gridDim.x * THREADS) {
    step_run<1>(x, w, state, y, s, slots, pitch, channels, c);
  }
#else
  for (int c = thread; c < channels; c += gridDim.x * THREADS) {
    any_row(x, w, state, y, s, blockIdx.y, blockIdx.y, slots, pitch, channels, c, taps);
    any_keep(x, state, s, blockIdx.y, slots, pitch, channels, c, taps);
  }
#endif
}

// `run` rows a block.
template <class T>
DEVICE void causal(const T* x, const float* w, const T* state, T* y, Sequences s, int64_t slots, int64_t pitch,
                   int channels, int taps, int rows, int run) {
  int thread = blockIdx.x * THREADS + threadIdx.x;
  int first = blockIdx.y * run, last = min(first + run, rows);
#if TAPS > 0
  if (by_runs(x, w, state, y, pitch, channels)) {
    int channel = thread * PER16<T>;
    if (channel < channels) causal_run<PER16<T>>(x, w, state, y, s, slots, pitch, channels, channel, first, last);
    return;
  }
  for (int c = thread; c < channels; c += gridDim.x * THREADS) {
    causal_run<1>(x, w, state, y, s, slots, pitch, channels, c, first, last);
  }
#else
  for (int c = thread; c < channels; c += gridDim.x * THREADS) {
    int i = 0;
    for (int row = first; row < last; ++row) {
      while (i + 1 < s.count && s.starts[i + 1] <= row) ++i;
      any_row(x, w, state, y, s, i, row, slots, pitch, channels, c, taps);
    }
  }
#endif
}

template <class T>
DEVICE void keep(const T* x, const float* w, T* state, Sequences s, int64_t slots, int64_t pitch, int channels,
                 int taps) {
  int thread = blockIdx.x * THREADS + threadIdx.x;
#if TAPS > 0
  if (by_runs(x, w, state, x, pitch, channels)) {
    if (thread < channels / PER16<T>) keep_run<PER16<T>>(x, state, s, slots, pitch, channels, thread * PER16<T>);
    return;
  }
  for (int c = thread; c < channels; c += gridDim.x * THREADS) keep_run<1>(x, state, s, slots, pitch, channels, c);
#else
  for (int c = thread; c < channels; c += gridDim.x * THREADS) {
    any_keep(x, state, s, blockIdx.y, slots, pitch, channels, c, taps);
  }
#endif
}

#define ENTRIES(T, SUFFIX)                                                                                            \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                       \
      step_##SUFFIX(const T* x, const float* w, T* state, T* y, const int* starts, const int* contexts,               \
                    const int* slot_in, const int* slot_out, int count, int64_t slots, int64_t pitch, int channels,   \
                    int taps) {                                                                                       \
    after_earlier_kernels();                                                                                          \
    step(x, w, state, y, Sequences{starts, contexts, slot_in, slot_out, count}, slots, pitch, channels, taps);        \
  }                                                                                                                   \
  EXPORT(step_##SUFFIX)                                                                                               \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                       \
      causal_##SUFFIX(const T* x, const float* w, const T* state, T* y, const int* starts, const int* contexts,       \
                      const int* slot_in, const int* slot_out, int count, int64_t slots, int64_t pitch, int channels, \
                      int taps, int rows, int run) {                                                                  \
    after_earlier_kernels();                                                                                          \
    causal(x, w, state, y, Sequences{starts, contexts, slot_in, slot_out, count}, slots, pitch, channels, taps,       \
           rows, run);                                                                                                \
  }                                                                                                                   \
  EXPORT(causal_##SUFFIX)                                                                                             \
  KERNEL LAUNCH_BOUNDS(THREADS)                                                                                       \
      keep_##SUFFIX(const T* x, const float* w, T* state, const int* starts, const int* contexts, const int* slot_in, \
                    const int* slot_out, int count, int64_t slots, int64_t pitch, int channels, int taps) {           \
    after_earlier_kernels();                                                                                          \
    keep(x, w, state, Sequences{starts, contexts, slot_in, slot_out, count}, slots, pitch, channels, taps);           \
  }                                                                                                                   \
  EXPORT(keep_##SUFFIX)

ENTRIES(float, f32)
ENTRIES(bf16, bf16)
