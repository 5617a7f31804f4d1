// From logits [n, V] (f32 or bf16) to a token for each row, the very token that src/ops/reference/sampler.rs draws; compiled
// without contraction, so that lib/elementary.cuh gives the host's bits.
//
// A row is cut into `gridDim.x` parts that run side by side; blockIdx.y is the row. Rows are of four kinds:
//   greedy      the largest lane after edits: `scan` alone.
//   list        top-k of a small k. The k-th largest of the maxima of groups of lanes bounds the k-th lane from below, so
//               `scan` finds a floor that few lanes reach; `list` collects and sorts those.
//   race        neither top-k nor top-p: `race` lets every lane of min-p compete.
//   histogram   top-p over many lanes, or top-k of a large k. `histogram` adds up counts and masses by distance from the
//               largest lane, which leaves one or two bins in doubt; `settle` lets the lanes above them compete and
//               collects and sorts those in doubt.
// Each kernel's last block of a row goes on with what all of them found. A list that does not fit (thousands of equal
// logits) is selected from by that block, digit by digit. Sums that decide are of integers, the best of parts is by a total
// order, the log of the sum of exponentials is over ranges that do not depend on the parts: nothing of a row's result hangs
// on the batch.
//
// Workspace of a row: ROW_BYTES (header, then the body that the kernels use one after the other), then 16 bytes a part.
#include "lib/base.cuh"
#include "lib/elementary.cuh"
#include "lib/logits.cuh"
#include "lib/race.cuh"
#include "lib/score.cuh"
#include "lib/select.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROW_BYTES = 2048 * 12;
constexpr int HEADER_BYTES = 192;
constexpr int PART_BYTES = 16;
constexpr int BODY_BYTES = ROW_BYTES - HEADER_BYTES;
// The body holds, in turn: a row's parts of sums and the maxima of groups (or minima of parts); bins of masses and counts;
// a list of rank keys.
constexpr int GROUPS = (BODY_BYTES - RANGES * int(sizeof(Part))) / 4;
constexpr int BINS = BODY_BYTES / 12;
constexpr int LISTED = BODY_BYTES / 8;
constexpr int SORTED = 4096;  // LISTED as a power of two
constexpr int HELD = CEIL_DIV(GROUPS, THREADS);

enum Kind : uint32_t { GREEDY, LIST, RACE, HISTOGRAM };

// One row's parameters, as the launch writes them.
struct Params {
  float temperature, top_p, min_p;
  Penalties penalties;
  uint32_t top_k;  // 0 where off
  uint32_t kind;
  uint32_t seed[2], step[2];
  uint32_t edits, edit_count;  // the first of the row's, and how many
  uint32_t logprobs;
  uint32_t ticket;  // blocks of the running kernel that are done with the row; 0 between kernels
};

// What a row's kernels tell each other.
struct Header {
  uint32_t done;  // the row has its result
  uint32_t best_id;
  float best;   // the largest lane after edits
  float most;   // it, after the temperature
  float floor;  // lanes below are not kept
  float scale;  // bins for each unit of distance from `most`
  uint32_t listed;
  uint32_t top_k;  // 0 where all of the row is kept by it
  Total raw;
  // Of lists that hold only lanes in doubt: those from `sure` on are kept, those below `near` are not by top-p, the k-th is
  // among `k_low`..`k_high`.
  float sure, near, k_low, k_high;
  uint64_t mass_above;     // of the lanes from `sure` on
  uint64_t k_mass_above;   // of the lanes from `k_high` on
  uint32_t k_count_above;  // their number
};
static_assert(sizeof(Header) <= HEADER_BYTES && sizeof(Params) == 64, "as the launch lays them out");

struct alignas(16) Best {
  uint64_t key;     // of the largest lane of a part: ordered value, then inverted id
  uint64_t winner;  // of its race: score, then inverted id
};

struct Shared {
  Scratch scratch;
  uint32_t ticket;
};

template <class T>
struct Task {
  Row<T> row;
  Params* params;
  Header* header;
  unsigned char* body;
  Best* parts;
  int* tokens;  // of all rows, as the next two
  uint8_t* valid;
  float* logprobs;
  uint64_t* pool;  // shared: SORTED words, in kernels that sort
  float* buffer;   // shared, of the same: lanes of the warp's stripes
};

