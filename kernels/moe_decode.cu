// Experts of a few tokens: every expert's weights are read once and straight into registers, widened to bf16 there (all
// forms fit it exactly, scales aside) and multiplied on the tensor cores with the columns of its pairs. Activations are bf16.
// WEIGHT is how the matrices are stored, one of lib/operand.cuh's forms.
//
// Sums have one order whatever the number of tokens, pairs or blocks: the columns fall into 1, 2 or 4 parts by their
// number alone (`splits`), each a chain of products, and the parts are added in order.
#include "lib/base.cuh"
#include "lib/experts.cuh"
#include "lib/quantise.cuh"

#ifndef WEIGHT
#define WEIGHT 4
#endif
// Whether scales change along the columns, every 128: those of FP8 blocks, of the input's groups, or both.
#ifndef BLOCKED
#define BLOCKED 0
#endif
#if BLOCKED && WEIGHT != 2 && WEIGHT != 3
#error "BLOCKED is for FP8 weights"
#endif

constexpr bool FP8 = WEIGHT == FORM_FP8 || WEIGHT == FORM_FP8_BLOCK, NVFP4 = WEIGHT == FORM_NVFP4;
// Columns in the 64 bytes that four lanes read of a row at a time.
constexpr int STEP = NVFP4 ? 128 : FP8 ? 64 : 32;
// Steps in flight.
constexpr int BATCH = 2;
constexpr int THREADS = 256, WARPS = THREADS / 32;
// Rows of a warp: two tiles of 16.
constexpr int TILE = 16;
constexpr int MOST_PAIRS = 8;  // of a pass: the columns of a product

// The matrix of one slot: where its codes begin (an NVFP4 matrix's scales too), its first row among those of all slots, and
// that of its blocks.
struct Side {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* row_scales;
  int top, top_block;
};

// Slots are `stride` rows apart, the first begins at row `first`.
DEVICE Side side_of(const uint8_t* codes, const uint8_t* scales, const float* row_scales, int first, int stride, int rows,
                    int cols, int slot) {
  int64_t top = first + int64_t(slot) * stride;
  int64_t elements = top * cols;
  Side side = {codes + (WEIGHT == FORM_BF16 ? 2 * elements : NVFP4 ? elements / 2 : elements), scales, row_scales, int(top), 0};
  if (WEIGHT == FORM_FP8_BLOCK) side.top_block = int(block_row(top, rows));
  if (NVFP4) side.scales += elements / NVFP4_GROUP;
  return side;
}

// Bytes of `columns` columns of codes.
DEVICE uint32_t code_bytes(int columns) { return WEIGHT == FORM_BF16 ? 2 * columns : NVFP4 ? columns / 2 : columns; }

// Where the 8 columns from 8 x octet on lie among a row's 16-byte units in shared memory: a lane reads its unit of a step
// beside those of the other three lanes of its row.
DEVICE int unit_of(int octet) {
  constexpr int per_lane = STEP / 32;  // octets of a lane in one step
  int step = octet / (4 * per_lane), rest = octet % (4 * per_lane);
  return step * 4 * per_lane + rest % per_lane * 4 + rest / per_lane;
}

// Eight columns as pairs, in the order in which widened codes come.
DEVICE Words4 as_unit(const float (&x)[8]) {
  if (NVFP4) return Words4{{pack_bf16(x[0], x[4]), pack_bf16(x[1], x[5]), pack_bf16(x[2], x[6]), pack_bf16(x[3], x[7])}};
  if (FP8) return Words4{{pack_bf16(x[0], x[2]), pack_bf16(x[1], x[3]), pack_bf16(x[4], x[6]), pack_bf16(x[5], x[7])}};
  return Words4{{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])}};
}

DEVICE void load8(const bf16* p, bool in, float (&x)[8]) {
  Words4 v = {};
  if (in) v = load16(p);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = bf16_low(v.w[i]);
    x[2 * i + 1] = bf16_high(v.w[i]);
  }
}

