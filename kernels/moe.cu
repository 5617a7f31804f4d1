// Routing, the sort of pairs by expert, quantised inputs, experts of any form and shape, and the sums over a token's
// experts. The fast paths of the experts' products are moe_decode.cu and moe_gemm.cu.
#include "lib/experts.cuh"
#include "lib/quantise.cuh"
#include "lib/vector.cuh"

// Lanes hold the first 32 x CACHED logits of a row; a longer row's rest is read again for every choice.
constexpr int CACHED = 8;

// A key that orders as the logit does, NaN with -inf, -0 with +0.
DEVICE uint32_t logit_key(float logit) {
  float value = logit != logit ? bits_f32(0xFF800000u) : logit + 0.0f;
  uint32_t bits = f32_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float key_logit(uint32_t key) { return bits_f32(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

// One warp per token. Each choice is the greatest (key, then lower id) after the previous one in that order, so nothing
// needs to be marked as taken.
template <class L>
DEVICE void route(const L* logits, int* ids, float* weights, int tokens, int experts, int top_k, int round_weights) {
  int lane = threadIdx.x & 31;
  int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (token >= tokens) return;
  logits += int64_t(token) * experts;
  ids += int64_t(token) * top_k;
  weights += int64_t(token) * top_k;

  uint32_t keys[CACHED];
  uint32_t greatest = 0;
#pragma unroll
  for (int j = 0; j < CACHED; j++) {
    int id = lane + 32 * j;
    keys[j] = id < experts ? logit_key(to_f32(logits[id])) : 0;
    greatest = keys[j] > greatest ? keys[j] : greatest;
  }
  for (int id = lane + 32 * CACHED; id < experts; id += 32) {
    uint32_t key = logit_key(to_f32(logits[id]));
    greatest = key > greatest ? key : greatest;
  }
  float max = key_logit(lanes_max<32>(greatest));
  float sum = 0.0f;
  for (int id = lane; id < experts; id += 32) sum += expf(to_f32(logits[id]) - max);
  float denominator = warp_sum(sum);

  uint32_t last_key = 0xFFFFFFFFu;
  int last_id = -1;
  float total = 0.0f;
  for (int k = 0; k < top_k; k++) {
    // Keys are never 0: that is below the key of -inf.
    uint32_t best = 0;
    int best_id = experts;
    auto consider = [&](uint32_t key, int id) {
      bool after = key < last_key || (key == last_key && id > last_id);
      if (after && key > best) {
        best = key;
        best_id = id;
      }
    };
#pragma unroll
    for (int j = 0; j < CACHED; j++) consider(keys[j], lane + 32 * j);
    for (int id = lane + 32 * CACHED; id < experts; id += 32) consider(logit_key(to_f32(logits[id])), id);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
      uint32_t key = __shfl_xor_sync(ALL_LANES, best, offset);
      int id = __shfl_xor_sync(ALL_LANES, best_id, offset);
      if (key > best || (key == best && id < best_id)) {
        best = key;
        best_id = id;
      }
    }
    last_key = best;
    last_id = best_id;
    // The logit itself, whose NaN the key does not have.
    float weight = expf(to_f32(logits[best_id]) - max) / denominator;
    total += weight;
    if (lane == (k & 31)) {
      ids[k] = best_id;
      weights[k] = weight;
    }
  }
  // Each lane divides what it has written itself.
  for (int k = lane; k < top_k; k += 32) {
    float weight = weights[k] / total;
    weights[k] = round_weights ? rounded<bf16>(weight) : weight;
  }
}

KERNEL LAUNCH_BOUNDS(128)
    route_f32(const float* logits, int* ids, float* weights, int tokens, int experts, int top_k, int round_weights) {
  after_earlier_kernels();
  route<float>(logits, ids, weights, tokens, experts, top_k, round_weights);
}
EXPORT(route_f32)
KERNEL LAUNCH_BOUNDS(128)
    route_bf16(const bf16* logits, int* ids, float* weights, int tokens, int experts, int top_k, int round_weights) {
  after_earlier_kernels();
  route<bf16>(logits, ids, weights, tokens, experts, top_k, round_weights);
}
EXPORT(route_bf16)

// Experts whose pairs one block sorts.
constexpr int SORTED = 2;
// Ids that a lane asks for together: one after another they would take as many times as long as memory takes to answer.
constexpr int AHEAD = 8;

// Ids p, p + 32, ..., -1 from `to` on.
DEVICE void load_ids(const int* ids, int p, int to, int (&id)[AHEAD]) {
#pragma unroll
  for (int i = 0; i < AHEAD; i++) id[i] = p + 32 * i < to ? ids[p + 32 * i] : -1;
}

// Whether a lane's id is one of `count` from `first` on; most are not, for all lanes.
DEVICE bool any_of(int id, int first, int count) {
  return __ballot_sync(ALL_LANES, id >= first && id - first < count) != 0;
}

// The pairs by expert, then by number: sorted[offsets[e] .. offsets[e + 1]] are those of expert e, those with an id out of
// range are in none. A block finds where its experts begin by counting lesser ids, so blocks do not wait for each other,
// and a pair's place by counting the pairs before it: nothing depends on the order in which threads run.
// `zeros` numbers after the offsets are set to 0.
KERNEL LAUNCH_BOUNDS(1024) sort_pairs(const int* ids, int* sorted, int* offsets, int pairs, int experts, int zeros) {
  after_earlier_kernels();
  __shared__ int counts[32][SORTED + 1];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int expert = blockIdx.x * SORTED;
  int here = experts - expert < SORTED ? experts - expert : SORTED;
  // Each warp takes a run of pairs, in whole warps.
  int run = CEIL_DIV(CEIL_DIV(pairs, warps), 32) * 32;
  int from = warp * run < pairs ? warp * run : pairs;
  int to = from + run < pairs ? from + run : pairs;

  int count[SORTED] = {}, less = 0;
  for (int p = from; p < to; p += 32 * AHEAD) {
    int id[AHEAD];
    load_ids(ids, p + lane, to, id);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      less += id[i] >= 0 && id[i] < expert;
      if (!any_of(id[i], expert, here)) continue;
#pragma unroll
      for (int j = 0; j < SORTED; j++) count[j] += __popc(__ballot_sync(ALL_LANES, id[i] == expert + j));
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) less += __shfl_xor_sync(ALL_LANES, less, offset);
  if (lane == 0) {
#pragma unroll
    for (int j = 0; j < SORTED; j++) counts[warp][j] = count[j];
    counts[warp][SORTED] = less;
  }
  __syncthreads();

  int start = 0, place[SORTED];
  for (int w = 0; w < warps; w++) start += counts[w][SORTED];
#pragma unroll
  for (int j = 0; j < SORTED; j++) {
    if (threadIdx.x == 0 && j < here) offsets[expert + j] = start;
    place[j] = start;
    for (int w = 0; w < warps; w++) {
      if (w < warp) place[j] += counts[w][j];
      if (j < here) start += counts[w][j];
    }
  }
  if (threadIdx.x == 0 && expert + here == experts) offsets[experts] = start;
  if (blockIdx.x == 0 && threadIdx.x < zeros) offsets[experts + 1 + threadIdx.x] = 0;

  for (int p = from; p < to; p += 32 * AHEAD) {
    int id[AHEAD];
    load_ids(ids, p + lane, to, id);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (!any_of(id[i], expert, here)) continue;
#pragma unroll
      for (int j = 0; j < SORTED; j++) {
        uint32_t mine = __ballot_sync(ALL_LANES, id[i] == expert + j && j < here);
        if (mine >> lane & 1u) sorted[place[j] + __popc(mine & ((1u << lane) - 1u))] = p + 32 * i + lane;
        place[j] += __popc(mine);
      }
    }
  }
}
EXPORT(sort_pairs)

// Columns c .. c + 8 of a row, zeros past its end; `runs` where rows are whole aligned runs of eight.
template <class T>
DEVICE void octet(const T* x, int c, int cols, bool runs, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.0f;
  if (runs) {
    if (c < cols) load_run(x + c, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (c + i < cols) v[i] = to_f32(x[c + i]);
    }
  }
}

// Runs of eight of a short row that a lane keeps in registers between the maximum and the codes: an expert's activations.
constexpr int HELD = 2;

// By token, a row of at most HELD runs for each lane.
template <class T>
DEVICE void quantise_held(const T* x, uint8_t* codes, float* row_scale, int cols) {
  int lane = threadIdx.x & 31;
  float held[HELD][8];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    octet(x, 8 * (lane + WARP * i), cols, true, held[i]);
    most = magnitude8(held[i], most);
  }
  float scale = fp8_scale(bits_f32(lanes_max<32>(most)));
  if (lane == 0) *row_scale = scale;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    int c = 8 * (lane + WARP * i);
    if (c < cols) store_e4m3(codes + c, held[i], scale);
  }
}
// Codes and scales of the rows of an input, one warp per row. By token, row r is row r of x; by pair (`per_token` pairs of
// one row of x), its stored scale is that of the pair's slot, and a pair that leads to none is left alone. Of an input by
// pair already, `per_token` is 1.
template <class T>
DEVICE void quantise_rows(const T* x, const float* stored, const int* ids, const int* table, uint8_t* codes, void* scales,
                          int scheme, int divides, int rows, int cols, int per_token, int experts, int slots) {
  int lane = threadIdx.x & 31;
  int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (row >= rows) return;
  float scale = 1.0f;
  if (scheme == INPUT_TENSOR || scheme == INPUT_NVFP4) {
    int slot = slot_of(ids[row], table, experts, slots);
    if (slot < 0) return;
    scale = stored[slot];
  }
  bool runs = whole_runs<8>(x, cols, cols);
  x += int64_t(row / per_token) * cols;
  float v[8];
  if (scheme == INPUT_NVFP4) {
    codes += int64_t(row) * (cols / 2);
    uint8_t* scale_codes = reinterpret_cast<uint8_t*>(scales) + int64_t(row) * (cols / NVFP4_GROUP);
    for (int from = 0; from < cols; from += 8 * WARP) {
      int c = from + 8 * lane;
      octet(x, c, cols, runs, v);
      uint32_t code = nvfp4_scale_code(bits_f32(lanes_max<2>(magnitude8(v, 0))), scale, divides);
      float group = nvfp4_scale(code, scale, divides);
      if (c >= cols) continue;
      uint32_t packed = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) packed |= f32_to_e2m1(v[i] / group) << 4 * i;
      *reinterpret_cast<uint32_t*>(codes + c / 2) = packed;
      if (lane % 2 == 0) scale_codes[c / NVFP4_GROUP] = uint8_t(code);
    }
    return;
  }
  codes += int64_t(row) * cols;
  if (scheme == INPUT_TOKEN) {
    uint32_t most = 0;
    if (runs && cols <= 8 * WARP * HELD) {
      quantise_held(x, codes, reinterpret_cast<float*>(scales) + row, cols);
      return;
    }
    for (int c = 8 * lane; c < cols; c += 8 * WARP) {
      octet(x, c, cols, runs, v);
      most = magnitude8(v, most);
    }
    scale = fp8_scale(bits_f32(lanes_max<32>(most)));
    if (lane == 0) reinterpret_cast<float*>(scales)[row] = scale;
  }
  for (int from = 0; from < cols; from += 8 * WARP) {
    int c = from + 8 * lane;
    octet(x, c, cols, runs, v);
    if (scheme == INPUT_GROUP) {
      scale = fp8_scale(bits_f32(lanes_max<FP8_BLOCK / 8>(magnitude8(v, 0))));
      if (c % FP8_BLOCK == 0 && c < cols) {
        reinterpret_cast<float*>(scales)[int64_t(row) * CEIL_DIV(cols, FP8_BLOCK) + c / FP8_BLOCK] = scale;
      }
    }
    if (runs) {
      if (c >= cols) continue;
      Words2 packed = {};
#pragma unroll
      for (int i = 0; i < 8; i++) packed.w[i / 4] |= f32_to_e4m3(v[i] / scale) << i % 4 * 8;
      *reinterpret_cast<Words2*>(codes + c) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (c + i < cols) codes[c + i] = uint8_t(f32_to_e4m3(v[i] / scale));
      }
    }
  }
}

