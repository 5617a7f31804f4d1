// FP8 experts of many tokens on Hopper: tiles of one expert's pairs by rows of its matrices, a scale for each row of both.
//
// A weight's rows are the products' rows and pairs their columns, so that an expert's pairs are cut into even tiles of any
// multiple of 16. One warp group copies, two multiply and write. A block takes one tile after another, in an order in which
// those that share weights follow each other, whenever it is done with the last: experts differ too much for equal shares.
// Gate and up take turns of 128 rows in a tile, and x is gathered through the sorted list. What they make lies in sorted
// order, so that down copies it by boxes; outputs lie by pair again. Sums stay in the tensor cores' own accumulators.
#include "lib/experts.cuh"
#include "lib/gates.cuh"
#include "lib/hopper.cuh"

#if HAS_HOPPER

// Weight rows of a tile, most pairs of one, and bytes along K of a stage.
constexpr int ROWS = 256, PAIRS = 128, TILE_K = 128;
constexpr int STAGES = 4;
constexpr int GROUP = 128, THREADS = 3 * GROUP;
// Pairs come in so many: a box of them, and the step of a product's columns.
constexpr int UNIT = 16;
// Sums of a thread and 64 weight rows.
constexpr int SUMS = PAIRS / 2;

struct Stage {
  uint8_t w[ROWS * TILE_K];
  uint8_t x[PAIRS * TILE_K];
};

// A multiplying group's own: results of a unit of pairs by 128 rows, padded against bank conflicts, twice; what its pairs
// are.
struct Own {
  unsigned char results[2][UNIT * (2 * 128 + 16)];
  float scales[PAIRS];
  int pairs[PAIRS];
};

struct Shared {
  Stage stages[STAGES];
  Own own[2];
  uint64_t full[STAGES], empty[STAGES];
  // Numbers of tiles, from the copying group to all: this one and the next.
  uint64_t given[2], taken[2];
  int ids[2];
};

// Where each expert's tiles and its pairs begin, with the ends, and its slot; behind Shared.
struct Tables {
  int *tiles, *pairs, *slots;
};