// One row of an input as the products read it: values that bf16 holds exactly, into `units`; what they are to be multiplied
// by afterwards is the result, or lies in `group_scales` for each 128 columns. A warp's work; `stored` is the scale of a
// scheme that has one. `cols` is a multiple of 32 (of 128 for groups and NVFP4).
DEVICE float stage_row(const bf16* x, int cols, int scheme, int divides, float stored, unsigned char* units,
                       float* group_scales) {
  int lane = threadIdx.x & 31, octets = cols / 8;
  float values[8];
  float scale = scheme == INPUT_TENSOR || scheme == INPUT_NVFP4 ? stored : 1.0f;
  if (scheme == INPUT_TOKEN) {
    uint32_t most = 0;
#pragma unroll 1
    for (int o = lane; o < octets; o += 32) {
      load8(x + 8 * o, true, values);
      most = magnitude8(values, most);
    }
    scale = fp8_scale(bits_f32(lanes_max<32>(most)));
  }
#pragma unroll 1
  for (int from = 0; from < octets; from += 32) {
    int o = from + lane;
    load8(x + 8 * o, o < octets, values);
    if (scheme == INPUT_GROUP) {
      scale = fp8_scale(bits_f32(lanes_max<16>(magnitude8(values, 0))));
      if (lane % 16 == 0 && o < octets) group_scales[o / 16] = scale;
    }
    if (scheme == INPUT_NVFP4) {
      uint32_t code = nvfp4_scale_code(bits_f32(lanes_max<2>(magnitude8(values, 0))), stored, divides);
      float group = nvfp4_scale(code, stored, divides), bare = e4m3_to_f32(code);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] = e2m1_to_f32(f32_to_e2m1(values[i] / group)) * bare;
    } else if (scheme != INPUT_PLAIN) {
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] = e4m3_to_f32(f32_to_e4m3(values[i] / scale));
    }
    if (o < octets) store16(units + 16 * unit_of(o), as_unit(values));
  }
  return scheme == INPUT_GROUP ? 1.0f : scale;
}

// Eight e2m1 codes, times 2^-126 x scale: columns (0, 4), (1, 5), (2, 6), (3, 7).
DEVICE void widen_nvfp4(uint32_t codes, uint32_t scale, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t top = codes << (12 - 4 * i);
    uint32_t bits = i == 0 ? codes << 6 : i == 1 ? codes << 2 : i == 2 ? codes >> 2 : codes >> 6;
    pairs[i] = mul_bf16x2((top & 0x80008000u) | (bits & 0x01C001C0u), scale);
  }
}

// Four e4m3 codes as they are, NaN aside: columns (0, 2), (1, 3).
DEVICE void widen_fp8(uint32_t codes, uint32_t (&pairs)[2]) {
  constexpr uint32_t up = 0x7B807B80u;  // 2^120, twice
  pairs[0] = mul_bf16x2((codes << 8 & 0x80008000u) | (codes << 4 & 0x07F007F0u), up);
  pairs[1] = mul_bf16x2((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u), up);
}

// Nonzero where one of four e4m3 codes is NaN.
DEVICE uint32_t nan_codes(uint32_t codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }

// What a lane has loaded of four rows: rows g and g + 8 of the warp's two tiles.
struct Loaded {
  Words4 codes[BATCH][4];
};

// Sums of the two tiles for 8 pairs.
struct Sums {
  float v[2][4];
};

// The four rows of a lane: where its 16 bytes of the first step are, from their sides' beginnings.
struct Rows {
  uint32_t at[4];
};

DEVICE void load_step(Words4 (&to)[4], const Side (&sides)[2], const Rows& rows, int step, bool in) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[i] = Words4{};
    if (in) to[i] = load16_stream(sides[i / 2].codes + (rows.at[i] + uint32_t(step) * 64));
  }
}

// The scales of a batch of NVFP4 codes: of the 16 bytes that each row has, every one of four lanes loads 4.
DEVICE void load_scales(uint32_t (&to)[4], const Side (&sides)[2], const Rows& rows, int step, int end) {
  if (!NVFP4) return;
  int t = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[i] = 0;
    if (step + t / 2 < end) {
      to[i] = *reinterpret_cast<const uint32_t*>(sides[i / 2].scales + (rows.at[i] / 8 + uint32_t(step) * 8 + 2 * t));
    }
  }
}