template <class T>
DEVICE Task<T> task_of(const T* logits, int vocab, int decodable, Params* params, const Edit* edits,
                       unsigned char* workspace, int* tokens, uint8_t* valid, float* logprobs) {
  int64_t r = blockIdx.y;
  Task<T> task;
  task.params = params + r;
  task.row.lanes = logits + r * vocab;
  task.row.decodable = decodable;
  task.row.vector = aligned16(logits, int64_t(vocab) * int(sizeof(T)));
  task.row.edits = edits + task.params->edits;
  task.row.edit_count = int(task.params->edit_count);
  task.row.penalties = &task.params->penalties;
  unsigned char* own = workspace + r * (ROW_BYTES + int64_t(gridDim.x) * PART_BYTES);
  task.header = reinterpret_cast<Header*>(own);
  task.body = own + HEADER_BYTES;
  task.parts = reinterpret_cast<Best*>(own + ROW_BYTES);
  task.tokens = tokens;
  task.valid = valid;
  task.logprobs = logprobs;
  return task;
}

// Whether this block is the last of its row; if so, it sees what the others wrote.
template <class T>
DEVICE bool last_of_row(const Task<T>& task, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) shared.ticket = take_ticket(&task.params->ticket);
  __syncthreads();
  if (shared.ticket != gridDim.x - 1) return false;
  if (threadIdx.x == 0) task.params->ticket = 0;
  return true;
}

// The bin of a lane at temperature: a rising function of its distance from the largest.
DEVICE int bin_of(float t, float most, float scale) {
  float place = (most - t) * scale;
  return place < float(BINS - 1) ? int(place) : BINS - 1;
}

DEVICE Race race_of(const Params& params, const Header& header) {
  return race_of(params.temperature, params.seed, params.step, header.best, header.best_id, header.most);
}

// --- results --------------------------------------------------------------------------------------------------------

// By thread 0. The log-probability is of the lane as the model left it.
template <class T>
DEVICE void publish(const Task<T>& task, uint32_t id, const Total& raw) {
  task.tokens[blockIdx.y] = int(id);
  task.valid[blockIdx.y] = 1;
  task.logprobs[blockIdx.y] = logprob_of(to_f32(task.row.lanes[id]), raw);
}

// Ends a race: the best of the block's threads, and of the parts where `parts` is set. By all threads.
template <class T>
DEVICE void publish_winner(const Task<T>& task, Shared& shared, uint64_t best, bool parts) {
  if (parts) {
    for (int i = threadIdx.x; i < int(gridDim.x); i += THREADS) {
      uint64_t other = task.parts[i].winner;
      best = other > best ? other : best;
    }
  }
  best = block_max64(best, shared.scratch);
  if (threadIdx.x == 0) publish(task, ~uint32_t(best), task.header->raw);
}

// The least logit that is in min-p: p >= min_p * largest p, as logits at temperature.
DEVICE float least_of_min_p(const Params& params, float best, float most) {
  if (!(params.min_p > 0.0f)) return -LARGEST;
  float least = most + exact_ln(fmaxf(params.min_p, 1.17549435e-38f));
  float temperature = params.temperature;
  return unordered(first_key(LEAST_KEY, ordered(best), [&](uint32_t key) {
    return tempered(unordered(key), temperature) >= least;
  }));
}

// How many of a sorted list are at least `z`.
DEVICE int at_least(const uint64_t* sorted, int n, float z) {
  uint32_t most = ~ordered(z);
  int low = 0;
  while (low < n) {
    int mid = (low + n) / 2;
    if (uint32_t(sorted[mid] >> 32) <= most) {
      low = mid + 1;
    } else {
      n = mid;
    }
  }
  return low;
}

// What of p's share of `total` must be reached.
DEVICE uint64_t share_of(float p, uint64_t total) { return uint64_t(ceil(double(p) * double(total))); }