// Fills the tables; all threads call. Absent experts and those without a valid slot have no tiles.
DEVICE void fill(const Tables& t, const int* table, const int* offsets, int experts, int slots) {
  for (int e = threadIdx.x; e < experts; e += THREADS) {
    int slot = slot_of(e, table, experts, slots), first = offsets[e], end = offsets[e + 1];
    t.slots[e] = slot;
    t.pairs[e] = first;
    if (e + 1 == experts) t.pairs[experts] = end;
    t.tiles[e + 1] = slot < 0 ? 0 : CEIL_DIV(end - first, PAIRS);
  }
  if (threadIdx.x == 0) t.tiles[0] = 0;
  __syncthreads();
  if (threadIdx.x < WARP) {
    int before = 0;
    for (int e = 1 + threadIdx.x; e - int(threadIdx.x) <= experts; e += WARP) {
      int sum = e <= experts ? t.tiles[e] : 0;
#pragma unroll
      for (int d = 1; d < WARP; d *= 2) {
        int other = __shfl_up_sync(ALL_LANES, sum, d);
        if (threadIdx.x >= d) sum += other;
      }
      sum += before;
      if (e <= experts) t.tiles[e] = sum;
      before = __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
  }
  __syncthreads();
}

// A tile: pairs of the sorted list, and which run of rows.
struct Work {
  int slot, first, pairs, run;
};

// Tile number `id`, counted by expert, run of rows, part of the pairs. Whole warps call; at most 32 x 32 experts.
DEVICE Work work_of(const Tables& t, int id, int experts, int runs) {
  int lane = threadIdx.x % WARP, at = id / runs, step = CEIL_DIV(experts, WARP);
  // The last expert whose tiles begin at `at` or before: among every step-th, then among those that follow it.
  int from = (__popc(__ballot_sync(ALL_LANES, t.tiles[min(lane * step, experts)] <= at)) - 1) * step;
  bool before = lane < step && t.tiles[min(from + lane, experts)] <= at;
  int e = from + __popc(__ballot_sync(ALL_LANES, before)) - 1;
  int parts = t.tiles[e + 1] - t.tiles[e], pairs = t.pairs[e + 1] - t.pairs[e];
  int rest = id - t.tiles[e] * runs, run = rest / parts;
  int size = CEIL_DIV(CEIL_DIV(pairs, parts), UNIT) * UNIT, first = (rest - run * parts) * size;
  return Work{t.slots[e], t.pairs[e] + first, min(pairs - first, size), run};
}

// Hands out the block's tile number `turn`: the first is its own, the others are of whoever asks first.
DEVICE void give(Shared& s, int turn, int* ticket) {
  int slot = turn & 1;
  barrier_wait(s.taken + slot, (turn >> 1 & 1) ^ 1);  // the phase before the first counts as over
  s.ids[slot] = turn == 0 ? blockIdx.x : gridDim.x + atomicAdd(ticket, 1);
  barrier_arrive(s.given + slot);
}

// Whole warps call.
DEVICE int take(Shared& s, int turn) {
  int slot = turn & 1;
  barrier_wait(s.given + slot, turn >> 1 & 1);
  int id = s.ids[slot];
  __syncwarp();
  if (threadIdx.x % WARP == 0) barrier_arrive(s.taken + slot);
  return id;
}

// The first so many of d.
#define HW_O8 HW_D8(0)
#define HW_O16 HW_O8, HW_D8(8)
#define HW_O24 HW_O16, HW_D8(16)
#define HW_O32 HW_O24, HW_D8(24)
#define HW_O40 HW_O32, HW_D8(32)
#define HW_O48 HW_O40, HW_D8(40)
#define HW_O56 HW_O48, HW_D8(48)
#define HW_O64 HW_O56, HW_D8(56)

// product_e4m3 of lib/hopper.cuh with COLUMNS columns, in the first sums of d: one set of registers serves all.
template <int COLUMNS>
DEVICE void product(float (&d)[SUMS], uint64_t a, uint64_t b, int keep) {
#define PRODUCT(columns, sums, a_, b_, keep_)                                                                       \
  if constexpr (COLUMNS == columns) {                                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #keep_ ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" HW_N##sums "}, %" #a_ ", %" #b_ \
                 ", p, 1, 1;\n}\n"                                                                                  \
                 : HW_O##sums                                                                                       \
                 : "l"(a), "l"(b), "r"(keep));                                                                      \
  }
  PRODUCT(16, 8, 8, 9, 10)
  PRODUCT(32, 16, 16, 17, 18)
  PRODUCT(48, 24, 24, 25, 26)
  PRODUCT(64, 32, 32, 33, 34)
  PRODUCT(80, 40, 40, 41, 42)
  PRODUCT(96, 48, 48, 49, 50)
  PRODUCT(112, 56, 56, 57, 58)
  PRODUCT(128, 64, 64, 65, 66)
}

// Arrives once this thread's copies so far are done.
DEVICE void barrier_arrive_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Orders what threads have copied before what the tensor cores read.
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Stacked {
  const float* scales;
  int first;  // the row of slot 0
};

// `matrices` 2: out[sorted pair] = round(silu(gate x) * up x), a tile having 128 rows of each; 1: out[pair] = round(w x),
// a tile having 256 rows.
struct Call {
  const uint8_t* x;  // where it is gathered
  const float* x_scales;
  int per_row;  // pairs that share a row of x
  Stacked w[2];
  int stride;  // rows from one slot to the next
  const int* sorted;
  bf16* out;
  int rows, cols, experts;
  int* ticket;  // 0 before the launch
};
template <int matrices>
constexpr int TILE_ROWS = ROWS / matrices;

// A place in the ring.
struct Turn {
  int stage;
  uint32_t parity;
};
DEVICE void next(Turn& t) {
  if (++t.stage == STAGES) t.stage = 0, t.parity ^= 1;
}