// The products of one step: `units` is the lane's pair's row in shared memory at this step, if it has a pair.
DEVICE void multiply_step(Sums& sums, const Words4 (&codes)[4], const uint32_t (&batch_scales)[4], int s,
                          const unsigned char* units, bool has_pair, uint32_t& nans) {
  int t = threadIdx.x & 3;
  uint32_t scales[4][2] = {};
  if (NVFP4) {
    // Of a step's 8 bytes, which two lanes have, a lane's own are 2 t and 2 t + 1.
    int from = (threadIdx.x & 28) | (2 * s + t / 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      nvfp4_scales(__shfl_sync(ALL_LANES, batch_scales[i], from) >> (t & 1) * 16, scales[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < STEP / 32; j++) {
    Words4 x = {};
    if (has_pair) x = load16(units + 64 * j);
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      uint32_t a[2][4];  // of two products
      const Words4 &low = codes[2 * tile], &high = codes[2 * tile + 1];
      if (NVFP4) {
        uint32_t p[4], q[4];
        widen_nvfp4(low.w[j], scales[2 * tile][j / 2], p);
        widen_nvfp4(high.w[j], scales[2 * tile + 1][j / 2], q);
        a[0][0] = p[0], a[0][1] = q[0], a[0][2] = p[1], a[0][3] = q[1];
        a[1][0] = p[2], a[1][1] = q[2], a[1][2] = p[3], a[1][3] = q[3];
      } else if (FP8) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          uint32_t p[2], q[2];
          widen_fp8(low.w[2 * j + i], p);
          widen_fp8(high.w[2 * j + i], q);
          a[i][0] = p[0], a[i][1] = q[0], a[i][2] = p[1], a[i][3] = q[1];
          nans |= nan_codes(low.w[2 * j + i]) >> (2 * tile) | nan_codes(high.w[2 * j + i]) >> (2 * tile + 1);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++) a[i][0] = low.w[2 * i], a[i][1] = high.w[2 * i], a[i][2] = low.w[2 * i + 1], a[i][3] = high.w[2 * i + 1];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t b[2] = {x.w[2 * i], x.w[2 * i + 1]};
        mma_bf16(sums.v[tile], a[i], b);
      }
    }
  }
}

// Adds the sums of 128 columns to those of all, each by its scales: `w`, one of each tile, and where the input is of groups
// `x`, of a pair every `blocks` floats.
DEVICE void add_block(Sums& all, Sums& part, const float (&w)[2], bool grouped, const float* x, int pairs, int blocks) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int pair = (threadIdx.x & 3) * 2 + i;
    float scale = grouped && pair < pairs ? x[pair * blocks] : 1.0f;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      float both = w[tile] * scale;
      all.v[tile][i] += part.v[tile][i] * both;
      all.v[tile][i + 2] += part.v[tile][i + 2] * both;
      part.v[tile][i] = part.v[tile][i + 2] = 0.0f;
    }
  }
}

// Makes the sums of rows with a NaN code NaN: four lanes have looked at each row, bits 7 - i, 15 - i, .. are of row i.
DEVICE void spread_nans(Sums& sums, uint32_t nans) {
  if (!FP8) return;
  nans |= __shfl_xor_sync(ALL_LANES, nans, 1);
  nans |= __shfl_xor_sync(ALL_LANES, nans, 2);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float(&v)[4] = sums.v[i / 2];
    if (nans & 0x80808080u >> i) v[i % 2 * 2] = v[i % 2 * 2 + 1] = bits_f32(0x7FC00000u);
  }
}

// Where the scales of the blocks that the two tiles are in begin, in floats.
struct BlockScales {
  int at[2];
};

