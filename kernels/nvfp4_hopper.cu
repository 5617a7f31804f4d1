// NVFP4 weights on Hopper for many rows of x: y = x Wᵀ with x in bf16, W as e2m1 codes [N, K/2] under e4m3 scales [N, K/16]
// and an f32 global of each row, which multiplies or divides. K is a multiple of 256.
//
// The weight's rows are the products' rows, so that codes are widened into the registers that a product reads, the next 64
// columns' while those before are multiplied; x, the products' columns, is read from shared memory. Code times scale is
// exact in bf16. Sums stay in the tensor cores' own accumulators over all of K, in its order. One warp group copies, two
// multiply; a block walks over tiles of 128 rows of W by TOKENS until none is left.
#include "lib/hopper.cuh"
#include "lib/operand.cuh"

// Rows of x in a tile: 128, 192 or 256.
#ifndef TOKENS
#define TOKENS 256
#endif

#if HAS_HOPPER

constexpr int GROUPS = 2;           // that multiply
constexpr int ROWS = GROUPS * 64;   // of W in a tile
constexpr int STEP_K = 64;          // columns of a stage of x: 128 bytes
constexpr int BLOCK_K = 256;        // columns of a stage of W: 128 bytes of codes
constexpr int STEPS = BLOCK_K / STEP_K;
constexpr int X_STAGES = (160 << 10) / (TOKENS * STEP_K * 2), W_STAGES = 2;
constexpr int THREADS = 128 * (1 + GROUPS);
constexpr int SUMS = TOKENS / 2;    // of a thread: 64 rows by TOKENS columns over 128 threads
constexpr int STORED = 64;          // tokens that a group turns around and stores at a time
// Tiles along the tokens that are taken together, so that one wave of blocks shares rows of x and of W in L2.
constexpr int GROUP_TOKENS = 8;

struct Shared {
  uint8_t x[X_STAGES][TOKENS * STEP_K * 2];
  uint8_t codes[W_STAGES][ROWS * BLOCK_K / 2];
  uint8_t out[GROUPS][STORED * 128];
  uint8_t scales[W_STAGES][ROWS * BLOCK_K / NVFP4_GROUP];
  uint64_t x_full[X_STAGES], x_empty[X_STAGES], w_full[W_STAGES], w_empty[W_STAGES];
};

struct Tile {
  int token, row;
};

DEVICE Tile tile_of(int id, int token_tiles, int row_tiles) {
  Place at = place(id, GROUP_TOKENS, token_tiles, row_tiles);
  return Tile{at.i * TOKENS, at.j * ROWS};
}

// Four e4m3 scales as pairs of equal bf16, times 2^(126 - NVFP4_SHIFT).
DEVICE void scale_pairs(uint32_t codes, uint32_t (&pairs)[4]) {
  const float up = bits_f32((127u + 126u - NVFP4_SHIFT) << 23);
  float v[4];
  e4m3x4_to_f32(codes, v);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(v[i] * up, v[i] * up);
}

// One byte of eight codes, as bf16 times a scale from scale_pairs; `select` is byte t of the first word twice, then of the
// second.
DEVICE uint32_t widen_pair(uint32_t codes, uint32_t select, uint32_t scale) {
  // Each nibble at the top of a half; three bits of it move to the bottom of the exponent and the top of the mantissa.
  uint32_t top = permute(codes << 4, codes, select);
  return mul_bf16x2((top & 0x80008000u) | (top >> 6 & 0x01C001C0u), scale);
}

// 64 columns of a thread's two rows, as the operands of four products. `codes` and `scales` are the first row's.
DEVICE void widen(uint32_t (&a)[4][4], const uint8_t* codes, const uint8_t* scales, int step, int swizzle, uint32_t select) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[4];
    scale_pairs(*reinterpret_cast<const uint32_t*>(scales + half * 8 * (BLOCK_K / NVFP4_GROUP) + step * 4), pairs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Words4 piece = load16(codes + half * 8 * (BLOCK_K / 2) + ((2 * step + i) * 16 ^ swizzle));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[2 * i + j][half] = widen_pair(piece.w[2 * j], select, pairs[2 * i + j]);
        a[2 * i + j][2 + half] = widen_pair(piece.w[2 * j + 1], select, pairs[2 * i + j]);
      }
    }
  }
}

// A group's sums, scaled by row and rounded, to rows `row` .. `row` + 63 of y's columns, tokens from `token` on: turned
// around in `out`, where a token has 128 bytes, swizzled.
DEVICE void store(const float (&d)[SUMS], const float (&scales)[2], uint8_t* out, int group, bf16* y, int64_t y_pitch,
                  int token, int row, int m, int n) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  bool vector = ((uint64_t(y) | uint64_t(y_pitch * 2)) & 15u) == 0;