// Copies a tile's rows to the ring.
template <int matrices>
DEVICE void copy(Shared& s, const TensorMap* x_map, const TensorMap* w0_map, const TensorMap* w1_map, const Call& c,
                 const Work& work, Turn& turn, int steps, int number) {
  constexpr bool GATHER = matrices == 2;
  // Units that a lane has four rows of in turn, and so many rows of x does it know for its warp.
  constexpr int UNITS = PAIRS / UNIT, HELD = CEIL_DIV(4 * UNITS, WARP);
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int units = CEIL_DIV(work.pairs, UNIT), top = work.slot * c.stride + work.run * TILE_ROWS<matrices>;
  int w0_row = c.w[0].first + top, w1_row = GATHER ? c.w[1].first + top : w0_row + ROWS / 2;
  uint32_t rows[HELD];
  if (GATHER) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      // Row number v of this warp, which has four of each unit. Past the tile's end its last row is read again.
      int v = lane + WARP * i, p = v / 4 * UNIT + 4 * warp + v % 4;
      rows[i] = uint32_t(c.sorted[work.first + min(p, work.pairs - 1)] / c.per_row);
    }
  }
  for (int step = 0; step < steps; step++) {
    barrier_wait(s.empty + turn.stage, turn.parity);
    uint64_t* full = s.full + turn.stage;
    Stage& stage = s.stages[turn.stage];
    int k = step * TILE_K;
    if (threadIdx.x == 0) {
      barrier_expect(full, (ROWS + (GATHER ? 0 : units * UNIT)) * TILE_K);
      copy_box(stage.w, w0_map, full, k, w0_row);
      copy_box(stage.w + ROWS / 2 * TILE_K, w1_map, full, k, w1_row);
    }
    if constexpr (GATHER) {
      // Eight threads a row, each 16 bytes, swizzled as boxes are.
      int at = k + lane % 8 * 16, row = threadIdx.x / 8, bytes = at < c.cols ? 16 : 0;
      uint32_t to = shared_address(stage.x) + row * TILE_K + (lane % 8 ^ row % 8) * 16;
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        if (i >= units) break;
        uint32_t from = __shfl_sync(ALL_LANES, rows[i / 8], i % 8 * 4 + lane / 8);
        cp_async_if<16>(true, to + i * UNIT * TILE_K, c.x + uint64_t(from) * c.cols + at, bytes);
      }
      barrier_arrive_copied(full);
    } else if (threadIdx.x == 0) {
      for (int i = 0; i < units; i++) copy_box(stage.x + i * UNIT * TILE_K, x_map, full, k, work.first + i * UNIT);
    }
    next(turn);
    // The next number is asked for here, where nothing waits for the answer yet.
    if (step == 0 && threadIdx.x == 0) give(s, number + 1, c.ticket);
  }
}

// A group's sums of a tile of COLUMNS pairs, of 64 rows from row0 and as many from row1 of a stage.
template <bool GATHERED, int COLUMNS>
DEVICE void multiply(float (&d)[2][SUMS], Shared& s, Turn& turn, int steps, int row0, int row1) {
  int before = 0;
  for (int step = 0; step < steps; step++) {
    barrier_wait(s.full + turn.stage, turn.parity);
    if (GATHERED) async_fence();
    const Stage& stage = s.stages[turn.stage];
    uint64_t a0 = operand_rows128(stage.w + row0 * TILE_K), a1 = operand_rows128(stage.w + row1 * TILE_K);
    uint64_t b = operand_rows128(stage.x);
    products_begin();
#pragma unroll
    for (int i = 0; i < TILE_K / 32; i++) {
      // 32 bytes further along K, in units of 16.
      product<COLUMNS>(d[0], a0 + 2 * i, b + 2 * i, step > 0 || i > 0);
      product<COLUMNS>(d[1], a1 + 2 * i, b + 2 * i, step > 0 || i > 0);
    }
    products_commit();
    // The step before is done once only this one is left.
    products_wait<1>();
    if (step > 0 && threadIdx.x % GROUP == 0) barrier_arrive(s.empty + before);
    before = turn.stage;
    next(turn);
  }
  products_wait<0>();
  if (threadIdx.x % GROUP == 0) barrier_arrive(s.empty + before);
}