KERNEL LAUNCH_BOUNDS(256)
    quantise_rows_f32(const float* x, const float* stored, const int* ids, const int* table, uint8_t* codes, void* scales,
                      int scheme, int divides, int rows, int cols, int per_token, int experts, int slots) {
  after_earlier_kernels();
  quantise_rows<float>(x, stored, ids, table, codes, scales, scheme, divides, rows, cols, per_token, experts, slots);
}
EXPORT(quantise_rows_f32)
KERNEL LAUNCH_BOUNDS(256)
    quantise_rows_bf16(const bf16* x, const float* stored, const int* ids, const int* table, uint8_t* codes, void* scales,
                       int scheme, int divides, int rows, int cols, int per_token, int experts, int slots) {
  after_earlier_kernels();
  quantise_rows<bf16>(x, stored, ids, table, codes, scales, scheme, divides, rows, cols, per_token, experts, slots);
}
EXPORT(quantise_rows_bf16)

// A row of any form.
struct Row {
  const uint8_t* codes;
  const uint8_t* scales;
  float scale;
  int form, divides;
};

// Columns k .. k + 8 (k a multiple of 8) as f32, with the roundings of src/ops/weight.rs; zeros past the end.
DEVICE void widen8(float (&to)[8], const Row& row, int cols, int k) {
  int count = cols - k < 8 ? cols - k : 8;
  float scale = row.scale;
  if (row.form == FORM_FP8_BLOCK) scale = reinterpret_cast<const float*>(row.scales)[k / FP8_BLOCK];
  if (row.form == FORM_NVFP4 && count > 0) {
    scale = nvfp4_scale(row.scales[k / NVFP4_GROUP], row.scale, row.divides);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float value = 0.0f;
    if (i < count) {
      if (row.form == FORM_F32) {
        value = reinterpret_cast<const float*>(row.codes)[k + i];
      } else if (row.form == FORM_BF16) {
        value = to_f32(reinterpret_cast<const bf16*>(row.codes)[k + i]);
      } else if (row.form <= FORM_FP8_BLOCK) {
        value = e4m3_to_f32(row.codes[k + i]) * scale;
      } else {
        value = e2m1_to_f32(row.codes[(k + i) / 2] >> (i & 1) * 4) * scale;
      }
    }
    to[i] = value;
  }
}

