// Raw log-probabilities of a target and of the most likely lanes of a row, by one block.
#ifndef LIB_SCORE
#define LIB_SCORE
#include "lib/base.cuh"
#include "lib/logits.cuh"
#include "lib/select.cuh"

constexpr int SCORE_THREADS = 512;
constexpr int SCORE_LISTED = DIGITS;  // keys in the words that a radix select needs

// The `n` lanes that rank first, sorted, at most SCORE_LISTED of them in `list`; gives how many there are. `most` is the
// largest of this thread's lanes.
template <class T>
DEVICE int first_lanes(const Row<T>& row, int n, float most, uint64_t* list, uint32_t* listed, float* buffer,
                       Scratch& scratch) {
  constexpr int N = Row<T>::N;
  uint32_t keys[1] = {ordered(most)};
  float floor = floor_of(keys, uint32_t(n), scratch);
  int first, end;
  stripes_of_warp(row, 0, 1, first, end);
  // Lanes of `last_key` count up to `last_id`.
  auto collect = [&](float least, uint32_t last_key, uint32_t last_id) {
    __syncthreads();
    if (threadIdx.x == 0) *listed = 0;
    __syncthreads();
    each_stripe<Row<T>::AHEAD>(row, first, end, buffer, [&](uint32_t id, const float(&z)[N]) {
      if (!__any_sync(ALL_LANES, largest_of(z) >= least)) return true;
      uint32_t in = lanes_from(z, least);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (ordered(z[i]) == last_key && id + i > last_id) in &= ~(1u << i);
      return append(listed, list, SCORE_LISTED, id, z, in);
    });
    __syncthreads();
    return *listed;
  };
  uint32_t count = collect(floor, 0, 0);
  if (count > uint32_t(SCORE_LISTED)) {
    uint32_t* words = reinterpret_cast<uint32_t*>(list);
    auto one = [](float, uint32_t, uint32_t&) { return uint64_t(1); };
    Found last = block_select(words, scratch, weighing(row, buffer, floor, one), [&](uint64_t) { return uint64_t(n); });
    auto ids = [&](float, uint32_t id, uint32_t& key) {
      bool in = key == last.key;
      key = ~id;
      return uint64_t(in);
    };
    uint64_t rest = uint64_t(n) - last.before;
    Found id = block_select(words, scratch, weighing(row, buffer, floor, ids), [&](uint64_t) { return rest; });
    count = collect(unordered(last.key), last.key, ~id.key);
  }
  int size = 32;
  while (size < int(count)) size *= 2;
  for (int i = int(count) + threadIdx.x; i < size; i += blockDim.x) list[i] = ~0ull;
  block_sort(list, size);
  return min(n, int(count));
}

// The row's parts of sums, list and reductions, in shared memory.
struct ScoreShared {
  Scratch scratch;
  uint64_t list[SCORE_LISTED];
  Part sums[RANGES];
  uint32_t listed;
};

// Row `r` of logits. Of its most likely lanes `n` are wanted in `width` places; there may be no target.
template <class T>
DEVICE void score_row(int64_t r, const T* logits, int vocab, int decodable, const int* targets, int n, int width,
                      float* logprobs, uint8_t* valid, int* top_ids, float* top_logprobs, ScoreShared& shared,
                      float* buffer) {
  Row<T> row;
  row.lanes = logits + r * vocab;
  row.decodable = decodable;
  row.vector = aligned16(logits, int64_t(vocab) * int(sizeof(T)));
  row.edits = nullptr;
  row.edit_count = 0;
  row.penalties = nullptr;
  n = min(n, width);
  int found = 0;
  Total total{-INFINITE, 0.0};
  if (targets != nullptr || n > 0) {
    int warps = SCORE_THREADS / 32, warp = threadIdx.x >> 5;
    Ranges ranges = ranges_of(row);
    float most = -INFINITE;
    sum_ranges(row, ranges, ranges.used * warp / warps, ranges.used * (warp + 1) / warps, shared.sums,
               [&](int, int, const float(&v)[Row<T>::AHEAD][Row<T>::N]) {
#pragma unroll
                 for (int u = 0; u < Row<T>::AHEAD; ++u) most = fmaxf(most, largest_of(v[u]));
               });
    __syncthreads();
    total = total_of(shared.sums, ranges.used, shared.scratch);
    if (n > 0 && total.max > -INFINITE)
      found = first_lanes(row, n, most, shared.list, &shared.listed, buffer, shared.scratch);
  }
  if (targets != nullptr && threadIdx.x == 0) {
    int target = targets[r];
    bool any = total.max > -INFINITE;
    // No id of the vocabulary: the host's arm refuses it.
    float logprob = bits_f32(0x7FC00000u);
    if (any && target >= 0 && target < vocab)
      logprob = logprob_of(target < decodable ? finite_or_least(to_f32(row.lanes[target])) : -INFINITE, total);
    logprobs[r] = logprob;
    valid[r] = any;
  }
  for (int i = threadIdx.x; i < width; i += SCORE_THREADS) {
    uint32_t id = i < found ? uint32_t(shared.list[i]) : 0;
    top_ids[r * width + i] = i < found ? int(id) : -1;
    top_logprobs[r * width + i] = i < found ? logprob_of(to_f32(row.lanes[id]), total) : -INFINITE;
  }
}

#endif