#pragma unroll
  for (int from = 0; from < TOKENS; from += STORED) {
    // What was stored before has been read.
    group_barrier(1 + group);
#pragma unroll
    for (int j = 0; j < STORED / 16; ++j) {
      const float* v = d + from / 2 + 8 * j;
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_bf16(v[2 * i] * scales[i & 1], v[2 * i + 1] * scales[i & 1]);
      int to = 16 * j + lane / 16 * 8 + lane % 8, piece = 2 * warp + (lane / 8 & 1);
      stmatrix_x4_trans(out + to * 128 + (piece ^ to & 7) * 16, w);
    }
    group_barrier(1 + group);
#pragma unroll
    for (int i = 0; i < STORED / 16; ++i) {
      int at = 16 * i + threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
      Words4 words = load16(out + at * 128 + (piece ^ at & 7) * 16);
      int column = row + piece * 8, columns = n - column;
      if (token + from + at >= m || columns <= 0) continue;
      bf16* to = y + (token + from + at) * y_pitch + column;
      if (vector && columns >= 8) {
        store16(to, words);
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          if (c < columns) to[c] = bf16{uint16_t(words.w[c / 2] >> (c % 2 * 16))};
        }
      }
    }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1)
    nvfp4_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap codes_map,
                 const __grid_constant__ TensorMap scales_map, float x_scale, const float* w_globals, int w_divides, bf16* y,
                 int64_t y_pitch, int m, int n, int k) {
  after_earlier_kernels();
  DYNAMIC_SHARED(dynamic);
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) {
      barrier_init(shared.x_full + i, 1);
      barrier_init(shared.x_empty + i, GROUPS);
    }
    for (int i = 0; i < W_STAGES; ++i) {
      barrier_init(shared.w_full + i, 1);
      barrier_init(shared.w_empty + i, GROUPS * 4);  // every warp reads by itself
    }
    barrier_init_fence();
    prefetch_map(&x_map);
    prefetch_map(&codes_map);
    prefetch_map(&scales_map);
  }
  __syncthreads();
  int token_tiles = CEIL_DIV(m, TOKENS), row_tiles = CEIL_DIV(n, ROWS);
  int tiles = token_tiles * row_tiles, blocks = k / BLOCK_K;
  int role = threadIdx.x / 128, xs = 0, ws = 0;
  if (role == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) {
      uint32_t x_parity = 1, w_parity = 1;  // the phase before the first counts as over
      for (int id = blockIdx.x; id < tiles; id += gridDim.x) {
        Tile tile = tile_of(id, token_tiles, row_tiles);
        for (int block = 0; block < blocks; ++block) {
          barrier_wait(shared.w_empty + ws, w_parity);
          barrier_expect(shared.w_full + ws, sizeof(shared.codes[0]) + sizeof(shared.scales[0]));
          copy_box(shared.codes[ws], &codes_map, shared.w_full + ws, block * (BLOCK_K / 2), tile.row);
          copy_box(shared.scales[ws], &scales_map, shared.w_full + ws, block * (BLOCK_K / NVFP4_GROUP), tile.row);
          if (++ws == W_STAGES) ws = 0, w_parity ^= 1;
          for (int step = 0; step < STEPS; ++step) {
            barrier_wait(shared.x_empty + xs, x_parity);
            barrier_expect(shared.x_full + xs, sizeof(shared.x[0]));
            copy_box(shared.x[xs], &x_map, shared.x_full + xs, (block * STEPS + step) * STEP_K * 2, tile.token);
            if (++xs == X_STAGES) xs = 0, x_parity ^= 1;
          }
        }
      }
    }
  } else {
    registers_up<232>();
    int group = role - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t x_parity = 0, w_parity = 0;
    uint32_t select = t | t << 4 | (4 + t) << 8 | (4 + t) << 12;
    // A thread's rows of a tile are this one and the eighth below.
    int first = group * 64 + warp * 16 + g;
    for (int id = blockIdx.x; id < tiles; id += gridDim.x) {
      Tile tile = tile_of(id, token_tiles, row_tiles);
      float d[SUMS];
      uint32_t a[2][4][4];
      auto widen_step = [&](int step) {
        const uint8_t* scales = shared.scales[ws] + first * (BLOCK_K / NVFP4_GROUP);
        widen(a[step & 1], shared.codes[ws] + first * (BLOCK_K / 2), scales, step, g * 16, select);
      };
      barrier_wait(shared.w_full + ws, w_parity);
      widen_step(0);
      int before = 0;
      for (int block = 0; block < blocks; ++block) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          barrier_wait(shared.x_full + xs, x_parity);
          uint64_t b = operand_rows128(shared.x[xs]);
          products_begin();
          // 32 bytes further along K, in units of 16.
#pragma unroll
          for (int i = 0; i < STEP_K / 16; ++i) product_bf16(d, a[step & 1][i], b + 2 * i, block > 0 || step > 0 || i > 0);
          products_commit();
          // The step before is done once only this one is left: its stage is free, and so are its registers.
          products_wait<1>();
          if ((block > 0 || step > 0) && threadIdx.x % 128 == 0) barrier_arrive(shared.x_empty + before);
          before = xs;
          if (++xs == X_STAGES) xs = 0, x_parity ^= 1;
          if (step + 1 < STEPS) {
            widen_step(step + 1);
          } else {
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.w_empty + ws);
            if (++ws == W_STAGES) ws = 0, w_parity ^= 1;
            if (block + 1 < blocks) {
              barrier_wait(shared.w_full + ws, w_parity);
              widen_step(0);
            }
          }
        }
      }
      float scales[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = tile.row + first + 8 * half;
        float global = row < n ? w_globals[row] : 1.0f;
        scales[half] = x_scale * NVFP4_UNSHIFT * (w_divides ? 1.0f / global : global);
      }
      products_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(shared.x_empty + before);
      store(d, scales, shared.out[group], group, y, y_pitch, tile.token, tile.row + group * 64, m, n);
    }
  }
}
#endif
