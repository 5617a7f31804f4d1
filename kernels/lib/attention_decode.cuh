// Decode over pages: one query row of a sequence, its tokens cut into parts that are blocks of their own, and a second
// kernel that sums the parts.
//
// A block holds one part, one kv head and up to 16 heads of its group as the rows of mma.sync m16n8k16, so that keys and
// values are read once for all of them. They stream through a ring of tiles of 32 tokens. Of a tile each of four warps
// computes the scores of 8 tokens and, once the scores are exchanged, D / 4 columns of the result; every warp computes the
// weights of all of them again. Nothing depends on other sequences: a row's parts are cut by its own length alone.
#ifndef LIB_ATTENTION_DECODE
#define LIB_ATTENTION_DECODE
#include "lib/attention.cuh"

// Tokens of a part, of which a sequence of `length` has at most `splits`; `part_tokens` in src/ops/attention.rs.
constexpr int LEAST_PART = 128, MOST_PART = 256, PARTS_AT_LEAST = 16;
DEVICE int part_tokens(int length, int splits) {
  int part = CEIL_DIV(length, PARTS_AT_LEAST);
  part = part < LEAST_PART ? LEAST_PART : part > MOST_PART ? MOST_PART : part;
  int least = CEIL_DIV(length, splits);
  return CEIL_DIV(part > least ? part : least, PAGE_TOKENS) * PAGE_TOKENS;
}

template <class KV, int D, int STAGES>
struct DecodeLayout {
  static constexpr int WARPS = 4, THREADS = 128, TOKENS = 32;
  static constexpr bool CODES = sizeof(KV) == 1;
  using In = Operands<CODES>;
  // Rows at odd multiples of 16 bytes, where D / 16 of them is not odd already: different banks for eight rows.
  static constexpr int PITCH_BYTES = CODES ? (D / 16 % 2 == 0 ? D + 16 : D) : 2 * D + 16;
  static constexpr int TILE = TOKENS * PITCH_BYTES;
  static constexpr int Q_PITCH = D + 8;  // elements
  static constexpr int QUERIES = 16 * Q_PITCH * 2;
  static constexpr int S_PITCH = TOKENS + 4;
  static constexpr int SCORES = 16 * S_PITCH * 4;
  static constexpr int FACTORS = 16 * 4;
  static constexpr int COLUMNS = CEIL_DIV(D / 16, WARPS);  // 16-column pieces of the result of a warp
};

// The heads' queries as fragments of all k-steps. Keys in bf16 come by ldmatrix, elements in order. Keys in codes come four
// bytes a lane, so that lane t has elements 4t..4t + 3 of a step of 16 for elements 2t, 2t + 1, 2t + 8, 2t + 9: the sum
// over elements is the same in any order, if queries are taken in the same one.
template <bool CODES, int D, int PITCH>
DEVICE void load_queries(uint32_t (&q)[D / 16][4], const bf16* queries, int lane) {
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    if constexpr (CODES) {
      const bf16* row = queries + lane / 4 * PITCH + d + lane % 4 * 4;
      Words2 upper = *reinterpret_cast<const Words2*>(row), lower = *reinterpret_cast<const Words2*>(row + 8 * PITCH);
      q[d / 16][0] = upper.w[0];
      q[d / 16][1] = lower.w[0];
      q[d / 16][2] = upper.w[1];
      q[d / 16][3] = lower.w[1];
    } else {
      ldmatrix_x4(q[d / 16], queries + lane % 16 * PITCH + lane / 16 * 8 + d);
    }
  }
}

// Scores of 16 heads and 8 tokens; even and odd steps are summed apart, for two chains in flight.
template <class KV, int D, class Layout>
DEVICE void part_scores(float (&s)[4], const uint32_t (&q)[D / 16][4], const unsigned char* tokens, int lane) {
  float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  if constexpr (Layout::CODES) {
    const unsigned char* row = tokens + lane / 4 * Layout::PITCH_BYTES + lane % 4 * 4;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t b[2];
      widen(*reinterpret_cast<const uint32_t*>(row + k * 16), b[0], b[1]);
      Layout::In::mma(sums[k % 2], q[k], b);
    }
  } else {
    const unsigned char* row = tokens + lane % 8 * Layout::PITCH_BYTES;
#pragma unroll
    for (int k = 0; k < D / 16; k += 2) {
      // Four 8 x 8 pieces: two steps; the last of an odd number of steps is read twice.
      int piece = k + 1 < D / 16 ? lane / 8 : lane / 8 % 2;
      uint32_t b[4];
      ldmatrix_x4(b, row + k * 32 + piece * 16);
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      Layout::In::mma(sums[0], q[k], left);
      if (k + 1 < D / 16) Layout::In::mma(sums[1], q[k + 1], right);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) s[e] = sums[0][e] + sums[1][e];
}