DEVICE BlockScales block_scales(const Side (&sides)[2], const int (&tiles)[2], int rows, int blocks) {
  BlockScales scales = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scales.at[i] = (sides[i].top_block + (tiles[i] < rows ? tiles[i] : rows - 1) / FP8_BLOCK) * blocks;
  }
  return scales;
}

// One product under way: the sums so far, and those of the 128 columns at hand where scales change along the columns.
struct Chain {
  Sums all, part;
  uint32_t nans;
};

// Step `step` of a chain that ends before step `end`. `xs` is the first pair's units in shared memory.
DEVICE void chain_step(Chain& chain, const Words4 (&codes)[4], const uint32_t (&scales)[4], int step, int s, int end,
                       const unsigned char* xs, int pitch, int pairs, const Side (&sides)[2], const BlockScales& blocks_of,
                       bool grouped, const float* groups, int blocks) {
  int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const unsigned char* units = xs + g * pitch + (step + s) * (2 * STEP) + 16 * t;
  multiply_step(BLOCKED ? chain.part : chain.all, codes, scales, s, units, g < pairs, chain.nans);
  constexpr int steps = FP8_BLOCK / STEP;  // of a block; batches are whole blocks
  static_assert(!BLOCKED || BATCH % steps == 0, "a batch ends inside a block of scales");
  if (BLOCKED && (s % steps == steps - 1 || step + s + 1 == end)) {
    int block = (step + s) / steps;
    float w[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      w[i] = WEIGHT == FORM_FP8_BLOCK ? reinterpret_cast<const float*>(sides[i].scales)[blocks_of.at[i] + block] : 1.0f;
    }
    add_block(chain.all, chain.part, w, grouped, groups + block, pairs, blocks);
  }
}

// A sum with the scales that do not change along the columns.
DEVICE float scaled(float sum, const Side& side, int row, float x_scale, int scheme, int divides) {
  if (NVFP4) {
    float global = side.row_scales[side.top + row];
    sum *= NVFP4_UNSHIFT;
    sum = divides ? sum / global : sum * global;
  }
  if (WEIGHT == FORM_FP8) sum *= side.row_scales[side.top + row];
  return scheme == INPUT_NVFP4 && divides ? sum / x_scale : sum * x_scale;
}

// Parts of the columns, of `steps` steps, that a part ends before.
struct Part {
  int begin, end;
};

DEVICE Part part_of(int steps, int splits, int split) {
  int size = CEIL_DIV(CEIL_DIV(steps, splits), BATCH) * BATCH;
  int begin = split * size < steps ? split * size : steps;
  return Part{begin, begin + size < steps ? begin + size : steps};
}

// The pairs of block y's expert into `list`, in rising order, and their number; 0 where the block has no work. With
// `by_pair`, block y is for the expert of pair y, unless an earlier pair has it; else for expert y.
DEVICE int find_pairs(const int* ids, int pairs, int by_pair, int expert, int* list) {
  __shared__ int counts[WARPS];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int run = CEIL_DIV(CEIL_DIV(pairs, WARPS), 32) * 32;
  int from = warp * run < pairs ? warp * run : pairs;
  int to = from + run < pairs ? from + run : pairs;
  int count = 0;
  bool earlier = false;
#pragma unroll 1
  for (int p = from; p < to; p += 32) {
    bool mine = p + lane < to && ids[p + lane] == expert;
    earlier |= mine && by_pair && p + lane < int(blockIdx.y);
    count += __popc(__ballot_sync(ALL_LANES, mine));
  }
  if (lane == 0) counts[warp] = count;
  if (__syncthreads_or(earlier)) return 0;
  int total = 0, at = 0;
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) at += counts[w];
    total += counts[w];
  }
#pragma unroll 1
  for (int p = from; p < to; p += 32) {
    bool mine = p + lane < to && ids[p + lane] == expert;
    uint32_t all = __ballot_sync(ALL_LANES, mine);
    if (mine) list[at + __popc(all & ((1u << lane) - 1u))] = p + lane;
    at += __popc(all);
  }
  return total;
}

