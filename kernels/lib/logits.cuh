// One row of logits: read in stripes of a warp's width, changed by its sorted edits on the way, and its log of a sum of
// exponentials in an order that hangs on the row's length alone. Lanes that are no finite numbers read as -inf.
#ifndef LIB_LOGITS
#define LIB_LOGITS
#include "lib/base.cuh"
#include "lib/select.cuh"

// Consecutive stripes are summed by one warp; a row has at most so many of these ranges, however many blocks it has.
constexpr int RANGES = 512;

// A change to one lane, before anything else is looked at.
struct alignas(16) Edit {
  uint32_t id;
  uint32_t count;  // in the output
  float bias;
  uint32_t seen;  // in the prompt or the output
};

struct Penalties {
  float repetition, presence, frequency;
};

template <class T>
struct Row {
  static constexpr int N = 16 / sizeof(T);              // lanes of a vector: of one thread
  static constexpr int STRIPE = 32 * N;                 // lanes of a stripe: a vector for each thread of a warp
  static constexpr int AHEAD = sizeof(T) == 4 ? 4 : 2;  // stripes that are loaded together where little is computed
  const T* lanes;
  int decodable;
  bool vector;  // 16-byte loads are aligned

  const Edit* edits;  // by rising id
  int edit_count;
  const Penalties* penalties;  // where there are edits
};

DEVICE float finite_or_least(float x) { return fabsf(x) <= LARGEST ? x : -INFINITE; }

DEVICE void unpack(const Words4& w, float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = bits_f32(w.w[i]);
}
DEVICE void unpack(const Words4& w, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = bf16_low(w.w[i]);
    v[2 * i + 1] = bf16_high(w.w[i]);
  }
}

template <int N>
DEVICE float largest_of(const float (&z)[N]) {
  float largest = z[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmaxf(largest, z[i]);
  return largest;
}

// The finite lanes of a vector that are at least `low`, as bits.
template <int N>
DEVICE uint32_t lanes_from(const float (&z)[N], float low) {
  uint32_t in = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) in |= uint32_t(z[i] >= low && z[i] <= LARGEST) << i;
  return in;
}

DEVICE uint32_t lane_bits(const float* lanes, int id, int decodable) {
  return id < decodable ? f32_bits(lanes[id]) : 0xFF800000u;
}
DEVICE uint32_t lane_bits(const bf16* lanes, int id, int decodable) { return id < decodable ? lanes[id].bits : 0xFF80u; }

// This thread's vector of a stripe as the row has it; -inf past the decodable lanes and from stripe `end` on.
template <class T>
DEVICE Words4 fetch_careful(const Row<T>& row, int stripe, int end) {
  constexpr int N = Row<T>::N;
  int id = stripe * Row<T>::STRIPE + int(threadIdx.x & 31) * N;
  int limit = stripe < end ? row.decodable : 0;
  Words4 w;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (N == 4) {
      w.w[i] = lane_bits(row.lanes, id + i, limit);
    } else {
      w.w[i] = lane_bits(row.lanes, id + 2 * i, limit) | lane_bits(row.lanes, id + 2 * i + 1, limit) << 16;
    }
  }
  return w;
}

template <int AHEAD, class T>
DEVICE void fetch(const Row<T>& row, int stripe, int end, Words4 (&w)[AHEAD]) {
  if (row.vector && stripe + AHEAD <= end && (stripe + AHEAD) * Row<T>::STRIPE <= row.decodable) {
    const T* lanes = row.lanes + stripe * Row<T>::STRIPE + int(threadIdx.x & 31) * Row<T>::N;
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) w[u] = load16_stream(lanes + u * Row<T>::STRIPE);
  } else {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      if (row.vector && stripe + u < end && (stripe + u + 1) * Row<T>::STRIPE <= row.decodable) {
        w[u] = load16_stream(row.lanes + (stripe + u) * Row<T>::STRIPE + int(threadIdx.x & 31) * Row<T>::N);
      } else {
        w[u] = fetch_careful(row, stripe + u, end);
      }
    }
  }
}

template <class T>
DEVICE int stripes_of(const Row<T>& row) {
  return CEIL_DIV(row.decodable, Row<T>::STRIPE);
}

// Bias, then the repetition penalty, then frequency, then presence: one rounding each, kept finite.
DEVICE float edited(const Penalties& penalties, float value, const Edit& edit) {
  float z = value + edit.bias;
  if (edit.seen) z = z > 0.0f ? z / penalties.repetition : z * penalties.repetition;
  if (edit.count > 0) {
    z -= penalties.frequency * float(edit.count);
    z -= penalties.presence;
  }
  return fminf(fmaxf(z, -LARGEST), LARGEST);
}