// Where row `row` of `cols` columns begins, in bytes.
DEVICE int64_t row_bytes(int form, int64_t row, int cols) {
  int64_t elements = row * cols;
  return form == FORM_F32 ? elements * 4 : form == FORM_BF16 ? elements * 2 : form <= FORM_FP8_BLOCK ? elements : elements / 2;
}

// A matrix of every slot: slot s has rows first + s x stride .. + rows.
struct Stack {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* row_scales;
  int form, divides, first, stride, rows;
};

DEVICE Row matrix_row(const Stack& w, int slot, int r, int cols) {
  int64_t top = w.first + int64_t(slot) * w.stride, at = top + r;
  Row row = {w.codes + row_bytes(w.form, at, cols), w.scales, 1.0f, w.form, w.divides};
  if (w.form == FORM_FP8_BLOCK) row.scales += 4 * CEIL_DIV(cols, FP8_BLOCK) * block_row(at, w.rows);
  if (w.form == FORM_NVFP4) row.scales += at * (cols / NVFP4_GROUP);
  if (w.form == FORM_FP8 || w.form == FORM_NVFP4) row.scale = w.row_scales[at];
  return row;
}

// An input: its rows or their codes, one for `per_row` pairs. Scales are by row, or by slot where they are stored.
struct Input {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* row_scales;
  int form, divides, per_row, by_slot;
};