// acc += p v of 16 tokens and 16 columns: two tiles of 8 columns. In bf16 these are columns 0..8 and 8..16. In codes a lane
// reads two neighbouring columns, so the first tile has the even ones and the second the odd ones.
template <class Layout>
DEVICE void part_values(float (&left)[4], float (&right)[4], const uint32_t (&p)[4], const unsigned char* v, int lane) {
  uint32_t b[4];
  if constexpr (Layout::CODES) {
    const unsigned char* at = v + lane % 4 * 2 * Layout::PITCH_BYTES + lane / 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned char* row = at + half * 8 * Layout::PITCH_BYTES;
      uint32_t first = *reinterpret_cast<const uint16_t*>(row);
      uint32_t second = *reinterpret_cast<const uint16_t*>(row + Layout::PITCH_BYTES);
      widen(__byte_perm(first, second, 0x5140), b[half], b[2 + half]);
    }
  } else {
    ldmatrix_x4_trans(b, v + lane % 16 * Layout::PITCH_BYTES + lane / 16 * 16);
  }
  const uint32_t b_left[2] = {b[0], b[1]}, b_right[2] = {b[2], b[3]};
  Layout::In::mma(left, p, b_left);
  Layout::In::mma(right, p, b_right);
}

// Where the partial results lie: f32 [decodes, heads, splits, D], then (max, sum) pairs [decodes, heads, splits].
struct Partials {
  float* out;
  float* state;
};
DEVICE Partials partials_at(float* partials, int decodes, int heads, int splits, int d) {
  return Partials{partials, partials + int64_t(decodes) * heads * splits * d};
}