// Sorts the row's list of n lanes and lets those that are kept compete.
template <class T>
DEVICE void settle_list(const Task<T>& task, Shared& shared, int n, bool parts) {
  const Header& h = *task.header;
  const Params& params = *task.params;
  const uint64_t* list = reinterpret_cast<const uint64_t*>(task.body);
  int size = 32;
  while (size < n) size *= 2;
  for (int i = threadIdx.x; i < size; i += THREADS) task.pool[i] = i < n ? list[i] : ~0ull;
  block_sort(task.pool, size);

  int kept = n;
  int64_t k = -1;
  if (h.top_k != 0) {
    k = int64_t(at_least(task.pool, n, h.k_high)) + h.top_k - h.k_count_above - 1;
    // Fewer lanes than k: all are kept.
    if (k < n) kept = at_least(task.pool, n, rank_value(task.pool[k]));
  }
  if (params.top_p < 1.0f) {
    int shift = mass_shift(task.row.decodable);
    auto mass = [&](float z) { return mass_of(exact_exp(tempered(z, params.temperature) - h.most), shift); };
    int per = CEIL_DIV(kept, THREADS), from = min(int(threadIdx.x) * per, kept), to = min(from + per, kept);
    uint64_t mine = 0, mine_at_k = 0, all;
    for (int i = from; i < to; ++i) {
      float z = rank_value(task.pool[i]);
      uint64_t m = mass(z);
      mine += m;
      if (h.k_low <= z && z < h.k_high) mine_at_k += m;
    }
    uint64_t needed = share_of(params.top_p, h.k_mass_above + block_sum64(mine_at_k, shared.scratch));
    uint64_t before = h.mass_above + block_before64(mine, all, shared.scratch);
    uint64_t in = 0;
    for (int i = from; i < to; ++i) {
      float z = rank_value(task.pool[i]);
      in += before < needed && z >= h.near;
      before += mass(z);
    }
    kept = int(block_sum64(in, shared.scratch));
  }
  Race race = race_of(params, h);
  for (int i = threadIdx.x; i < kept; i += THREADS) race_lane(race, rank_value(task.pool[i]), uint32_t(task.pool[i]));
  publish_winner(task, shared, race.best, parts);
}

// The row by this block alone, whatever it holds: the k-th by a radix select of counts, top-p by one of masses and one of
// ids, then the race of what is kept.
template <class T>
DEVICE void settle_row(const Task<T>& task, Shared& shared) {
  const Header& h = *task.header;
  const Params& params = *task.params;
  const Row<T>& row = task.row;
  uint32_t* words = reinterpret_cast<uint32_t*>(task.pool);
  float least = h.floor;
  if (h.top_k != 0) {
    auto one = [](float, uint32_t, uint32_t&) { return uint64_t(1); };
    Found kth = block_select(words, shared.scratch, weighing(row, task.buffer, least, one),
                             [&](uint64_t) { return uint64_t(h.top_k); });
    if (kth.found) least = unordered(kth.key);
  }
  // Lanes of the last value of top-p are kept up to an id.
  uint32_t last_id = ~0u, last_key = 0;
  if (params.top_p < 1.0f) {
    int shift = mass_shift(row.decodable);
    auto mass = [&](float z) { return mass_of(exact_exp(tempered(z, params.temperature) - h.most), shift); };
    auto masses = [&](float z, uint32_t, uint32_t&) { return mass(z); };
    uint64_t needed = 0;
    Found last = block_select(words, shared.scratch, weighing(row, task.buffer, least, masses), [&](uint64_t total) {
      needed = share_of(params.top_p, total);
      return needed;
    });
    last_key = last.key;
    least = unordered(last_key);
    uint64_t each = mass(least), rest = (needed - last.before + each - 1) / each;
    auto ids = [&](float, uint32_t id, uint32_t& key) {
      bool in = key == last_key;
      key = ~id;
      return uint64_t(in);
    };
    last_id = ~block_select(words, shared.scratch, weighing(row, task.buffer, least, ids), [&](uint64_t) { return rest; }).key;
  }
  Race race = race_of(params, h);
  auto compete = [&](float z, uint32_t id, uint32_t& key) {
    if (key != last_key || id <= last_id) {
      Words4 words = race_words(race, id / 2);
      race_estimated(race, z, id, id & 1 ? words.w[2] : words.w[0], id & 1 ? words.w[3] : words.w[1]);
    }
    return uint64_t(0);
  };
  weighing(row, task.buffer, least, compete)([&](bool, uint32_t, uint64_t) { raise_bar(race); });
  publish_winner(task, shared, race.best, false);
}