DEVICE Row input_row(const Input& x, int slot, int pair, int cols) {
  int64_t at = pair / x.per_row;
  Row row = {x.codes + row_bytes(x.form, at, cols), x.scales, 1.0f, x.form, x.divides};
  if (x.form == FORM_FP8_BLOCK) row.scales += 4 * CEIL_DIV(cols, FP8_BLOCK) * at;
  if (x.form == FORM_NVFP4) row.scales += at * (cols / NVFP4_GROUP);
  if (x.form == FORM_FP8 || x.form == FORM_NVFP4) row.scale = x.row_scales[x.by_slot ? slot : at];
  return row;
}

constexpr int ANY_PAIRS = 16, ANY_ROWS = 64, ANY_DEPTH = 32;

// Products of a tile of pairs of one expert with rows of its matrices, summed along the columns one after another.
// Thread t has pair t / 16 and rows t % 16 + 16 i: y[m][i] is matrix m's. `slot` is negative where there is nothing to do.
template <int matrices>
struct AnyTile {
  float y[matrices][ANY_ROWS / 16];
  int pair;  // negative: none
  int row;   // the first of the tile
};

template <int matrices>
DEVICE AnyTile<matrices> any_product(const Stack* w, const Input* x, const int* table, const int* sorted,
                                     const int* offsets, int cols, int experts, int slots) {
  __shared__ PairTile shared_tile;
  __shared__ float xs[matrices][ANY_PAIRS][ANY_DEPTH + 1];
  __shared__ float ws[matrices][ANY_ROWS][ANY_DEPTH + 1];
  AnyTile<matrices> out = {};
  out.pair = -1;
  PairTile tile = pair_tile(offsets, experts, blockIdx.x, ANY_PAIRS, &shared_tile);
  if (tile.expert < 0) return out;
  int slot = slot_of(tile.expert, table, experts, slots);
  if (slot < 0) return out;
  int thread = threadIdx.x, mine = thread / 16, column = thread % 16;
  out.row = blockIdx.y * ANY_ROWS;
  if (mine < tile.pairs) out.pair = sorted[tile.first + mine];

  // Rows of x are loaded by 16 x 4 threads, rows of w by 64 x 4, eight columns each.
  int octet = thread % 4 * 8, loaded = thread / 4;
  Row x_row[matrices], w_row[matrices];
#pragma unroll
  for (int m = 0; m < matrices; m++) {
    if (loaded < tile.pairs) x_row[m] = input_row(x[m], slot, sorted[tile.first + loaded], cols);
    if (out.row + loaded < w[m].rows) w_row[m] = matrix_row(w[m], slot, out.row + loaded, cols);
  }
  for (int from = 0; from < cols; from += ANY_DEPTH) {
    int depth = cols - from < ANY_DEPTH ? cols - from : ANY_DEPTH;
#pragma unroll
    for (int m = 0; m < matrices; m++) {
      float values[8];
      if (loaded < tile.pairs) {
        widen8(values, x_row[m], cols, from + octet);
#pragma unroll
        for (int i = 0; i < 8; i++) xs[m][loaded][octet + i] = values[i];
      }
      if (out.row + loaded < w[m].rows) {
        widen8(values, w_row[m], cols, from + octet);
#pragma unroll
        for (int i = 0; i < 8; i++) ws[m][loaded][octet + i] = values[i];
      }
    }
    __syncthreads();
    if (out.pair >= 0) {
      for (int k = 0; k < depth; k++) {
#pragma unroll
        for (int m = 0; m < matrices; m++) {
          float value = xs[m][mine][k];
#pragma unroll
          for (int i = 0; i < ANY_ROWS / 16; i++) out.y[m][i] += value * ws[m][column + 16 * i][k];
        }
      }
    }
    __syncthreads();
  }
  return out;
}