// Row r of the step is sequence r's. Blocks: x = sequence * splits + part, y = kv head * pieces + piece of 16 of its group.
// A sequence of one part is written to `out`, others to `partials`, unscaled by the sum.
template <class KV, int D, int STAGES>
DEVICE void decode(bf16* out, float* partials, const bf16* qkv, const KV* k, const KV* v, Sequences all, int decodes,
                   int splits, int qkv_cols, float scale, float v_scale) {
  using Layout = DecodeLayout<KV, D, STAGES>;
  using In = typename Layout::In;
  constexpr int THREADS = Layout::THREADS, TOKENS = Layout::TOKENS, WARPS = Layout::WARPS;
  DYNAMIC_SHARED(memory);
  bf16* queries = reinterpret_cast<bf16*>(memory);
  float* scores = reinterpret_cast<float*>(memory + Layout::QUERIES);
  float* factors = reinterpret_cast<float*>(memory + Layout::QUERIES + Layout::SCORES);
  unsigned char* ring = memory + Layout::QUERIES + Layout::SCORES + Layout::FACTORS;

  int sequence = int(blockIdx.x / unsigned(splits)), part = int(blockIdx.x % unsigned(splits));
  int pieces = CEIL_DIV(all.group, 16);
  int kv_head = int(blockIdx.y) / pieces, first_head = int(blockIdx.y) % pieces * 16;
  int heads = all.group - first_head < 16 ? all.group - first_head : 16;
  int head0 = kv_head * all.group + first_head, all_heads = all.kv_heads * all.group;
  int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;

  int length = all.visible(int64_t(all.contexts[sequence]) + 1);
  bool inert = all.inert(sequence) || length == 0;
  int tokens = inert ? 0 : part_tokens(length, splits);
  int parts = inert ? 1 : CEIL_DIV(length, tokens);
  if (part >= parts) return;
  int from = part * tokens, to = from + tokens < length ? from + tokens : length;
  int tiles = inert ? 0 : CEIL_DIV(to - from, TOKENS);

  auto copy_tile = [&](int i, int page) {
    if (i >= tiles) return;
    int token = from + i * TOKENS, count = page < 0 ? 0 : to - token;
    unsigned token_bytes = unsigned(all.kv_heads) * D * unsigned(sizeof(KV));
    unsigned char* tile = ring + i % STAGES * 2 * Layout::TILE;
    copy_tokens<TOKENS, D * int(sizeof(KV)), Layout::PITCH_BYTES, THREADS>(
        tile, tokens_of<KV, D>(k, page, all.kv_heads, kv_head, token % PAGE_TOKENS), token_bytes, count);
    copy_tokens<TOKENS, D * int(sizeof(KV)), Layout::PITCH_BYTES, THREADS>(
        tile + Layout::TILE, tokens_of<KV, D>(v, page, all.kv_heads, kv_head, token % PAGE_TOKENS), token_bytes, count);
  };
  auto page_at = [&](int i) { return i < tiles ? all.page(sequence, (from + i * TOKENS) / PAGE_TOKENS) : -1; };

  // The queries come with the first tile.
  for (int i = int(threadIdx.x); i < 16 * (D / 8); i += THREADS) {
    int head = i / (D / 8), chunk = i % (D / 8);
    bool there = head < heads;
    const bf16* row = qkv + (there ? int64_t(sequence) * qkv_cols + (head0 + head) * 2 * D : 0);
    cp_async16(queries + head * Layout::Q_PITCH + chunk * 8, row + chunk * 8, there ? 16 : 0);
  }
  // Pages of the tiles that are in shared memory or on their way, oldest first.
  int page[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) page[i] = page_at(i);
#pragma unroll
  for (int i = 0; i + 1 < STAGES; i++) {
    copy_tile(i, page[i]);
    cp_async_commit();
  }

  uint32_t q[D / 16][4];
  float acc[2 * Layout::COLUMNS][4];
#pragma unroll
  for (int n = 0; n < 2 * Layout::COLUMNS; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
  }
  Running running;
  running.start();
  float scales[2] = {scale, scale};

  cp_async_wait<STAGES - 2>();
  __syncthreads();
  if constexpr (Layout::CODES) {
    halve_queries<D, Layout::Q_PITCH, 16, THREADS>(queries, factors);
    __syncthreads();
    scales[0] *= factors[lane / 4];
    scales[1] *= factors[lane / 4 + 8];
  }
  load_queries<Layout::CODES, D, Layout::Q_PITCH>(q, queries, lane);

  for (int i = 0; i < tiles; i++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy_tile(i + STAGES - 1, page[STAGES - 1]);
    cp_async_commit();
    int here = page[0];
#pragma unroll
    for (int j = 0; j + 1 < STAGES; j++) page[j] = page[j + 1];
    page[STAGES - 1] = page_at(i + STAGES);

    const unsigned char* tile = ring + i % STAGES * 2 * Layout::TILE;
    float mine[4];
    part_scores<KV, D, Layout>(mine, q, tile + warp * 8 * Layout::PITCH_BYTES, lane);
    int column = warp * 8 + lane % 4 * 2, last = here < 0 ? -1 : to - 1 - (from + i * TOKENS);
#pragma unroll
    for (int e = 0; e < 4; e++) mine[e] = column + e % 2 > last ? minus_infinity() : mine[e];
    float* row = scores + lane / 4 * Layout::S_PITCH;
    *reinterpret_cast<float2*>(row + column) = make_float2(mine[0], mine[1]);
    *reinterpret_cast<float2*>(row + 8 * Layout::S_PITCH + column) = make_float2(mine[2], mine[3]);
    __syncthreads();

    float s[TOKENS / 8][4];
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
      float2 upper = *reinterpret_cast<const float2*>(row + n * 8 + lane % 4 * 2);
      float2 lower = *reinterpret_cast<const float2*>(row + 8 * Layout::S_PITCH + n * 8 + lane % 4 * 2);
      s[n][0] = upper.x;
      s[n][1] = upper.y;
      s[n][2] = lower.x;
      s[n][3] = lower.y;
    }
    running.add<In::BIAS>(s, acc, scales);
#pragma unroll
    for (int step = 0; step < TOKENS / 16; step++) {
      const uint32_t p[4] = {
          In::pack(s[2 * step][0], s[2 * step][1]), In::pack(s[2 * step][2], s[2 * step][3]),
          In::pack(s[2 * step + 1][0], s[2 * step + 1][1]), In::pack(s[2 * step + 1][2], s[2 * step + 1][3])};
      const unsigned char* values = tile + Layout::TILE + step * 16 * Layout::PITCH_BYTES;
#pragma unroll
      for (int c = 0; c < Layout::COLUMNS; c++) {
        int piece = c * WARPS + warp;
        if (D / 16 % WARPS == 0 || piece < D / 16)
          part_values<Layout>(acc[2 * c], acc[2 * c + 1], p, values + piece * 16 * int(sizeof(KV)), lane);
      }
    }
  }
  cp_async_wait<0>();

  float last[2] = {running.finish(0, v_scale), running.finish(1, v_scale)};
  float sums[2] = {quad_sum(running.sum[0]), quad_sum(running.sum[1])};
  Partials to_sum = partials_at(partials, decodes, all_heads, splits, D);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int head = lane / 4 + half * 8;
    if (head >= heads) continue;
    int64_t row = int64_t(sequence) * all_heads + head0 + head;
    if (parts > 1 && warp == 0 && lane % 4 == 0) {
      to_sum.state[(row * splits + part) * 2] = running.max[half];
      to_sum.state[(row * splits + part) * 2 + 1] = sums[half];
    }
