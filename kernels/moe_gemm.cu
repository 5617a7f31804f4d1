// Experts of many tokens on tensor cores (lib/gemm.cuh): tiles of one expert's pairs by rows of its matrices, the pairs'
// rows gathered through the sorted list. Block b has tile b / row tiles of the pairs (see pair_tile) and the rows' tile
// b % row tiles. MOE_X and MOE_W are the forms of the input and of the weights, MOE_BLOCKED as Gemm's BLOCKED. Activations
// are bf16; the rules for columns are lib/gemm.cuh's.
#include "lib/experts.cuh"
#include "lib/gemm.cuh"

#ifndef TILE
#error "TILE is the packed tile of lib/gemm.cuh"
#endif
#if !defined(MOE_X) || !defined(MOE_W) || !defined(MOE_BLOCKED)
#error "MOE_X, MOE_W: forms of lib/operand.cuh; MOE_BLOCKED: whether scales are those of 128 columns"
#endif

constexpr int X = MOE_X, W = MOE_W == FORM_FP8_BLOCK ? FORM_FP8 : MOE_W;
using G = Gemm<PackedTile<TILE>, X, W, MOE_BLOCKED != 0>;
// Gathered rows have an address each, which Gemm does not count.
constexpr int ROOM = 65536 / (G::THREADS * (G::REGISTERS + 32));
constexpr int BLOCKS_PER_SM = ROOM < 1 ? 1 : ROOM < G::BLOCKS_PER_SM ? ROOM : G::BLOCKS_PER_SM;

// Bytes of a row's codes.
template <int FORM>
DEVICE int64_t pitch_of(int cols) {
  return int64_t(cols) * 16 / Piece<FORM>::ELEMENTS;
}

// The rows of an input that the pairs of a tile have.
struct PairRows {
  const uint8_t* codes;
  const uint8_t* scales;  // NVFP4
  const float* blocks;    // of groups; null where there are none
  const int* rows;        // of each pair, in shared memory
  int cols, count;
};
DEVICE bool has_row(const PairRows& x, int pair) { return pair < x.count; }
DEVICE const uint8_t* codes_of(const PairRows& x, int pair) { return x.codes + x.rows[pair] * pitch_of<X>(x.cols); }
DEVICE const uint8_t* scales_of(const PairRows& x, int pair) {
  return x.scales + int64_t(x.rows[pair]) * (x.cols / NVFP4_GROUP);
}
DEVICE float block_scale(const PairRows& x, int pair, int block) {
  if (x.blocks == nullptr) return 1.0f;
  return pair < x.count ? x.blocks[int64_t(x.rows[pair]) * CEIL_DIV(x.cols, FP8_BLOCK) + block] : 0.0f;
}

// Rows `first` .. of one matrix of the slot, or of two that take turns in the tile's halves.
struct MatrixRows {
  const uint8_t* codes;
  const uint8_t* scales;    // NVFP4: e4m3; blocks: f32
  const float* row_scales;  // null where there are none
  int64_t top;              // the matrix's first row among those of all slots
};
template <int matrices>
struct TileRows {
  MatrixRows of[matrices];
  int first, rows, cols;
};
template <int matrices>
DEVICE bool has_row(const TileRows<matrices>& w, int row) {
  return w.first + row % (G::BN / matrices) < w.rows;
}
template <int matrices>
DEVICE const uint8_t* codes_of(const TileRows<matrices>& w, int row) {
  constexpr int part = G::BN / matrices;
  return w.of[row / part].codes + (w.first + row % part) * pitch_of<W>(w.cols);
}
template <int matrices>
DEVICE const uint8_t* scales_of(const TileRows<matrices>& w, int row) {
  constexpr int part = G::BN / matrices;
  return w.of[row / part].scales + int64_t(w.first + row % part) * (w.cols / NVFP4_GROUP);
}
template <int matrices>
DEVICE float block_scale(const TileRows<matrices>& w, int row, int block) {
  if constexpr (MOE_W != FORM_FP8_BLOCK) return 1.0f;
  constexpr int part = G::BN / matrices;
  const MatrixRows& m = w.of[row / part];
  int at = w.first + row % part;
  if (at >= w.rows) return 0.0f;
  const float* scales = reinterpret_cast<const float*>(m.scales);
  return scales[(block_row(m.top, w.rows) + at / FP8_BLOCK) * CEIL_DIV(w.cols, FP8_BLOCK) + block];
}

DEVICE MatrixRows matrix_rows(const uint8_t* codes, const uint8_t* scales, const float* row_scales, int first, int stride,
                              int slot, int cols) {
  int64_t top = first + int64_t(slot) * stride;
  MatrixRows m = {codes + top * pitch_of<W>(cols), scales, row_scales, top};
  if (W == FORM_NVFP4) m.scales += top * (cols / NVFP4_GROUP);
  return m;
}