// h[pair] = round(silu(gate x) * up x).
template <class T>
DEVICE void any_gate_up(const Stack (&w)[2], const Input (&x)[2], const int* table, const int* sorted, const int* offsets,
                        T* h, int inter, int hidden, int experts, int slots) {
  AnyTile<2> tile = any_product<2>(w, x, table, sorted, offsets, hidden, experts, slots);
  if (tile.pair < 0) return;
#pragma unroll
  for (int i = 0; i < ANY_ROWS / 16; i++) {
    int row = tile.row + threadIdx.x % 16 + 16 * i;
    if (row < inter) h[int64_t(tile.pair) * inter + row] = round_to<T>(silu(tile.y[0][i]) * tile.y[1][i]);
  }
}

// y[pair] = round(down h).
template <class T>
DEVICE void any_down(const Stack& w, const Input& x, const int* table, const int* sorted, const int* offsets, T* y,
                     int hidden, int inter, int experts, int slots) {
  AnyTile<1> tile = any_product<1>(&w, &x, table, sorted, offsets, inter, experts, slots);
  if (tile.pair < 0) return;
#pragma unroll
  for (int i = 0; i < ANY_ROWS / 16; i++) {
    int row = tile.row + threadIdx.x % 16 + 16 * i;
    if (row < hidden) y[int64_t(tile.pair) * hidden + row] = round_to<T>(tile.y[0][i]);
  }
}

