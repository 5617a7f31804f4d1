// Finding the first of many by rank: ordered keys, reductions and scans of a block, a sort in shared memory, a radix select
// by counts or by masses, and the search for the least key of which something holds. All of it is exact in integers, so no
// order of threads shows in a result. Blocks are of whole warps, at most 1024 threads.
#ifndef LIB_SELECT
#define LIB_SELECT
#include "lib/base.cuh"

constexpr uint32_t LEAST_KEY = 0x00800000u;  // of the most negative finite float
constexpr float LARGEST = 3.40282347e38f;
#define INFINITE bits_f32(0x7F800000u)

// Larger floats have larger keys; -0 has that of 0. Not for NaN.
DEVICE uint32_t ordered(float x) {
  uint32_t bits = f32_bits(x);
  if (bits == 0x80000000u) bits = 0;
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

DEVICE float unordered(uint32_t key) { return bits_f32(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Sorts rising as lanes rank: larger values first, equal ones by lower id.
DEVICE uint64_t rank_key(float value, uint32_t id) { return uint64_t(~ordered(value)) << 32 | id; }
DEVICE float rank_value(uint64_t key) { return unordered(~uint32_t(key >> 32)); }

// Counts this thread's block: gives how many came before. What the block wrote before a barrier in front of this is seen by
// whoever comes later and passes a barrier behind it.
DEVICE uint32_t take_ticket(uint32_t* ticket) {
#ifdef HIGHWATER_EMULATE
  return atomicAdd(ticket, 1u);
#else
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
#endif
}

// Shared memory of the reductions below; no one else uses it between two barriers.
struct Scratch {
  uint64_t warp[32];
  uint64_t found[2];
};

DEVICE uint64_t warp_max64(uint64_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    uint64_t other = __shfl_xor_sync(ALL_LANES, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

DEVICE uint64_t warp_sum64(uint64_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}

// The largest of a block's values, for every thread.
DEVICE uint64_t block_max64(uint64_t x, Scratch& scratch) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = warp_max64(x);
  __syncthreads();
  if (lane == 0) scratch.warp[warp] = x;
  __syncthreads();
  return warp_max64(lane < warps ? scratch.warp[lane] : 0);
}

// The sum of a block's values, for every thread.
DEVICE uint64_t block_sum64(uint64_t x, Scratch& scratch) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = warp_sum64(x);
  __syncthreads();
  if (lane == 0) scratch.warp[warp] = x;
  __syncthreads();
  return warp_sum64(lane < warps ? scratch.warp[lane] : 0);
}

// The sum of the values of threads before this one; `total` is that of all.
DEVICE uint64_t block_before64(uint64_t x, uint64_t& total, Scratch& scratch) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  uint64_t sum = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    uint64_t other = __shfl_up_sync(ALL_LANES, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();
  if (lane == 31) scratch.warp[warp] = sum;
  __syncthreads();
  uint64_t part = lane < warps ? scratch.warp[lane] : 0;
  uint64_t before = warp_sum64(lane < warp ? part : 0);
  total = warp_sum64(part);
  return before + sum - x;
}

// Sorts `n` keys in shared memory, rising; n is a power of two from 2 on. Bitonic.
DEVICE void block_sort(uint64_t* keys, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        int low = 2 * i - (i & (stride - 1)), high = low + stride;
        uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Appends the lanes that are `in` to a list of rank keys; `listed` also counts those that no longer fit. False where the list
// is full. All lanes of the warp call, with ids from `id` on.
template <int N>
DEVICE bool append(uint32_t* listed, uint64_t* list, int room, uint32_t id, const float (&z)[N], uint32_t in) {
  uint32_t at = __popc(in), lane = threadIdx.x & 31, all = at;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    uint32_t other = __shfl_up_sync(ALL_LANES, all, offset);
    if (lane >= uint32_t(offset)) all += other;
  }
  uint32_t base = 0;
  if (lane == 31) base = atomicAdd(listed, all);
  base = __shfl_sync(ALL_LANES, base, 31);
  at = base + all - at;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (!(in >> i & 1u)) continue;
    if (at < uint32_t(room)) list[at] = rank_key(z[i], id + i);
    ++at;
  }
  return base < uint32_t(room);
}

// The least key in low..=high of which `holds`. It holds at `high` and above every key it holds of. All lanes of a warp call.
template <class Holds>
DEVICE uint32_t first_key(uint32_t low, uint32_t high, Holds holds) {
  uint32_t lane = threadIdx.x & 31;
  while (low < high) {
    uint32_t width = high - low, step = width / 32 + 1, offset = lane * step;
    bool yes = offset >= width || holds(low + offset);
    uint32_t mask = __ballot_sync(ALL_LANES, yes);
    if (mask == 0) {
      low += 31 * step + 1;
      continue;
    }
    uint32_t first = __ffs(int(mask)) - 1;
    high = first * step >= width ? high : low + first * step;
    if (first > 0) low += (first - 1) * step + 1;
  }
  return low;
}

// A floor that at least k of a block's values reach and not many more, near the k-th largest: for keys of which each thread
// holds some, 0 where it has none. The least finite number where fewer than k are finite.
template <int HELD>
DEVICE float floor_of(const uint32_t (&keys)[HELD], uint32_t k, Scratch& scratch) {
  uint32_t least = ~0u, most = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    most = max(most, keys[i]);
    if (keys[i] >= LEAST_KEY) least = min(least, keys[i]);
  }
  least = ~uint32_t(block_max64(~least, scratch));
  most = uint32_t(block_max64(most, scratch));
  uint32_t low = LEAST_KEY, high = most + 1, mid = least, enough = k + k / 4 + 2;
  while (high > low && high - low > 1) {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) mine += keys[i] >= mid;
    uint32_t reached = uint32_t(block_sum64(mine, scratch));
    if (reached < k) {
      if (mid == least) break;
      high = mid;
    } else {
      low = mid;
      if (reached <= enough) break;
    }
    mid = low + (high - low) / 2;
  }
  return unordered(low);
}