// --- scan: the largest lane, the sum of exponentials, and what the row's kind needs next ------------------------------

// A power of two, so that the groups of all parts fit: threads have four groups each, of which so many are taken together.
DEVICE int groups_joined() {
  int joined = 1;
  while (int(gridDim.x) * THREADS * 4 / joined > GROUPS) joined *= 2;
  return joined;
}

// Bins as wide as the row needs: from the largest lane down to the least that matters.
DEVICE float scale_of_bins(const Params& params, const Header& h, float least, int decodable) {
  float reach = h.most - tempered(fmaxf(least, h.floor), params.temperature);
  // Below this distance all lanes together have less than the share that top-p leaves out.
  if (h.top_k == 0) reach = fminf(reach, logf(float(decodable) / (1.0f - params.top_p)) + 1.0f);
  return reach > 0.0f ? fminf(float(BINS) / reach, 1e30f) : 1.0f;
}

template <class T>
DEVICE void scan(const Task<T>& task, Shared& shared) {
  constexpr int N = Row<T>::N, AHEAD = Row<T>::AHEAD;
  const Row<T>& row = task.row;
  Params& params = *task.params;
  uint32_t kind = params.kind;
  Part* sums = reinterpret_cast<Part*>(task.body);
  float* groups = reinterpret_cast<float*>(sums + RANGES);
  int lane = threadIdx.x & 31, warp = blockIdx.x * WARPS + (threadIdx.x >> 5), warps = gridDim.x * WARPS;
  Ranges ranges = ranges_of(row);
  int first = ranges.used * warp / warps, end = ranges.used * (warp + 1) / warps;

  Cursor cursor = cursor_from(row, first * ranges.per * Row<T>::STRIPE);
  float best = -INFINITE, least = INFINITE;
  uint32_t best_id = 0;
  float group[4] = {-INFINITE, -INFINITE, -INFINITE, -INFINITE};
  sum_ranges(row, ranges, first, end, sums, [&](int stripe, int count, float(&z)[AHEAD][N]) {
    apply_edits(row, cursor, task.buffer, stripe, count, z);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      int from = (stripe + u) * Row<T>::STRIPE;
      float largest = -INFINITE;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float four = fmaxf(fmaxf(z[u][i], z[u][i + 1]), fmaxf(z[u][i + 2], z[u][i + 3]));
        int g = N == 4 ? u : 2 * u + i / 4;
        group[g] = fmaxf(group[g], four);
        largest = fmaxf(largest, four);
      }
      if (largest > best) {
        best = largest;
#pragma unroll
        for (int i = N - 1; i >= 0; --i)
          if (z[u][i] == largest) best_id = uint32_t(from + lane * N + i);
      }
      if (kind == HISTOGRAM) {
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (z[u][i] > -INFINITE) least = fminf(least, z[u][i]);
      }
    }
  });

  int joined = groups_joined(), thread = int(blockIdx.x) * THREADS + int(threadIdx.x);
  if (kind == LIST) {
    if (joined >= 2) {
      group[0] = fmaxf(group[0], group[1]);
      group[1] = fmaxf(group[2], group[3]);
    }
    if (joined >= 4) group[0] = fmaxf(group[0], group[1]);
    for (int offset = 1; offset < joined / 4; offset *= 2)
      group[0] = fmaxf(group[0], __shfl_xor_sync(ALL_LANES, group[0], offset));
    if (joined <= 4) {
      int each = 4 / joined;
#pragma unroll
      for (int g = 0; g < 4; ++g)
        if (g < each) groups[thread * each + g] = group[g];
    } else if (thread % (joined / 4) == 0) {
      groups[thread / (joined / 4)] = group[0];
    }
  }
  uint64_t key = best > -INFINITE ? uint64_t(ordered(best)) << 32 | ~best_id : 0;
  key = block_max64(key, shared.scratch);
  if (kind == HISTOGRAM) {
    least = unordered(~uint32_t(block_max64(~ordered(least), shared.scratch)));
    if (threadIdx.x == 0) groups[blockIdx.x] = least;
  }
  if (threadIdx.x == 0) task.parts[blockIdx.x].key = key;
  if (!last_of_row(task, shared)) return;

  // What all parts found.
  Header& h = *task.header;
  key = 0;
  for (int i = threadIdx.x; i < int(gridDim.x); i += THREADS) key = task.parts[i].key > key ? task.parts[i].key : key;
  key = block_max64(key, shared.scratch);
  Total raw = total_of(sums, ranges.used, shared.scratch);
  if (key == 0 || kind == GREEDY) {
    if (threadIdx.x == 0) {
      h.done = 1;
      if (key != 0) {
        publish(task, ~uint32_t(key), raw);
      } else {
        task.tokens[blockIdx.y] = -1;
        task.valid[blockIdx.y] = 0;
        task.logprobs[blockIdx.y] = bits_f32(0x7FC00000u);
      }
    }
    return;
  }
  Header next;
  next.done = 0;
  next.best_id = ~uint32_t(key);
  next.best = unordered(uint32_t(key >> 32));
  next.most = tempered(next.best, params.temperature);
  next.floor = least_of_min_p(params, next.best, next.most);
  next.scale = 1.0f;
  next.listed = 0;
  next.top_k = params.top_k;
  next.raw = raw;
  next.sure = next.k_high = INFINITE;
  next.near = next.k_low = -LARGEST;
  next.mass_above = next.k_mass_above = 0;
  next.k_count_above = 0;
  if (kind == LIST) {
    int n = int(gridDim.x) * THREADS * 4 / joined;
    uint32_t keys[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int at = i * THREADS + int(threadIdx.x);
      keys[i] = at < n ? ordered(groups[at]) : 0;
    }
    next.floor = fmaxf(next.floor, floor_of(keys, next.top_k, shared.scratch));
  }
  if (kind == HISTOGRAM) {
    least = INFINITE;
    for (int i = 0; i < int(gridDim.x); ++i) least = fminf(least, groups[i]);
    next.scale = scale_of_bins(params, next, least, row.decodable);
    __syncthreads();
    for (int i = threadIdx.x; i < BODY_BYTES / 8; i += THREADS) reinterpret_cast<uint64_t*>(task.body)[i] = 0;
  }
  if (threadIdx.x == 0) h = next;
}