#define MATRIX(m)                                                                                               \
  const uint8_t *m##_codes, const uint8_t *m##_scales, const float *m##_row_scales, int m##_form, \
      int m##_divides, int m##_first, int m##_stride
#define INPUT(x)                                                                                                   \
  const uint8_t *x##_codes, const uint8_t *x##_scales, const float *x##_row_scales, int x##_form, \
      int x##_divides, int x##_per_row, int x##_by_slot
#define MATRIX_OF(m, rows) \
  Stack { m##_codes, m##_scales, m##_row_scales, m##_form, m##_divides, m##_first, m##_stride, rows }
#define INPUT_OF(x) \
  Input { x##_codes, x##_scales, x##_row_scales, x##_form, x##_divides, x##_per_row, x##_by_slot }
#define ANY_ENTRIES(T, name)                                                                                         \
  KERNEL LAUNCH_BOUNDS(256)                                                                                          \
      any_gate_up_##name(INPUT(x), INPUT(x_up), MATRIX(gate), MATRIX(up), const int* table, const int* sorted,       \
                         const int* offsets, T* h, int inter, int hidden, int experts, int slots) {                  \
    after_earlier_kernels();                                                                                         \
    Stack w[2] = {MATRIX_OF(gate, inter), MATRIX_OF(up, inter)};                                                    \
    Input in[2] = {INPUT_OF(x), INPUT_OF(x_up)};                                                                     \
    any_gate_up<T>(w, in, table, sorted, offsets, h, inter, hidden, experts, slots);                                 \
  }                                                                                                                  \
  EXPORT(any_gate_up_##name)                                                                                         \
  KERNEL LAUNCH_BOUNDS(256)                                                                                          \
      any_down_##name(INPUT(h), MATRIX(down), const int* table, const int* sorted, const int* offsets, T* y,         \
                      int hidden, int inter, int experts, int slots) {                                               \
    after_earlier_kernels();                                                                                         \
    any_down<T>(MATRIX_OF(down, hidden), INPUT_OF(h), table, sorted, offsets, y, hidden, inter, experts, slots);     \
  }                                                                                                                  \
  EXPORT(any_down_##name)
ANY_ENTRIES(float, f32)
ANY_ENTRIES(bf16, bf16)

// Pairs of a token whose rows are read together.
constexpr int TOGETHER = 8;

// out[t] = round(sum over k of w_k y_k), k in routing order, of `hidden` columns; rows of `out` are `pitch` apart. A pair of
// an absent expert adds nothing; one whose id or slot is out of range makes the row NaN. One block row per token,
// `blockIdx.y` for its columns, 8 a thread.
template <class T>
DEVICE void combine(const T* y, const int* ids, const float* weights, const int* table, T* out, int hidden, int pitch,
                    int top_k, int experts, int slots) {
  int64_t token = blockIdx.x;
  int c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (c >= hidden) return;
  bool wide = sizeof(T) == 2 && hidden % 8 == 0 && aligned16(y, 0) && aligned16(out, pitch * 2);
  int count = hidden - c < 8 ? hidden - c : 8;
  float sum[8] = {};
  if (wide) {
    for (int from = 0; from < top_k; from += TOGETHER) {
      // What a pair leads to and its row are asked for before any is added: no answer waits for another's.
      int slot[TOGETHER];
      float weight[TOGETHER];
      Words4 v[TOGETHER] = {};
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        int64_t pair = token * top_k + from + i;
        bool in = from + i < top_k;
        slot[i] = in ? slot_of(ids[pair], table, experts, slots) : ABSENT;
        weight[i] = !in || slot[i] < 0 ? bits_f32(0x7FC00000u) : weights[pair];
      }
      const T* rows = y + (token * top_k + from) * hidden + c;
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (slot[i] >= 0) v[i] = load16(rows + int64_t(i) * hidden);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (slot[i] == ABSENT) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          sum[2 * j] += weight[i] * bf16_low(v[i].w[j]);
          sum[2 * j + 1] += weight[i] * bf16_high(v[i].w[j]);
        }
      }
    }
  } else {
    for (int k = 0; k < top_k; k++) {
      int64_t pair = token * top_k + k;
      int slot = slot_of(ids[pair], table, experts, slots);
      if (slot == ABSENT) continue;
      float weight = slot < 0 ? bits_f32(0x7FC00000u) : weights[pair];
      const T* row = y + pair * hidden + c;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i < count) sum[i] += slot < 0 ? weight : weight * to_f32(row[i]);
      }
    }
  }
  T* row = out + token * pitch + c;
  if (wide) {
    Words4 v;
#pragma unroll
    for (int i = 0; i < 4; i++) v.w[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
    store16(row, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i < count) row[i] = round_to<T>(sum[i]);
  }
}