// A warp's place in the edits of its row.
struct Cursor {
  int at;
  uint32_t next;  // the id of the edit at `at`, the largest number past the end
};

template <class T>
DEVICE Cursor cursor_from(const Row<T>& row, int id) {
  if (row.edit_count == 0) return Cursor{0, ~0u};
  int at = int(first_key(0, row.edit_count, [&](uint32_t i) { return row.edits[i].id >= uint32_t(id); }));
  return Cursor{at, at < row.edit_count ? row.edits[at].id : ~0u};
}

// Applies the edits of `count` stripes from `stripe` on; the warp's stripes come in rising order. `buffer` is shared memory of
// as many lanes, the warp's own.
template <int AHEAD, class T>
DEVICE void apply_edits(const Row<T>& row, Cursor& cursor, float* buffer, int stripe, int count,
                        float (&z)[AHEAD][Row<T>::N]) {
  constexpr int N = Row<T>::N;
  uint32_t from = uint32_t(stripe * Row<T>::STRIPE), end = from + uint32_t(count * Row<T>::STRIPE);
  if (cursor.next >= end) return;
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int u = 0; u < AHEAD; ++u)
#pragma unroll
    for (int i = 0; i < N; ++i) buffer[u * Row<T>::STRIPE + lane * N + i] = z[u][i];
  __syncwarp();
#pragma unroll 1
  while (cursor.next < end) {
    int at = cursor.at + lane;
    Edit edit{~0u, 0, 0.0f, 0};
    if (at < row.edit_count) edit = row.edits[at];
    bool here = edit.id < end;
    if (here) {
      float value = buffer[edit.id - from];
      if (fabsf(value) <= LARGEST) buffer[edit.id - from] = edited(*row.penalties, value, edit);
    }
    int done = __popc(__ballot_sync(ALL_LANES, here));
    cursor.at += done;
    // After 32 of them lane 0 has one that is done, and the next round finds the one to come.
    cursor.next = __shfl_sync(ALL_LANES, edit.id, done & 31);
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < AHEAD; ++u)
#pragma unroll
    for (int i = 0; i < N; ++i) z[u][i] = buffer[u * Row<T>::STRIPE + lane * N + i];
  __syncwarp();
}

// Calls body(first id of this thread, its lanes after edits) for stripes first..end, with whole warps, until it gives false.
// Lanes that are no finite numbers come as they are. AHEAD stripes are loaded together; `buffer` is shared memory of as many
// lanes, the warp's own.
template <int AHEAD, class T, class Body>
DEVICE void each_stripe(const Row<T>& row, int first, int end, float* buffer, Body body) {
  constexpr int N = Row<T>::N;
  if (first >= end) return;
  Words4 next[AHEAD];
  fetch(row, first, end, next);
  Cursor cursor = cursor_from(row, first * Row<T>::STRIPE);
#pragma unroll 1
  for (int stripe = first; stripe < end; stripe += AHEAD) {
    float z[AHEAD][N];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) unpack(next[u], z[u]);
    if (stripe + AHEAD < end) fetch(row, stripe + AHEAD, end, next);
    apply_edits(row, cursor, buffer, stripe, min(AHEAD, end - stripe), z);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      // Lanes past the end are -inf.
      if (!body(uint32_t(stripe + u) * Row<T>::STRIPE + (threadIdx.x & 31) * N, z[u])) return;
    }
  }
}

// The stripes of this warp, where `parts` blocks share the row and this is the `part`-th: of at most 2^15 for 2^10 warps.
template <class T>
DEVICE void stripes_of_warp(const Row<T>& row, int part, int parts, int& first, int& end) {
  int warps = blockDim.x >> 5, warp = part * warps + int(threadIdx.x >> 5);
  int stripes = stripes_of(row);
  first = stripes * warp / (parts * warps);
  end = stripes * (warp + 1) / (parts * warps);
}

