// FP8 by FP8 on Hopper for few rows of x, as decode has them: y = x Wᵀ with a scale for each row of x and each row of W.
//
// The weight's rows are the products' rows and the tokens their columns, so that one product reads 64 rows of W however few
// the tokens are. A block takes `box` rows of W at a time: as many as give every block as much to read. One warp copies,
// four multiply. Sums are added to f32 every 128 columns.
#include "lib/hopper.cuh"

// Columns of a product, at least the tokens.
#ifndef TOKENS
#define TOKENS 64
#endif
// Products of 64 rows of W that hold a box.
#ifndef ROW_TILES
#define ROW_TILES 2
#endif

#if HAS_HOPPER

constexpr int TILE_K = 128;
// Boxes along K of a stage: more of a weight's row at a time where there is room for it.
constexpr int BOXES = TOKENS <= 16 ? 4 : 2;
constexpr int MULTIPLIERS = 128, THREADS = MULTIPLIERS + 32;
constexpr int SUMS = TOKENS / 2;  // of a thread and 64 rows

// A thread's sums of 64 rows from `first` on, those inside the box, to [TOKENS][pitch].
DEVICE void put(float* sums, int pitch, const float (&total)[SUMS], int first, int box) {
  int lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= box) continue;
    float* to = sums + row + 8 * half;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      int token = 8 * j + 2 * (lane & 3);
      to[token * pitch] = total[4 * j + 2 * half];
      to[(token + 1) * pitch] = total[4 * j + 2 * half + 1];
    }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1)
    fp8_hopper_few(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, bf16* y,
                   int64_t y_pitch, const float* x_scales, float x_scale_of_all, const float* w_scales, int m, int n,
                   int k, int box, int stages) {
  DYNAMIC_SHARED(shared);
  int box_bytes = (box + TOKENS) * TILE_K, stage_bytes = BOXES * box_bytes;
  // Floats from one token's sums to the next: the lanes of a warp then store to 32 banks.
  int pitch = (box + 11) / 16 * 16 + 4;
  // The last product of a box reads past it: into tokens, the next box or the sums, and what it makes of them is dropped.
  float* sums = reinterpret_cast<float*>(shared + stages * stage_bytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(sums + TOKENS * pitch);
  uint64_t* empty = full + stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 1);
    }
    barrier_init_fence();
    prefetch_map(&x_map);
    prefetch_map(&w_map);
  }
  __syncthreads();
  int tiles = CEIL_DIV(n, box), steps = CEIL_DIV(k, BOXES * TILE_K), stage = 0;
  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x > MULTIPLIERS) return;
    auto copy_w = [&](int to_stage, int tile, int step) {
      barrier_expect(full + to_stage, stage_bytes);
#pragma unroll
      for (int i = 0; i < BOXES; ++i) {
        unsigned char* to = shared + to_stage * stage_bytes + i * box_bytes;
        copy_box(to, &w_map, full + to_stage, (step * BOXES + i) * TILE_K, tile * box);
      }
    };
    auto copy_x = [&](int to_stage, int step) {
#pragma unroll
      for (int i = 0; i < BOXES; ++i) {
        unsigned char* to = shared + to_stage * stage_bytes + i * box_bytes + box * TILE_K;
        copy_box(to, &x_map, full + to_stage, (step * BOXES + i) * TILE_K, 0);
      }
    };
    // No kernel writes weights: those of the first tile's first stages come while the kernels before end.
    int ahead = int(blockIdx.x) < tiles ? min(stages, steps) : 0;
    for (int step = 0; step < ahead; ++step) copy_w(step, blockIdx.x, step);
    wait_for_earlier_kernels();
    uint32_t parity = 1;  // the phase before the first counts as over
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int step = 0; step < steps; ++step) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(empty + stage, parity);
          copy_w(stage, tile, step);
        }
        copy_x(stage, step);
        if (++stage == stages) stage = 0, parity ^= 1;
      }
    }
    return;
  }
  after_earlier_kernels();
  uint32_t parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float total[ROW_TILES][SUMS];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) total[r][i] = 0.0f;
    }
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + stage, parity);
#pragma unroll
      for (int i = 0; i < BOXES; ++i) {
        const unsigned char* from = shared + stage * stage_bytes + i * box_bytes;
        uint64_t b = operand_rows128(from + box * TILE_K);
        float d[2][SUMS];
        auto add = [&](int r) {
#pragma unroll
          for (int j = 0; j < SUMS; ++j) total[r][j] += d[r & 1][j];
        };
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          uint64_t a = operand_rows128(from + r * 64 * TILE_K);
          products_begin();
          // 32 bytes further along K, in units of 16.
#pragma unroll
          for (int j = 0; j < TILE_K / 32; ++j) product_e4m3(d[r & 1], a + 2 * j, b + 2 * j, j > 0);
          products_commit();
          if (r > 0) {
            products_wait<1>();
            add(r - 1);
          }
        }
        products_wait<0>();
        add(ROW_TILES - 1);
      }
      if (threadIdx.x == 0) barrier_arrive(empty + stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) put(sums, pitch, total[r], 64 * r, box);
    group_barrier(1);
    int runs = box / 8;
    bool vector = ((uint64_t(y) | uint64_t(y_pitch * 2)) & 15u) == 0;
    for (int item = threadIdx.x; item < m * runs; item += MULTIPLIERS) {
      int token = item / runs, row = item % runs * 8, column = tile * box + row;
      if (column >= n) continue;
      const float* from = sums + token * pitch + row;
      float x_scale = x_scales != nullptr ? x_scales[token] : x_scale_of_all;
      bf16* to = y + int64_t(token) * y_pitch + column;
      int columns = min(n - column, 8);
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float s0 = 2 * i < columns ? w_scales[column + 2 * i] : 0.0f;
        float s1 = 2 * i + 1 < columns ? w_scales[column + 2 * i + 1] : 0.0f;
        w[i] = pack_bf16(from[2 * i] * (x_scale * s0), from[2 * i + 1] * (x_scale * s1));
      }
      if (vector && columns == 8) {
        store16(to, Words4{{w[0], w[1], w[2], w[3]}});
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i < columns) to[i] = bf16{uint16_t(w[i / 2] >> (i % 2 * 16))};
        }
      }
    }
    // The sums are written again for the next tile.
    group_barrier(1);
  }
}
#endif