// --- list, race, histogram, settle -----------------------------------------------------------------------------------

// Whether the row has this kernel's kind and no result yet.
template <class T>
DEVICE bool concerns(const Task<T>& task, Kind kind) {
  return task.params->kind == kind && !task.header->done;
}

// Ends a row whose list is complete, or known to be too long.
template <class T>
DEVICE void settle_last(const Task<T>& task, Shared& shared, bool parts) {
  uint32_t n = task.header->listed;
  if (n <= uint32_t(LISTED)) {
    settle_list(task, shared, int(n), parts);
  } else {
    settle_row(task, shared);
  }
}

template <class T>
DEVICE void list(const Task<T>& task, Shared& shared) {
  if (!concerns(task, LIST)) return;
  Header* header = task.header;
  uint64_t* list = reinterpret_cast<uint64_t*>(task.body);
  float floor = header->floor;
  int first, end;
  stripes_of_warp(task.row, blockIdx.x, gridDim.x, first, end);
  each_stripe<Row<T>::AHEAD>(task.row, first, end, task.buffer, [&](uint32_t id, const float(&z)[Row<T>::N]) {
    if (!__any_sync(ALL_LANES, largest_of(z) >= floor)) return true;
    return append(&header->listed, list, LISTED, id, z, lanes_from(z, floor));
  });
  if (last_of_row(task, shared)) settle_last(task, shared, false);
}