// An input and the weights it meets.
struct Call {
  const bf16* x;
  const float* stored;  // scale of each slot
  int scheme, per_row;  // pairs that share a row
  int rows, cols, divides, splits;
};

// gate_up (its tiles are the same rows of both matrices) or down (rows one after another) of one expert's pairs: block x
// has `per_block` turns of rows, `pass` pairs at a time (8, fewer where rows are long). A row of x in shared memory
// has `pitch` bytes; see launch/moe.rs for the layout.
template <bool down>
DEVICE void decode(const Call& call, const Side (&sides)[2], int pairs, const int* list, bf16* out, int per_block, int pass,
                   int pitch, unsigned char* shared) {
  int rows = call.rows, cols = call.cols, splits = call.splits;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int split = warp % splits, group = warp / splits, groups = WARPS / splits;
  int blocks = CEIL_DIV(cols, FP8_BLOCK);
  Part part = part_of(cols / STEP, splits, split);
  constexpr int warp_rows = down ? 2 * TILE : TILE;
  int turns = CEIL_DIV(rows, groups * warp_rows);
  int first = blockIdx.x * per_block, last = first + per_block < turns ? first + per_block : turns;

  unsigned char* xs = shared;
  float* x_scales = reinterpret_cast<float*>(xs + pass * pitch);
  float* partial = x_scales + MOST_PAIRS;
  int partial_size = (splits - 1) * groups * 256;
  float* groups_of = partial + 2 * partial_size;
  bool grouped = call.scheme == INPUT_GROUP;

  uint32_t row_bytes = code_bytes(cols);
  auto rows_of = [&](int turn) {
    Rows at;
    int top = (turn * groups + group) * warp_rows;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = top + (down ? 8 * i : i % 2 * 8) + g;
      at.at[i] = uint32_t(row < rows ? row : rows - 1) * row_bytes + 16 * t;
    }
    return at;
  };

  int finished = 0;
  for (int base = 0; base < pairs; base += pass) {
    int here = pairs - base < pass ? pairs - base : pass;
    // The first weights are on their way while x is staged.
    Rows at = rows_of(first);
    Loaded loaded;
    uint32_t scales[4] = {}, next_scales[4] = {};
#pragma unroll
    for (int s = 0; s < BATCH; s++) load_step(loaded.codes[s], sides, at, part.begin + s, part.begin + s < part.end);
    load_scales(scales, sides, at, part.begin, part.end);
    __syncthreads();  // the list is written; nobody reads the previous pairs any more
#pragma unroll 1
    for (int p = warp; p < here; p += WARPS) {
      int64_t row = list[base + p] / call.per_row;
      float scale = stage_row(call.x + row * cols, cols, call.scheme, call.divides, call.stored ? *call.stored : 1.0f,
                              xs + p * pitch, groups_of + p * blocks);
      if (lane == 0) x_scales[p] = scale;
    }
    __syncthreads();

    for (int turn = first; turn < last; turn++, finished++) {
      int top = (turn * groups + group) * warp_rows;
      const int tiles[2] = {top, down ? top + TILE : top};
      BlockScales blocks_of = {};
      if (WEIGHT == FORM_FP8_BLOCK) blocks_of = block_scales(sides, tiles, rows, blocks);
      Chain chain = {};
      for (int step = part.begin; step < part.end; step += BATCH) {
        // What is used up is loaded again at once, for the batch after this one.
        bool ends = step + BATCH >= part.end;
        int next = ends ? part.begin : step + BATCH;
        bool more = !ends || turn + 1 < last;
        if (ends && more) at = rows_of(turn + 1);
        load_scales(next_scales, sides, at, next, more ? part.end : 0);
#pragma unroll
        for (int s = 0; s < BATCH; s++) {
          if (step + s < part.end) {
            chain_step(chain, loaded.codes[s], scales, step, s, part.end, xs, pitch, here, sides, blocks_of,
                       grouped, groups_of, blocks);
          }
          load_step(loaded.codes[s], sides, at, next + s, more && next + s < part.end);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = next_scales[i];
      }
      spread_nans(chain.all, chain.nans);

      if (splits > 1) {
        // Two buffers, so that one barrier a turn is enough.
        float* mine = partial + (finished & 1) * partial_size + group * 256 + lane;
        int stride = groups * 256;
        if (split > 0) {
#pragma unroll
          for (int i = 0; i < 8; i++) mine[(split - 1) * stride + i * 32] = chain.all.v[i / 4][i % 4];
        }
        __syncthreads();
        if (split > 0) continue;
#pragma unroll 1
        for (int other = 0; other + 1 < splits; other++) {
#pragma unroll
          for (int i = 0; i < 8; i++) chain.all.v[i / 4][i % 4] += mine[other * stride + i * 32];
        }
      }

#pragma unroll
      for (int i = 0; i < 4; i++) {
        int p = 2 * t + i % 2, inside = g + i / 2 * 8;
        if (p >= here) continue;
        bf16* row = out + int64_t(list[base + p]) * rows;
        float x_scale = x_scales[p];
        if (down) {
#pragma unroll
          for (int tile = 0; tile < 2; tile++) {
            int r = tiles[tile] + inside;
            if (r < rows) {
              row[r] = to_bf16(scaled(chain.all.v[tile][i], sides[tile], r, x_scale, call.scheme, call.divides));
            }
          }
        } else if (top + inside < rows) {
          int r = top + inside;
          float gate = scaled(chain.all.v[0][i], sides[0], r, x_scale, call.scheme, call.divides);
          float up = scaled(chain.all.v[1][i], sides[1], r, x_scale, call.scheme, call.divides);
          row[r] = to_bf16(silu(gate) * up);
        }
      }
    }
  }
}