// Sums under the scales that do not change along the columns.
DEVICE float scaled(float sum, const MatrixRows& m, int row, float x_scale, int divides) {
  if (X == FORM_NVFP4) sum *= NVFP4_UNSHIFT;
  if (W == FORM_NVFP4) sum *= NVFP4_UNSHIFT;
  if (MOE_W != FORM_FP8_BLOCK && m.row_scales != nullptr) {
    float scale = m.row_scales[m.top + row];
    sum = W == FORM_NVFP4 && divides ? sum / scale : sum * scale;
  }
  return X == FORM_NVFP4 && divides ? sum / x_scale : sum * x_scale;
}

// Four neighbouring results, `left` of them inside the row.
DEVICE void store4(bf16* to, const float (&v)[4], int left) {
  if (left >= 4 && (uint64_t(to) & 7) == 0) {
    *reinterpret_cast<Words2*>(to) = Words2{{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])}};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i < left) to[i] = to_bf16(v[i]);
  }
}

// An input: rows or codes, one for `per_row` pairs; scales of rows (`x_scales`), or of slots where they are stored.
#define INPUT                                                                                                        \
  const uint8_t *x, const uint8_t *x_groups, const float *x_blocks, const float *x_scales, int x_by_slot, int per_row
#define WEIGHTS(w) const uint8_t *w##_codes, const uint8_t *w##_scales, const float *w##_row_scales, int w##_first
#define CALL                                                                                                       \
  int stride, const int *table, const int *sorted, const int *offsets, bf16 *out, int rows, int cols, int divides, \
      int experts, int slots

// out[pair] = round(silu(gate x) * up x) with two matrices, round(w x) with one.
template <int matrices>
DEVICE void experts_tile(INPUT, const MatrixRows (&all)[matrices], CALL) {
  DYNAMIC_SHARED(shared);
  __shared__ PairTile shared_tile;
  __shared__ int pair_rows[G::BM];
  constexpr int part = G::BN / matrices;
  int row_tiles = CEIL_DIV(rows, part);
  PairTile tile = pair_tile(offsets, experts, blockIdx.x / row_tiles, G::BM, &shared_tile);
  if (tile.expert < 0) return;
  int slot = slot_of(tile.expert, table, experts, slots);
  if (slot < 0) return;
  for (int p = threadIdx.x; p < tile.pairs; p += G::THREADS) pair_rows[p] = sorted[tile.first + p] / per_row;
  __syncthreads();
  PairRows input = {x, x_groups, x_blocks, pair_rows, cols, tile.pairs};
  TileRows<matrices> w = {};
#pragma unroll
  for (int m = 0; m < matrices; m++) {
    w.of[m] = matrix_rows(all[m].codes, all[m].scales, all[m].row_scales, int(all[m].top), stride, slot, cols);
  }
  w.first = int(blockIdx.x % row_tiles) * part;
  w.rows = rows;
  w.cols = cols;
  G::run(shared, input, w, cols);

  constexpr int quads = part / 4;
  for (int i = threadIdx.x; i < tile.pairs * quads; i += G::THREADS) {
    int p = i / quads, n = i % quads * 4, row = w.first + n;
    if (row >= rows) continue;
    int64_t pair = sorted[tile.first + p];
    float x_scale = x_scales == nullptr ? 1.0f : x_scales[x_by_slot ? slot : pair_rows[p]];
    float v[matrices][4];
#pragma unroll
    for (int m = 0; m < matrices; m++) {
      G::sum4(shared, p, m * part + n, v[m]);
#pragma unroll
      for (int j = 0; j < 4; j++) v[m][j] = row + j < rows ? scaled(v[m][j], w.of[m], row + j, x_scale, divides) : 0.0f;
    }
    if constexpr (matrices == 2) {
#pragma unroll
      for (int j = 0; j < 4; j++) v[0][j] = silu(v[0][j]) * v[1][j];
    }
    store4(out + pair * rows + row, v[0], rows - row);
  }
}

KERNEL LAUNCH_BOUNDS(G::THREADS, BLOCKS_PER_SM) moe_gemm_gate_up(INPUT, WEIGHTS(gate), WEIGHTS(up), CALL) {
  after_earlier_kernels();
  const MatrixRows w[2] = {{gate_codes, gate_scales, gate_row_scales, gate_first}, {up_codes, up_scales, up_row_scales, up_first}};
  experts_tile<2>(x, x_groups, x_blocks, x_scales, x_by_slot, per_row, w, stride, table, sorted, offsets, out, rows, cols,
                  divides, experts, slots);
}
EXPORT(moe_gemm_gate_up)

KERNEL LAUNCH_BOUNDS(G::THREADS, BLOCKS_PER_SM) moe_gemm_down(INPUT, WEIGHTS(down), CALL) {
  after_earlier_kernels();
  const MatrixRows w[1] = {{down_codes, down_scales, down_row_scales, down_first}};
  experts_tile<1>(x, x_groups, x_blocks, x_scales, x_by_slot, per_row, w, stride, table, sorted, offsets, out, rows, cols,
                  divides, experts, slots);
}
EXPORT(moe_gemm_down)