// One tile of a multiplying group.
template <int matrices>
DEVICE void tile(float (&d)[2][SUMS], Shared& s, const Call& c, const Work& work, Turn& turn, int steps, int group) {
  Own& own = s.own[group];
  int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
  // Columns of `out` that the group has, and bytes of them in `results`.
  constexpr int WIDTH = TILE_ROWS<matrices> / 2, PITCH = 2 * WIDTH + 16;
  int column = work.run * TILE_ROWS<matrices> + group * WIDTH, columns = min(c.rows - column, WIDTH);
  int row0 = group * WIDTH, row1 = matrices == 2 ? ROWS / 2 + row0 : row0 + 64;

  // Asked for here, used after the products.
  float w_scales[2][2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = column + (matrices == 2 ? 0 : 64 * r) + 16 * warp + 8 * half + lane / 4;
      const Stacked& w = c.w[matrices == 2 ? r : 0];
      w_scales[r][half] = row < c.rows ? w.scales[w.first + int64_t(work.slot) * c.stride + row] : 0.0f;
    }
  }
  int pair = thread < work.pairs ? c.sorted[work.first + thread] : 0;

  constexpr bool GATHERED = matrices == 2;
  switch (CEIL_DIV(work.pairs, UNIT)) {
    case 1: multiply<GATHERED, 16>(d, s, turn, steps, row0, row1); break;
    case 2: multiply<GATHERED, 32>(d, s, turn, steps, row0, row1); break;
    case 3: multiply<GATHERED, 48>(d, s, turn, steps, row0, row1); break;
    case 4: multiply<GATHERED, 64>(d, s, turn, steps, row0, row1); break;
    case 5: multiply<GATHERED, 80>(d, s, turn, steps, row0, row1); break;
    case 6: multiply<GATHERED, 96>(d, s, turn, steps, row0, row1); break;
    case 7: multiply<GATHERED, 112>(d, s, turn, steps, row0, row1); break;
    case 8: multiply<GATHERED, 128>(d, s, turn, steps, row0, row1); break;
  }
  static_assert(PAIRS == GROUP && PAIRS == 8 * UNIT, "a thread a pair, a case a unit");

  float scale = thread < work.pairs ? c.x_scales[GATHERED ? pair / c.per_row : work.first + thread] : 0.0f;
  // Everyone has left the tile before.
  group_barrier(1 + group);
  own.scales[thread] = scale;
  own.pairs[thread] = pair;
  group_barrier(1 + group);

#pragma unroll
  for (int unit = 0; unit < PAIRS / UNIT; unit++) {
    if (UNIT * unit >= work.pairs) break;
    unsigned char* results = own.results[unit % 2];
    uint32_t words[2][2][2];  // of a product, of 8 pairs, of half its rows
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int j = 2 * unit + i;
      float x0, x1;
      read_pair(own.scales + 8 * j + 2 * (lane & 3), x0, x1);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float v[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          v[r][0] = d[r][4 * j + 2 * half] * w_scales[r][half] * x0;
          v[r][1] = d[r][4 * j + 2 * half + 1] * w_scales[r][half] * x1;
        }
        if constexpr (matrices == 2) {
          words[0][i][half] = pack_bf16(silu_as<bf16>(v[0][0]) * v[1][0], silu_as<bf16>(v[0][1]) * v[1][1]);
        } else {
          words[0][i][half] = pack_bf16(v[0][0], v[0][1]);
          words[1][i][half] = pack_bf16(v[1][0], v[1][1]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < WIDTH / 64; r++) {
      int p = lane / 16 * 8 + lane % 8, row = 64 * r + 16 * warp + lane / 8 % 2 * 8;
      stmatrix_x4_trans(results + p * PITCH + 2 * row, {words[r][0][0], words[r][0][1], words[r][1][0], words[r][1][1]});
    }
    group_barrier(1 + group);
    constexpr int PIECES = WIDTH / 8;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < UNIT * PIECES / GROUP; i++) {
      int in_unit = (thread + i * GROUP) / PIECES, piece = thread % PIECES, p = UNIT * unit + in_unit;
      if (p >= work.pairs || 8 * piece >= columns) continue;
      int64_t row = GATHERED ? work.first + p : own.pairs[p];
      store16(c.out + row * c.rows + column + 8 * piece, load16(results + in_unit * PITCH + 16 * piece));
    }
  }
}

