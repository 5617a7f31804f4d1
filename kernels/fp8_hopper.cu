// FP8 by FP8 on Hopper: y = x Wᵀ with a scale for each row of x and each row of W, large numbers of rows. One warp group
// copies, two multiply; a block walks over tiles of 128 rows by TILE_N columns until none is left.
//
// Sums stay in the tensor cores' own accumulators over all of K with PROMOTE 0; with 1 they are added to f32 every 128.
#include "lib/hopper.cuh"

#ifndef PROMOTE
#define PROMOTE 0
#endif

#if HAS_HOPPER

constexpr int TILE_M = 128, TILE_K = 128;
constexpr int TILE_N = PROMOTE ? 128 : 256;
constexpr int STAGES = PROMOTE ? 6 : 4;
constexpr int THREADS = 384;
constexpr int SUMS = TILE_N / 2;  // of a thread: 64 rows by TILE_N columns over 128 threads
// Tiles along M that are taken together, so that one wave of blocks shares rows of x and of W in L2.
constexpr int GROUP_M = 8;

struct Stage {
  uint8_t x[TILE_M * TILE_K];
  uint8_t w[TILE_N * TILE_K];
};

struct Tile {
  int row, column;
};

DEVICE Tile tile_of(int id, int tiles_m, int tiles_n) {
  Place at = place(id, GROUP_M, tiles_m, tiles_n);
  return Tile{at.i * TILE_M, at.j * TILE_N};
}

// Four words of four neighbouring lanes, transposed: lane t of each four ends with word t of all of them, by lane.
DEVICE void transpose4(uint32_t (&w)[4], int t) {
  bool odd = t & 1, upper = t & 2;
  uint32_t a = __shfl_xor_sync(ALL_LANES, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(ALL_LANES, odd ? w[2] : w[3], 1);
  if (odd) {
    w[0] = a, w[2] = b;
  } else {
    w[1] = a, w[3] = b;
  }
  a = __shfl_xor_sync(ALL_LANES, upper ? w[0] : w[2], 2), b = __shfl_xor_sync(ALL_LANES, upper ? w[1] : w[3], 2);
  if (upper) {
    w[0] = a, w[1] = b;
  } else {
    w[2] = a, w[3] = b;
  }
}

// One row's half of a thread's sums: scaled, rounded, 16 bytes a store where rows allow it.
DEVICE void store_row(const float (&d)[SUMS], int half, bf16* y_row, int columns, float x_scale, const float* w_scales,
                      bool in, bool vector) {
  int t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < TILE_N / 8; j += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float s0, s1;
      read_pair(w_scales + 8 * (j + i) + 2 * t, s0, s1);
      w[i] = pack_bf16(d[4 * (j + i) + 2 * half] * (x_scale * s0), d[4 * (j + i) + 2 * half + 1] * (x_scale * s1));
    }
    if (vector) {
      transpose4(w, t);
      int column = 8 * (j + t);
      if (in && column < columns) store16(y_row + column, Words4{{w[0], w[1], w[2], w[3]}});
    } else if (in) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int column = 8 * (j + i) + 2 * t;
        if (column < columns) y_row[column] = bf16{uint16_t(w[i])};
        if (column + 1 < columns) y_row[column + 1] = bf16{uint16_t(w[i] >> 16)};
      }
    }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1)
    fp8_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, bf16* y, int64_t y_pitch,
               const float* x_scales, float x_scale_of_all, const float* w_scales, int m, int n, int k) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  Stage* stages = reinterpret_cast<Stage*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + STAGES * sizeof(Stage));
  uint64_t* empty = full + STAGES;
  // Each group's scales of the tile's columns.
  float* w_shared = reinterpret_cast<float*>(empty + STAGES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 2);
    }
    barrier_init_fence();
    prefetch_map(&x_map);
    prefetch_map(&w_map);
  }
  __syncthreads();
  int tiles_m = CEIL_DIV(m, TILE_M), tiles_n = CEIL_DIV(n, TILE_N);
  int tiles = tiles_m * tiles_n, steps = CEIL_DIV(k, TILE_K);
  int role = threadIdx.x / 128;
  if (role == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) {
      int stage = 0;
      uint32_t parity = 1;  // the phase before the first counts as over
      for (int id = blockIdx.x; id < tiles; id += gridDim.x) {
        Tile tile = tile_of(id, tiles_m, tiles_n);
        for (int step = 0; step < steps; ++step) {
          barrier_wait(empty + stage, parity);
          barrier_expect(full + stage, sizeof(Stage));
          copy_box(stages[stage].x, &x_map, full + stage, step * TILE_K, tile.row);
          copy_box(stages[stage].w, &w_map, full + stage, step * TILE_K, tile.column);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    registers_up<232>();
    int group = role - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int stage = 0;
    uint32_t parity = 0;
    for (int id = blockIdx.x; id < tiles; id += gridDim.x) {
      Tile tile = tile_of(id, tiles_m, tiles_n);
      float d[SUMS];
#if PROMOTE
      float total[SUMS];
#pragma unroll
      for (int i = 0; i < SUMS; ++i) total[i] = 0.0f;
#endif
#if !PROMOTE
      int before = 0;
#endif
      for (int step = 0; step < steps; ++step) {
        barrier_wait(full + stage, parity);
        uint64_t a = operand_rows128(stages[stage].x + group * 64 * TILE_K), b = operand_rows128(stages[stage].w);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE_K / 32; ++i) {
          // 32 bytes further along K, in units of 16.
          product_e4m3(d, a + 2 * i, b + 2 * i, PROMOTE ? i > 0 : (step > 0 || i > 0));
        }
        products_commit();
#if PROMOTE
        products_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + stage);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) total[i] += d[i];
#else
        // The step before is done once only this one is left.
        products_wait<1>();
        if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + before);
        before = stage;
#endif
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
#if !PROMOTE
      products_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(empty + before);
#endif
      int columns = min(n - tile.column, TILE_N);
      float* scales = w_shared + group * TILE_N;
      group_barrier(1 + group);
      for (int i = threadIdx.x % 128; i < TILE_N; i += 128) {
        scales[i] = i < columns ? w_scales[tile.column + i] : 0.0f;
      }
      group_barrier(1 + group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = tile.row + group * 64 + warp * 16 + half * 8 + lane / 4;
        bool in = row < m;
        bf16* y_row = y + int64_t(row) * y_pitch + tile.column;
        bool vector = ((uint64_t(y) | uint64_t(y_pitch * 2) | uint64_t(n * 2)) & 15u) == 0;
        float x_scale = in && x_scales != nullptr ? x_scales[row] : x_scale_of_all;
#if PROMOTE
        store_row(total, half, y_row, columns, x_scale, scales, in, vector);
#else
        store_row(d, half, y_row, columns, x_scale, scales, in, vector);
#endif
      }
    }
  }
}
#endif