template <class T>
DEVICE void race(const Task<T>& task, Shared& shared) {
  if (!concerns(task, RACE)) return;
  Race race = race_of(*task.params, *task.header);
  float floor = task.header->floor;
  float* own = task.buffer + (threadIdx.x & 31) * Row<T>::N;
  int first, end;
  stripes_of_warp(task.row, blockIdx.x, gridDim.x, first, end);
  each_stripe<8 / Row<T>::N>(task.row, first, end, task.buffer, [&](uint32_t id, const float(&z)[Row<T>::N]) {
    if (__any_sync(ALL_LANES, largest_of(z) >= floor)) race_vector(race, id, z, lanes_from(z, floor), own);
    return true;
  });
  uint64_t winner = block_max64(race.best, shared.scratch);
  if (threadIdx.x == 0) task.parts[blockIdx.x].winner = winner;
  if (last_of_row(task, shared)) publish_winner(task, shared, 0, true);
}

// Which bins are in doubt, from all of the row's bins. By the row's last block.
template <class T>
DEVICE void doubt_of_bins(const Task<T>& task, Shared& shared) {
  constexpr int PER = CEIL_DIV(BINS, THREADS);
  Header& h = *task.header;
  const Params& params = *task.params;
  uint64_t* masses = task.pool;
  uint32_t* counts = reinterpret_cast<uint32_t*>(masses + BINS);
  for (int i = threadIdx.x; i < BODY_BYTES / 8; i += THREADS) task.pool[i] = reinterpret_cast<uint64_t*>(task.body)[i];
  __syncthreads();
  int from = int(threadIdx.x) * PER, to = min(from + PER, BINS);
  uint64_t count = 0, mass = 0, all_count, all_mass;
#pragma unroll 1
  for (int i = from; i < to; ++i) {
    count += counts[i];
    mass += masses[i];
  }
  uint64_t counted = block_before64(count, all_count, shared.scratch);
  uint64_t massed = block_before64(mass, all_mass, shared.scratch);

  // Slots that one thread fills each: the k-th lane's bin, the count before it, the mass before and behind it; the first and
  // the last bin that top-p may end in, the mass before the first.
  enum { K_BIN, K_COUNT, K_MASS, K_MASS_BEHIND, P_FIRST, P_MASS, P_LAST };
  uint64_t* slots = task.pool + BODY_BYTES / 8;
  bool by_k = h.top_k != 0 && h.top_k < all_count, by_p = params.top_p < 1.0f;
  if (by_k) {
    uint64_t c = counted, m = massed;
#pragma unroll 1
    for (int i = from; i < to; ++i) {
      if (c < h.top_k && h.top_k <= c + counts[i]) {
        slots[K_BIN] = uint64_t(i);
        slots[K_COUNT] = c;
        slots[K_MASS] = m;
        slots[K_MASS_BEHIND] = m + masses[i];
      }
      c += counts[i];
      m += masses[i];
    }
  }
  __syncthreads();
  uint64_t k_mass = by_k ? slots[K_MASS] : all_mass;
  if (by_p) {
    // The k-th lane is somewhere in its bin, so what top-k leaves weighs from the one to the other.
    uint64_t at_least = share_of(params.top_p, k_mass), at_most = share_of(params.top_p, by_k ? slots[K_MASS_BEHIND] : k_mass);
    at_least = at_least > 0 ? at_least : 1;
    uint64_t m = massed;
#pragma unroll 1
    for (int i = from; i < to; ++i) {
      if (m < at_least && at_least <= m + masses[i]) {
        slots[P_FIRST] = uint64_t(i);
        slots[P_MASS] = m;
      }
      if (m < at_most && at_most <= m + masses[i]) slots[P_LAST] = uint64_t(i);
      m += masses[i];
    }
  }
  __syncthreads();
  // The least logit of bins 0..=bin.
  auto logit_of = [&](int bin) {
    if (bin < 0) return INFINITE;
    if (bin >= BINS - 1) return -LARGEST;
    return unordered(first_key(LEAST_KEY, ordered(h.best), [&](uint32_t key) {
      return bin_of(tempered(unordered(key), params.temperature), h.most, h.scale) <= bin;
    }));
  };
  int k_bin = by_k ? int(slots[K_BIN]) : 0;
  float k_high = by_k ? logit_of(k_bin - 1) : INFINITE, k_low = by_k ? logit_of(k_bin) : INFINITE;
  float sure = by_p ? logit_of(int(slots[P_FIRST]) - 1) : by_k ? k_high : h.floor;
  float near = by_p ? logit_of(int(slots[P_LAST])) : INFINITE;
  if (threadIdx.x == 0) {
    h.k_high = k_high;
    h.k_low = fmaxf(k_low, h.floor);
    h.sure = fmaxf(sure, h.floor);
    h.near = fmaxf(near, h.floor);
    h.mass_above = by_p ? slots[P_MASS] : 0;
    h.k_mass_above = k_mass;
    h.k_count_above = by_k ? uint32_t(slots[K_COUNT]) : 0;
    h.top_k = by_k ? h.top_k : 0;
  }
}