// 64-bit sums in shared memory as two words: their additions are native where one of 64 bits may be a loop.
struct Bins {
  uint32_t* low;
  uint32_t* high;
};

DEVICE void add_to_bin(Bins bins, int bin, uint64_t weight) {
  uint32_t low = uint32_t(weight);
  uint32_t old = atomicAdd(&bins.low[bin], low);
  uint32_t high = uint32_t(weight >> 32) + (old + low < old);
  if (high != 0) atomicAdd(&bins.high[bin], high);
}

// add_to_bin for the lanes of a warp that are `in`; all its lanes call. Lanes that agree on the bin add once.
DEVICE void warp_add_to_bin(Bins bins, bool in, int bin, uint64_t weight) {
  uint32_t mask = __ballot_sync(ALL_LANES, in);
  if (mask == 0) return;
  int leader = __ffs(int(mask)) - 1;
  int first = __shfl_sync(ALL_LANES, bin, leader);
  if (__any_sync(ALL_LANES, in && bin != first)) {
    if (in) add_to_bin(bins, bin, weight);
    return;
  }
  uint64_t sum = warp_sum64(in ? weight : 0);
  if (int(threadIdx.x & 31) == leader) add_to_bin(bins, first, sum);
}

constexpr int DIGITS = 2048;

// Where the sum of weights of falling keys first reaches a goal.
struct Found {
  bool found;
  uint32_t key;
  uint64_t before;  // the weight of larger keys
};

// `each(f)` makes every warp call f(in, key, weight) with all its lanes, for all keys of the block together; `goal(total)`
// gives what the sum must reach, at least 1; nothing is found where it is more than the total. `words` are 2 x DIGITS words
// of shared memory. Three passes, over digits of 11, 11 and 10 bits.
template <class Each, class Goal>
DEVICE Found block_select(uint32_t* words, Scratch& scratch, Each each, Goal goal) {
  Bins bins{words, words + DIGITS};
  int per = DIGITS / blockDim.x;
  uint32_t prefix = 0;
  uint64_t before = 0, wanted = 0;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    uint32_t digits = pass == 2 ? 1024 : 2048;
    uint32_t known = pass == 0 ? 0 : ~0u << (shift + (pass == 2 ? 10 : 11));
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * DIGITS; i += blockDim.x) words[i] = 0;
    __syncthreads();
    // Bins are stored from the largest digit down, so that sums run with the index.
    each([&](bool in, uint32_t key, uint64_t weight) {
      warp_add_to_bin(bins, in && (key & known) == prefix, int(digits - 1 - (key >> shift & (digits - 1))), weight);
    });
    __syncthreads();
    uint64_t mine = 0, total;
    int from = int(threadIdx.x) * per;
#pragma unroll 1
    for (int i = from; i < from + per; ++i) mine += uint64_t(bins.high[i]) << 32 | bins.low[i];
    uint64_t sum = before + block_before64(mine, total, scratch);
    if (pass == 0) {
      wanted = goal(total);
      if (wanted > total) return Found{false, 0, total};
    }
#pragma unroll 1
    for (int i = from; i < from + per; ++i) {
      uint64_t weight = uint64_t(bins.high[i]) << 32 | bins.low[i];
      if (sum < wanted && wanted <= sum + weight) {
        scratch.found[0] = digits - 1 - uint32_t(i);
        scratch.found[1] = sum;
      }
      sum += weight;
    }
    __syncthreads();
    prefix |= uint32_t(scratch.found[0]) << shift;
    before = scratch.found[1];
  }
  __syncthreads();
  return Found{true, prefix, before};
}

#endif