KERNEL LAUNCH_BOUNDS(256)
    combine_f32(const float* y, const int* ids, const float* weights, const int* table, float* out, int hidden, int pitch,
                int top_k, int experts, int slots) {
  after_earlier_kernels();
  combine<float>(y, ids, weights, table, out, hidden, pitch, top_k, experts, slots);
}
EXPORT(combine_f32)
KERNEL LAUNCH_BOUNDS(256)
    combine_bf16(const bf16* y, const int* ids, const float* weights, const int* table, bf16* out, int hidden, int pitch,
                 int top_k, int experts, int slots) {
  after_earlier_kernels();
  combine<bf16>(y, ids, weights, table, out, hidden, pitch, top_k, experts, slots);
}
EXPORT(combine_bf16)

// out += sigmoid(gate) shared, 8 columns a thread.
template <class T>
DEVICE void combine_shared(T* out, const T* shared, const T* gate, int hidden) {
  int64_t token = blockIdx.x;
  int c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (c >= hidden) return;
  float weight = sigmoid(to_f32(gate[token]));
  out += token * hidden + c;
  shared += token * hidden + c;
  if (sizeof(T) == 2 && hidden % 8 == 0 && aligned16(out, 0) && aligned16(shared, 0)) {
    Words4 a = load16(out), b = load16(shared);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a.w[i] = pack_bf16(bf16_low(a.w[i]) + weight * bf16_low(b.w[i]), bf16_high(a.w[i]) + weight * bf16_high(b.w[i]));
    }
    store16(out, a);
    return;
  }
  int count = hidden - c < 8 ? hidden - c : 8;
  for (int i = 0; i < count; i++) out[i] = round_to<T>(to_f32(out[i]) + weight * to_f32(shared[i]));
}

KERNEL LAUNCH_BOUNDS(256) combine_shared_f32(float* out, const float* shared, const float* gate, int hidden) {
  after_earlier_kernels();
  combine_shared<float>(out, shared, gate, hidden);
}
EXPORT(combine_shared_f32)
KERNEL LAUNCH_BOUNDS(256) combine_shared_bf16(bf16* out, const bf16* shared, const bf16* gate, int hidden) {
  after_earlier_kernels();
  combine_shared<bf16>(out, shared, gate, hidden);
}
EXPORT(combine_shared_bf16)