template <class T>
DEVICE void histogram(const Task<T>& task, Shared& shared) {
  if (!concerns(task, HISTOGRAM)) return;
  constexpr int N = Row<T>::N;
  const Header& h = *task.header;
  const Params& params = *task.params;
  uint32_t* words = reinterpret_cast<uint32_t*>(task.pool);
  Bins masses{words, words + BINS};
  uint32_t* counts = words + 2 * BINS;
  for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) words[i] = 0;
  __syncthreads();

  float temperature = params.temperature, most = h.most, scale = h.scale, floor = h.floor;
  bool by_k = h.top_k != 0, by_p = params.top_p < 1.0f;
  int shift = mass_shift(task.row.decodable);
  // Lanes of the last bin, often most of them, are summed by their threads.
  uint64_t far_mass = 0;
  uint32_t far_count = 0;
  int first, end;
  stripes_of_warp(task.row, blockIdx.x, gridDim.x, first, end);
  each_stripe<1>(task.row, first, end, task.buffer, [&](uint32_t, const float(&z)[N]) {
    if (!__any_sync(ALL_LANES, largest_of(z) >= floor)) return true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bool in = z[i] >= floor && z[i] <= LARGEST;
      float t = in ? tempered(z[i], temperature) : most;
      int bin = bin_of(t, most, scale);
      uint64_t mass = in && by_p ? mass_of(exact_exp(t - most), shift) : 0;
      if (in && bin == BINS - 1) {
        far_mass += mass;
        far_count += 1;
        in = false;
      }
      if (by_p) warp_add_to_bin(masses, in && mass > 0, bin, mass);
      if (by_k && in) atomicAdd(&counts[bin], 1u);
    }
    return true;
  });
  far_mass = warp_sum64(far_mass);
  far_count = uint32_t(warp_sum64(far_count));
  if ((threadIdx.x & 31) == 0) {
    add_to_bin(masses, BINS - 1, far_mass);
    atomicAdd(&counts[BINS - 1], far_count);
  }
  __syncthreads();
  uint64_t* row_masses = reinterpret_cast<uint64_t*>(task.body);
  uint32_t* row_counts = reinterpret_cast<uint32_t*>(row_masses + BINS);
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    uint64_t mass = uint64_t(masses.high[i]) << 32 | masses.low[i];
    if (mass != 0) atomicAdd(&row_masses[i], mass);
    if (counts[i] != 0) atomicAdd(&row_counts[i], counts[i]);
  }
  if (last_of_row(task, shared)) doubt_of_bins(task, shared);
}