// The lanes of a row from `least` on, for block_select by this block alone: a function of f(in, key, weight), which is called
// by whole warps. weigh(lane, id, key) gives a lane's weight, 0 for one that is left out, and may change its key, which is the
// value's. Lanes go through the warp's stripe of shared memory, so
// that one copy of the code serves all of a vector's.
template <class T, class Weigh>
DEVICE auto weighing(const Row<T>& row, float* buffer, float least, Weigh weigh) {
  return [&row, buffer, least, weigh](auto f) {
    constexpr int N = Row<T>::N;
    int first, end;
    stripes_of_warp(row, 0, 1, first, end);
    each_stripe<1>(row, first, end, buffer, [&](uint32_t id, const float(&z)[N]) {
      float* own = buffer + (threadIdx.x & 31) * N;
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = z[i];
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        bool in = own[i] >= least && own[i] <= LARGEST;
        uint32_t key = in ? ordered(own[i]) : 0;
        uint64_t weight = in ? weigh(own[i], id + i, key) : 0;
        f(weight > 0, key, weight);
      }
      return true;
    });
  };
}

// The largest value of a range and the sum of exponentials relative to it.
struct alignas(8) Part {
  float max;
  float sum;
};

// How a row falls into ranges.
struct Ranges {
  int stripes;  // of the row
  int per;      // of a range
  int used;     // ranges
};

template <class T>
DEVICE Ranges ranges_of(const Row<T>& row) {
  Ranges r;
  r.stripes = stripes_of(row);
  r.per = CEIL_DIV(r.stripes, RANGES);
  r.used = CEIL_DIV(r.stripes, r.per);
  return r;
}

// Sums ranges first..end, stores the parts, and calls body(stripe, count, lanes of that and the following count - 1 stripes)
// on the way. Lanes come raw, those that are not finite as -inf.
template <class T, class Body>
DEVICE void sum_ranges(const Row<T>& row, const Ranges& ranges, int first, int end, Part* parts, Body body) {
  constexpr int N = Row<T>::N, AHEAD = Row<T>::AHEAD;
  if (first >= end) return;
  int last = min(end * ranges.per, ranges.stripes);
  int stripe = first * ranges.per, range = first, range_end = min(stripe + ranges.per, last);
  float max = -INFINITE, sum = 0.0f;
  Words4 next[AHEAD];
  fetch(row, stripe, range_end, next);
#pragma unroll 1
  while (stripe < last) {
    float v[AHEAD][N];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) unpack(next[u], v[u]);
    int here = stripe, count = min(AHEAD, range_end - stripe);
    stripe += AHEAD;
    bool whole = stripe >= range_end;
    if (whole) {
      stripe = range_end;
      range_end = min(range_end + ranges.per, last);
    }
    if (stripe < last) fetch(row, stripe, range_end, next);

    float largest = -INFINITE;
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[u][i] = finite_or_least(v[u][i]);
        largest = fmaxf(largest, v[u][i]);
      }
    largest = warp_max(largest);
    if (largest > max) {
      sum *= expf(max - largest);
      max = largest;
    }
    // Nothing finite yet: every difference from 0 is -inf and every term 0.
    float base = max > -INFINITE ? max : 0.0f;
    float terms = 0.0f;
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      float few = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) few += expf(v[u][i] - base);
      terms += few;
    }
    sum += terms;
    if (whole) {
      sum = warp_sum(sum);
      if ((threadIdx.x & 31) == 0) parts[range] = Part{max, sum};
      range += 1;
      max = -INFINITE;
      sum = 0.0f;
    }
    body(here, count, v);
  }
}

// The row's largest value and the logarithm of its sum relative to that, from the parts of its ranges; -inf and NaN without
// a finite lane. The order is fixed: two ranges by each of 256 threads, then lanes, then warps. All threads of the block
// call, at least 256 of them.
struct Total {
  float max;
  double ln_sum;
};

DEVICE Total total_of(const Part* parts, int used, Scratch& scratch) {
  static_assert(RANGES == 512, "two ranges for each of 256 threads");
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = threadIdx.x;
  Part none{-INFINITE, 0.0f};
  Part a = t < 256 && t < used ? parts[t] : none;
  Part b = t < 256 && t + 256 < used ? parts[t + 256] : none;
  uint64_t key = block_max64(ordered(fmaxf(a.max, b.max)), scratch);
  float max = unordered(uint32_t(key));
  float base = max > -INFINITE ? max : 0.0f;
  double sum = double(a.sum * expf(a.max - base)) + double(b.sum * expf(b.max - base));
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
  __syncthreads();
  double* warps = reinterpret_cast<double*>(scratch.warp);
  if (lane == 0 && warp < 8) warps[warp] = sum;
  __syncthreads();
  double total = 0.0;
  for (int w = 0; w < 8; ++w) total += warps[w];
  return Total{max, log(total)};
}

// In binary64, rounded once.
DEVICE float logprob_of(float value, const Total& total) {
  return float(double(value) - double(total.max) - total.ln_sum);
}

#endif