#define WEIGHTS(w) const uint8_t *w##_codes, const uint8_t *w##_scales, const float *w##_row_scales, int w##_first
#define CALL                                                                                                      \
  const float *stored, int scheme, int per_row, const int *ids, const int *table, int pairs, int by_pair, int experts, \
      int slots, int rows, int cols, int stride, int divides, int splits, int per_block, int pass, int pitch

// h[pair] = round(silu(gate x) * up x), `rows` of each of gate and up.
KERNEL LAUNCH_BOUNDS(THREADS, 2) decode_gate_up(const bf16* x, WEIGHTS(gate), WEIGHTS(up), bf16* h, CALL) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  int expert = by_pair ? ids[blockIdx.y] : int(blockIdx.y);
  int slot = slot_of(expert, table, experts, slots);
  if (slot < 0) return;
  int* list = reinterpret_cast<int*>(shared);
  int count = find_pairs(ids, pairs, by_pair, expert, list);
  if (count == 0) return;
  Side sides[2] = {side_of(gate_codes, gate_scales, gate_row_scales, gate_first, stride, rows, cols, slot),
                   side_of(up_codes, up_scales, up_row_scales, up_first, stride, rows, cols, slot)};
  Call call = {x, stored ? stored + slot : nullptr, scheme, per_row, rows, cols, divides, splits};
  decode<false>(call, sides, count, list, h, per_block, pass, pitch, shared + CEIL_DIV(pairs, 4) * 16);
}
EXPORT(decode_gate_up)

// y[pair] = round(down h).
KERNEL LAUNCH_BOUNDS(THREADS, 2) decode_down(const bf16* h, WEIGHTS(down), bf16* y, CALL) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  int expert = by_pair ? ids[blockIdx.y] : int(blockIdx.y);
  int slot = slot_of(expert, table, experts, slots);
  if (slot < 0) return;
  int* list = reinterpret_cast<int*>(shared);
  int count = find_pairs(ids, pairs, by_pair, expert, list);
  if (count == 0) return;
  Side side = side_of(down_codes, down_scales, down_row_scales, down_first, stride, rows, cols, slot);
  Side sides[2] = {side, side};
  Call call = {h, stored ? stored + slot : nullptr, scheme, per_row, rows, cols, divides, splits};
  decode<true>(call, sides, count, list, y, per_block, pass, pitch, shared + CEIL_DIV(pairs, 4) * 16);
}
EXPORT(decode_down)