template <class T>
DEVICE void settle(const Task<T>& task, Shared& shared) {
  if (!concerns(task, HISTOGRAM)) return;
  constexpr int N = Row<T>::N;
  Header* header = task.header;
  uint64_t* list = reinterpret_cast<uint64_t*>(task.body);
  Race race = race_of(*task.params, *header);
  float sure = header->sure, lowest = fminf(fminf(sure, header->near), header->k_low);
  float* own = task.buffer + (threadIdx.x & 31) * N;
  int first, end;
  stripes_of_warp(task.row, blockIdx.x, gridDim.x, first, end);
  each_stripe<8 / Row<T>::N>(task.row, first, end, task.buffer, [&](uint32_t id, const float(&z)[N]) {
    if (!__any_sync(ALL_LANES, largest_of(z) >= lowest)) return true;
    uint32_t doubt = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bool open = (z[i] >= header->near && z[i] < sure) || (z[i] >= header->k_low && z[i] < header->k_high);
      doubt |= uint32_t(open) << i;
    }
    if (__any_sync(ALL_LANES, doubt != 0) && !append(&header->listed, list, LISTED, id, z, doubt)) return false;
    uint32_t in = lanes_from(z, sure);
    if (__any_sync(ALL_LANES, in != 0)) race_vector(race, id, z, in, own);
    return true;
  });
  uint64_t winner = block_max64(race.best, shared.scratch);
  if (threadIdx.x == 0) task.parts[blockIdx.x].winner = winner;
  if (last_of_row(task, shared)) settle_last(task, shared, true);
}

// Shared memory is `words` of 8 bytes; the warps' stripes lie in it from word `from` on, `lanes` floats each.
#define SAMPLER_KERNEL(name, type, suffix, words, from, lanes)                                                      \
  KERNEL LAUNCH_BOUNDS(THREADS, 3) name##_##suffix(const type* logits, int vocab, int decodable, Params* params,    \
                                                   const Edit* edits, unsigned char* workspace, int* tokens,        \
                                                   uint8_t* valid, float* logprobs) {                               \
    after_earlier_kernels();                                                                                        \
    static_assert((words - from) * 8 >= WARPS * lanes * 4, "room for the stripes");                                 \
    __shared__ Shared shared;                                                                                       \
    __shared__ __align__(16) uint64_t pool[words];                                                                  \
    auto task = task_of(logits, vocab, decodable, params, edits, workspace, tokens, valid, logprobs);               \
    task.pool = pool;                                                                                               \
    task.buffer = reinterpret_cast<float*>(pool + from) + (threadIdx.x >> 5) * lanes;                               \
    name(task, shared);                                                                                             \
  }                                                                                                                 \
  EXPORT(name##_##suffix)

SAMPLER_KERNEL(scan, float, f32, 2048, 0, 512)
SAMPLER_KERNEL(scan, bf16, bf16, 2048, 0, 512)
SAMPLER_KERNEL(list, float, f32, SORTED, 2048, 512)
SAMPLER_KERNEL(list, bf16, bf16, SORTED, 2048, 512)
SAMPLER_KERNEL(race, float, f32, 1024, 0, 256)
SAMPLER_KERNEL(race, bf16, bf16, 1024, 0, 256)
SAMPLER_KERNEL(histogram, float, f32, SORTED, 3 * BINS / 2, 128)
SAMPLER_KERNEL(histogram, bf16, bf16, SORTED, 3 * BINS / 2, 256)
SAMPLER_KERNEL(settle, float, f32, SORTED, 2048, 256)
SAMPLER_KERNEL(settle, bf16, bf16, SORTED, 2048, 256)

// The most likely lanes asked for are `top_n`, or each row's own number where there are parameters.
#define SCORE_KERNEL(type, suffix)                                                                                         \
  KERNEL LAUNCH_BOUNDS(SCORE_THREADS, 1) score_##suffix(const type* logits, int vocab, int decodable, const int* targets,  \
                                                        const Params* params, int top_n, int width, float* logprobs,       \
                                                        uint8_t* valid, int* top_ids, float* top_logprobs) {               \
    after_earlier_kernels();                                                                                               \
    __shared__ ScoreShared shared;                                                                                         \
    __shared__ float buffer[SCORE_THREADS / 32 * Row<type>::STRIPE];                                                       \
    int n = params != nullptr ? int(params[blockIdx.x].logprobs) : top_n;                                                  \
    score_row(blockIdx.x, logits, vocab, decodable, targets, n, width, logprobs, valid, top_ids, top_logprobs, shared,     \
              buffer + (threadIdx.x >> 5) * Row<type>::STRIPE);                                                            \
  }                                                                                                                        \
  EXPORT(score_##suffix)

SCORE_KERNEL(float, f32)
SCORE_KERNEL(bf16, bf16)