#pragma unroll
    for (int c = 0; c < Layout::COLUMNS; c++) {
      int piece = c * WARPS + warp;
      if (D / 16 % WARPS != 0 && piece >= D / 16) continue;
      const float(&a)[4] = acc[2 * c];
      const float(&b)[4] = acc[2 * c + 1];
      int e = 2 * half, column = piece * 16 + lane % 4 * (Layout::CODES ? 4 : 2);
      // Two pairs of neighbours, `apart` columns from each other.
      constexpr int apart = Layout::CODES ? 2 : 8;
      float x0 = a[e], x1 = Layout::CODES ? b[e] : a[e + 1];
      float y0 = Layout::CODES ? a[e + 1] : b[e], y1 = b[e + 1];
      if (parts == 1) {
        uint32_t* at = reinterpret_cast<uint32_t*>(out + row * D + column);
        at[0] = pack_bf16(x0 * last[half], x1 * last[half]);
        at[apart / 2] = pack_bf16(y0 * last[half], y1 * last[half]);
      } else {
        float* at = to_sum.out + (row * splits + part) * D + column;
        *reinterpret_cast<float2*>(at) = make_float2(x0, x1);
        *reinterpret_cast<float2*>(at + apart) = make_float2(y0, y1);
      }
    }
  }
}

// Sums the parts of a sequence's head, block x = sequence * heads + head; those of one part are complete already. A thread sums every
// GROUPS-th part of four columns, then the groups are summed in order.
template <int D>
DEVICE void combine(bf16* out, float* partials, Sequences all, int decodes, int splits, float v_scale) {
  constexpr int THREADS = 512, QUADS = D / 4, MOST = THREADS / QUADS, GROUPS = MOST < 16 ? MOST : 16;
  __shared__ float scratch[32];
  __shared__ float group_out[GROUPS][D];
  __shared__ float group_sum[GROUPS];
  int heads = all.kv_heads * all.group, row = int(blockIdx.x), sequence = row / heads;
  int length = all.visible(int64_t(all.contexts[sequence]) + 1);
  if (all.inert(sequence) || length == 0) return;
  int parts = CEIL_DIV(length, part_tokens(length, splits));
  if (parts == 1) return;

  Partials from = partials_at(partials, decodes, heads, splits, D);
  const float* state = from.state + int64_t(row) * splits * 2;
  float most = minus_infinity();
  for (int i = int(threadIdx.x); i < parts; i += THREADS) most = fmaxf(most, state[2 * i]);
  most = block_max(most, scratch);
  if (most == minus_infinity()) most = 0.0f;

  int quad = int(threadIdx.x) % QUADS, group = int(threadIdx.x) / QUADS;
  if (group < GROUPS) {
    float sum = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* column = from.out + int64_t(row) * splits * D + quad * 4;
#pragma unroll 8
    for (int i = group; i < parts; i += GROUPS) {
      float weight = exp2_fast(state[2 * i] - most);
      Words4 values = load16(column + int64_t(i) * D);
      sum = fmaf(weight, state[2 * i + 1], sum);
#pragma unroll
      for (int e = 0; e < 4; e++) acc[e] = fmaf(weight, bits_f32(values.w[e]), acc[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) group_out[group][quad * 4 + e] = acc[e];
    if (quad == 0) group_sum[group] = sum;
  }
  __syncthreads();
  for (int c = int(threadIdx.x); c < D; c += THREADS) {
    float sum = 0.0f, acc = 0.0f;
    for (int g = 0; g < GROUPS; g++) {
      sum += group_sum[g];
      acc += group_out[g][c];
    }
    out[int64_t(row) * D + c] = to_bf16(acc * (sum == 0.0f ? 0.0f : v_scale / sum));
  }
}

#endif