// out[t] = round(sum over k of w_k round(down_k h_k)): down and the sum over a token's experts in one, a warp per expert;
// block (x, y) has 32 rows of token y. The sums are those of decode_down and combine, bit for bit.
KERNEL LAUNCH_BOUNDS(THREADS, 2)
    decode_down_combine(const bf16* h, WEIGHTS(down), const float* weights, bf16* out, const float* stored, int scheme,
                        const int* ids, const int* table, int top_k, int experts, int slots, int rows, int cols, int stride,
                        int divides, int splits, int pitch) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  __shared__ float y[WARPS][2 * TILE];
  __shared__ int found[WARPS];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int blocks = CEIL_DIV(cols, FP8_BLOCK), steps = cols / STEP;
  int top = blockIdx.x * 2 * TILE;
  const int tiles[2] = {top, top + TILE};
  unsigned char* xs = shared + warp * pitch;
  float* groups = reinterpret_cast<float*>(shared + WARPS * pitch) + warp * blocks;
  Rows at;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = top + 8 * i + g;
    at.at[i] = uint32_t(row < rows ? row : rows - 1) * code_bytes(cols) + 16 * t;
  }
  float sum = 0.0f;
  for (int from = 0; from < top_k; from += WARPS) {
    int64_t pair = int64_t(blockIdx.y) * top_k + from + warp;
    int slot = from + warp < top_k ? slot_of(ids[pair], table, experts, slots) : ABSENT;
    if (lane == 0) found[warp] = slot;
    if (slot >= 0) {
      Side side = side_of(down_codes, down_scales, down_row_scales, down_first, stride, rows, cols, slot);
      const Side sides[2] = {side, side};
      BlockScales blocks_of = {};
      if (WEIGHT == FORM_FP8_BLOCK) blocks_of = block_scales(sides, tiles, rows, blocks);
      Sums total = {};
      float x_scale = 1.0f;
      for (int split = 0; split < splits; split++) {
        Part part = part_of(steps, splits, split);
        Chain chain = {};
        for (int step = part.begin; step < part.end; step += BATCH) {
          Loaded loaded;
          uint32_t scales[4] = {};
#pragma unroll
          for (int s = 0; s < BATCH; s++) load_step(loaded.codes[s], sides, at, step + s, step + s < part.end);
          load_scales(scales, sides, at, step, part.end);
          if (split == 0 && step == 0) {
            x_scale = stage_row(h + pair * cols, cols, scheme, divides, stored ? stored[slot] : 1.0f, xs, groups);
            __syncwarp();
          }
#pragma unroll
          for (int s = 0; s < BATCH; s++) {
            if (step + s < part.end) {
              chain_step(chain, loaded.codes[s], scales, step, s, part.end, xs, pitch, 1, sides, blocks_of,
                         scheme == INPUT_GROUP, groups, blocks);
            }
          }
        }
        spread_nans(chain.all, chain.nans);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float& v = total.v[i / 4][i % 4];
          v = split == 0 ? chain.all.v[i / 4][i % 4] : v + chain.all.v[i / 4][i % 4];
        }
      }
      if (t == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int r = top + 8 * i + g;
          if (r < rows) {
            float v = scaled(total.v[i / 2][i % 2 * 2], side, r, x_scale, scheme, divides);
            y[warp][8 * i + g] = rounded<bf16>(v);
          }
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < 2 * TILE && top + int(threadIdx.x) < rows) {
      for (int w = 0; w < WARPS && from + w < top_k; w++) {
        if (found[w] == ABSENT) continue;
        float weight = weights[int64_t(blockIdx.y) * top_k + from + w];
        sum += found[w] < 0 ? bits_f32(0x7FC00000u) : weight * y[w][threadIdx.x];
      }
    }
    __syncthreads();
  }
  int row = top + int(threadIdx.x);
  if (threadIdx.x < 2 * TILE && row < rows) out[int64_t(blockIdx.y) * rows + row] = to_bf16(sum);
}
EXPORT(decode_down_combine)