template <int matrices>
DEVICE void all_tiles(const TensorMap* x_map, const TensorMap* w0_map, const TensorMap* w1_map, const Call& c,
                      const int* table, const int* offsets, int slots) {
  DYNAMIC_SHARED(shared);
  Shared& s = *reinterpret_cast<Shared*>(shared);
  int* ints = reinterpret_cast<int*>(shared + sizeof(Shared));
  Tables tables = {ints, ints + c.experts + 1, ints + 2 * (c.experts + 1)};
  constexpr bool GATHER = matrices == 2;
  constexpr int COPYING_WARPS = GATHER ? 4 : 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i, GATHER ? 1 + GROUP : 1);
      barrier_init(s.empty + i, 2);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(s.given + i, 1);
      barrier_init(s.taken + i, 2 * GROUP / WARP + COPYING_WARPS);
    }
    barrier_init_fence();
    if (!GATHER) prefetch_map(x_map);
    prefetch_map(w0_map);
    prefetch_map(w1_map);
  }
  fill(tables, table, offsets, c.experts, slots);
  int runs = CEIL_DIV(c.rows, TILE_ROWS<matrices>);
  int tiles = tables.tiles[c.experts] * runs, steps = CEIL_DIV(c.cols, TILE_K);
  int role = threadIdx.x / GROUP;
  if (role == 0) {
    registers_down<56>();
    Turn turn = {0, 1};  // the phase before the first counts as over
    if (threadIdx.x == 0) give(s, 0, c.ticket);
    for (int number = 0; threadIdx.x < COPYING_WARPS * WARP; number++) {
      int id = take(s, number);
      if (id >= tiles) break;
      copy<matrices>(s, x_map, w0_map, w1_map, c, work_of(tables, id, c.experts, runs), turn, steps, number);
    }
  } else {
    registers_up<224>();
    Turn turn = {0, 0};
    float d[2][SUMS];
    for (int number = 0;; number++) {
      int id = take(s, number);
      if (id >= tiles) break;
      tile<matrices>(d, s, c, work_of(tables, id, c.experts, runs), turn, steps, role - 1);
    }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1)
    moe_hopper_gate_up(const __grid_constant__ TensorMap gate_map, const __grid_constant__ TensorMap up_map,
                       const uint8_t* x, const float* x_scales, int per_row, const float* gate_scales, int gate_first,
                       const float* up_scales, int up_first, int stride, const int* table, const int* sorted,
                       const int* offsets, bf16* out, int rows, int cols, int experts, int slots, int* ticket) {
  after_earlier_kernels();
  Call c = {x,      x_scales, per_row, {{gate_scales, gate_first}, {up_scales, up_first}}, stride, sorted, out, rows, cols,
            experts, ticket};
  all_tiles<2>(nullptr, &gate_map, &up_map, c, table, offsets, slots);
}

KERNEL LAUNCH_BOUNDS(THREADS, 1)
    moe_hopper_down(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scales,
                    const float* w_scales, int first, int stride, const int* table, const int* sorted, const int* offsets,
                    bf16* out, int rows, int cols, int experts, int slots, int* ticket) {
  after_earlier_kernels();
  Call c = {nullptr, x_scales, 1, {{w_scales, first}, {}}, stride, sorted, out, rows, cols, experts, ticket};
  all_tiles<1>(&x_map, &w_map, &w_map, c, table, offsets, slots);
}
#endif
