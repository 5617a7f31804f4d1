// Causal prefill over pages: flash attention on mma.sync m16n8k16, operands of 16 bits, f32 softmax and accumulation.
//
// A block holds 16 WARPS rows of one sequence and kv head. A row is a (query, head of the group) pair, query first, so that
// the group shares each page; a warp owns 16 rows and their whole output, and weights go from one product to the next in
// registers. Pages are the tiles of the softmax, counted from the sequence's start, and a page no row of a warp sees is
// skipped without a trace: a row's bits depend on its query and its sequence's pages, not on the chunk or the batch.
//
// The row's cost on an SM is shared memory's: 16 rows read a page's keys and values (64 KiB at D = 256) for 1 MFLOP.
#ifndef LIB_ATTENTION_PREFILL
#define LIB_ATTENTION_PREFILL
#include "lib/attention.cuh"

// Shared memory, in bytes. A row of D bf16 is padded by 16: rows then start at odd multiples of 16 bytes, and the eight
// rows of an ldmatrix lie in different banks.
template <int D, int WARPS>
struct PrefillLayout {
  static constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS;
  static constexpr int PITCH = D + 8;  // elements
  static constexpr int QUERIES = ROWS * PITCH * 2;
  static constexpr int TILE = PAGE_TOKENS * PITCH * 2;
  static constexpr int CODES = PAGE_TOKENS * D;
  static constexpr int FACTORS = ROWS * 4;
};

// s = q kᵀ for a warp's 16 rows and a page's 64 tokens. `q` and `k` are this lane's ldmatrix rows.
template <class Operands, int D>
DEVICE void page_scores(float (&s)[8][4], const bf16* q, const bf16* k) {
  constexpr int PITCH = D + 8;
#pragma unroll
  for (int n = 0; n < 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    uint32_t a[4];
    ldmatrix_x4(a, q + d);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, k + n * 8 * PITCH + d);
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      Operands::mma(s[n], a, left);
      Operands::mma(s[n + 1], a, right);
    }
  }
}

// The weights of a page as the left operands of its four steps of 16 tokens, rounded.
template <class Operands>
DEVICE void pack_weights(uint32_t (&p)[4][4], const float (&s)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) p[k][i] = Operands::pack(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
  }
}

// acc += p v for a warp's 16 rows and a page's 64 tokens. `v` is this lane's ldmatrix row.
template <class Operands, int D>
DEVICE void page_values(float (&acc)[D / 8][4], const uint32_t (&p)[4][4], const bf16* v) {
  constexpr int PITCH = D + 8;
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, v + k * 16 * PITCH + n * 8);
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      Operands::mma(acc[n], p[k], left);
      Operands::mma(acc[n + 1], p[k], right);
    }
  }
}

// A page of codes as halves, from one shared tile to another.
template <int D, int THREADS>
DEVICE void widen_page(bf16* to, const unsigned char* codes) {
  constexpr int PITCH = D + 8, CHUNKS = D / 8;
#pragma unroll 4
  for (int i = int(threadIdx.x); i < PAGE_TOKENS * CHUNKS; i += THREADS) {
    Words2 in = *reinterpret_cast<const Words2*>(codes + i * 8);
    Words4 out;
    widen(in.w[0], out.w[0], out.w[1]);
    widen(in.w[1], out.w[2], out.w[3]);
    store16(to + i / CHUNKS * PITCH + i % CHUNKS * 8, out);
  }
}

// The tile of rows that is the index-th of the step's sequences first..: sequence by sequence, and in one the last rows
// first, since they have the most to do. By whole warps. Returns whether there is one.
DEVICE bool find_tile(const int* starts, int first, int sequences, int group, int tile_rows, int index, int& sequence,
                      int& tile) {
  int lane = int(threadIdx.x) & 31;
  for (int base = first; base < first + sequences; base += WARP) {
    int length = base + lane < first + sequences ? starts[base + lane + 1] - starts[base + lane] : 0;
    int tiles = length > 0 ? CEIL_DIV(length * group, tile_rows) : 0, upto = tiles;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
      int before = __shfl_up_sync(ALL_LANES, upto, by);
      if (lane >= by) upto += before;
    }
    unsigned past = __ballot_sync(ALL_LANES, upto > index);
    if (past != 0) {
      int at = __ffs(int(past)) - 1;
      sequence = base + at;
      tile = __shfl_sync(ALL_LANES, upto, at) - 1 - index;
      return tile >= 0;
    }
    index -= __shfl_sync(ALL_LANES, upto, WARP - 1);
  }
  return false;
}

// One block's rows, and which of its pages and tokens each warp sees.
template <class KV, int D, int WARPS>
struct PrefillBlock {
  using Layout = PrefillLayout<D, WARPS>;
  Sequences all;
  int sequence, kv_head;
  int end;  // tokens the block's last row sees
  int lane, warp;
  int position[2];          // of this lane's rows g and g + 8
  int earliest, latest;     // of this warp's rows; latest is -1 where it has none

  METHOD void copy(unsigned char* shared, const KV* cache, int page, int index) const {
    int count = page < 0 ? 0 : end - index * PAGE_TOKENS;
    constexpr int PITCH_BYTES = sizeof(KV) == 1 ? D : Layout::PITCH * 2;
    copy_tokens<PAGE_TOKENS, D * int(sizeof(KV)), PITCH_BYTES, Layout::THREADS>(
        shared, tokens_of<KV, D>(cache, page, all.kv_heads, kv_head), unsigned(all.kv_heads) * D * unsigned(sizeof(KV)),
        count);
  }

  // Whether this warp has to look at a page.
  METHOD bool sees(int page, int index) const { return page >= 0 && index * PAGE_TOKENS <= latest; }

  // Scores to weights, and the accumulators to the new maximum.
  METHOD void weigh(uint32_t (&p)[4][4], float (&s)[8][4], float (&acc)[D / 8][4], Running& running, int index,
                    const float (&scale)[2]) const {
    int first = index * PAGE_TOKENS;
    if (first + PAGE_TOKENS - 1 > earliest) {
#pragma unroll
      for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (first + n * 8 + lane % 4 * 2 + e % 2 > position[e / 2]) s[n][e] = minus_infinity();
        }
      }
    }
    using In = Operands<sizeof(KV) == 1>;
    running.add<In::BIAS>(s, acc, scale);
    pack_weights<In>(p, s);
  }
};

// Rows of sequences first.. of the step, which has `tokens` rows; block x = tile * kv_heads + kv head. `qkv_cols` elements
// lie between rows of qkv, head h's query is at column 2 h D.
template <class KV, int D, int WARPS, int STAGES>
DEVICE void prefill(bf16* out, const bf16* qkv, const KV* k, const KV* v, const int* starts, Sequences all, int tokens,
                    int first, int sequences, int qkv_cols, float scale, float v_scale) {
  using Layout = PrefillLayout<D, WARPS>;
  constexpr int ROWS = Layout::ROWS, THREADS = Layout::THREADS, PITCH = Layout::PITCH;
  constexpr bool CODES = sizeof(KV) == 1;
  using In = Operands<CODES>;
  DYNAMIC_SHARED(memory);

  PrefillBlock<KV, D, WARPS> b;
  b.all = all;
  b.kv_head = int(blockIdx.x % unsigned(all.kv_heads));
  int group = all.group, tile;
  if (!find_tile(starts, first, sequences, group, ROWS, int(blockIdx.x / unsigned(all.kv_heads)), b.sequence, tile)) return;
  int start = starts[b.sequence], length = starts[b.sequence + 1] - start, context = all.contexts[b.sequence];
  if (start < 0 || start > tokens - length || context < 0) return;
  int rows = length * group;
  int row0 = tile * ROWS;
  rows = rows < row0 + ROWS ? rows : row0 + ROWS;  // the block's end

  b.lane = int(threadIdx.x) & 31;
  b.warp = int(threadIdx.x) >> 5;
  int64_t out_pitch = int64_t(all.kv_heads) * group * D;
  bf16* out_head = out + start * out_pitch + int64_t(b.kv_head) * group * D;

  if (all.inert(b.sequence)) {
    constexpr int CHUNKS = D / 8;
    for (int i = int(threadIdx.x); i < (rows - row0) * CHUNKS; i += THREADS) {
      int row = row0 + i / CHUNKS;
      store16(out_head + row / group * out_pitch + row % group * D + i % CHUNKS * 8, Words4{{0, 0, 0, 0}});
    }
    return;
  }

  b.end = all.visible(int64_t(context) + (rows - 1) / group + 1);
  int pages = CEIL_DIV(b.end, PAGE_TOKENS);
  int warp_row = row0 + b.warp * 16;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = warp_row + b.lane / 4 + half * 8;
    b.position[half] = context + (row < rows ? row : rows - 1) / group;
  }
  b.earliest = context + warp_row / group;
  b.latest = warp_row < rows ? context + (warp_row + 15 < rows ? warp_row + 15 : rows - 1) / group : -1;

  bf16* queries = reinterpret_cast<bf16*>(memory);
#pragma unroll 4
  for (int i = int(threadIdx.x); i < ROWS * (D / 8); i += THREADS) {
    int row = i / (D / 8), chunk = i % (D / 8), at = row0 + row;
    bool there = at < rows;
    const bf16* from = qkv + (there ? int64_t(start + at / group) * qkv_cols + (b.kv_head * group + at % group) * 2 * D : 0);
    cp_async16(queries + row * PITCH + chunk * 8, from + chunk * 8, there ? 16 : 0);
  }

  // This lane's rows for ldmatrix: of the queries (also of the values), and of the keys.
  bf16* own = queries + b.warp * 16 * PITCH;
  const bf16* q = own + b.lane % 16 * PITCH + b.lane / 16 * 8;
  int k_at = (b.lane % 8 + b.lane / 16 * 8) * PITCH + b.lane / 8 % 2 * 8;
  int v_at = b.lane % 16 * PITCH + b.lane / 16 * 8;
  unsigned char* tiles = memory + Layout::QUERIES;

  float acc[D / 8][4], s[8][4];
  uint32_t p[4][4];
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
  }
  Running running;
  running.start();
  const float scales[2] = {scale, scale};

  int page = pages > 0 ? all.page(b.sequence, 0) : -1;
  int ahead = pages > 1 ? all.page(b.sequence, 1) : -1;
  if constexpr (CODES) {
    // One tile of halves for keys and values in turn; the next codes arrive while the tile is used.
    bf16* tile = reinterpret_cast<bf16*>(tiles);
    unsigned char *k_codes = tiles + Layout::TILE, *v_codes = k_codes + Layout::CODES;
    float* factors = reinterpret_cast<float*>(v_codes + Layout::CODES);
    b.copy(k_codes, k, page, 0);
    cp_async_commit();
    b.copy(v_codes, v, page, 0);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    halve_queries<D, PITCH, ROWS, THREADS>(queries, factors);
    __syncthreads();
    factors += b.warp * 16 + b.lane / 4;
    for (int i = 0; i < pages; i++) {
      cp_async_wait<1>();
      __syncthreads();
      widen_page<D, THREADS>(tile, k_codes);
      __syncthreads();
      if (i + 1 < pages) b.copy(k_codes, k, ahead, i + 1);
      cp_async_commit();
      bool sees = b.sees(page, i);
      if (sees) {
        page_scores<In, D>(s, q, tile + k_at);
        const float scales[2] = {scale * factors[0], scale * factors[8]};
        b.weigh(p, s, acc, running, i, scales);
      }
      cp_async_wait<1>();
      __syncthreads();
      widen_page<D, THREADS>(tile, v_codes);
      __syncthreads();
      if (i + 1 < pages) b.copy(v_codes, v, ahead, i + 1);
      cp_async_commit();
      if (sees) page_values<In, D>(acc, p, tile + v_at);
      page = ahead;
      ahead = i + 2 < pages ? all.page(b.sequence, i + 2) : -1;
    }
  } else if constexpr (STAGES == 1) {
    // Values arrive while scores are computed, the next keys while values are added.
    bf16 *k_tile = reinterpret_cast<bf16*>(tiles), *v_tile = reinterpret_cast<bf16*>(tiles + Layout::TILE);
    b.copy(tiles, k, page, 0);
    cp_async_commit();
    for (int i = 0; i < pages; i++) {
      cp_async_wait<0>();
      __syncthreads();
      b.copy(tiles + Layout::TILE, v, page, i);
      cp_async_commit();
      bool sees = b.sees(page, i);
      if (sees) {
        page_scores<In, D>(s, q, k_tile + k_at);
        b.weigh(p, s, acc, running, i, scales);
      }
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < pages) b.copy(tiles, k, ahead, i + 1);
      cp_async_commit();
      if (sees) page_values<In, D>(acc, p, v_tile + v_at);
      page = ahead;
      ahead = i + 2 < pages ? all.page(b.sequence, i + 2) : -1;
    }
  } else {
    // The next page arrives while this one is used: one barrier a page, warps drift by up to a page.
    auto stage = [&](int i) { return tiles + i % 2 * 2 * Layout::TILE; };
    b.copy(stage(0), k, page, 0);
    b.copy(stage(0) + Layout::TILE, v, page, 0);
    cp_async_commit();
    for (int i = 0; i < pages; i++) {
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < pages) {
        b.copy(stage(i + 1), k, ahead, i + 1);
        b.copy(stage(i + 1) + Layout::TILE, v, ahead, i + 1);
      }
      cp_async_commit();
      if (b.sees(page, i)) {
        const bf16* tile = reinterpret_cast<const bf16*>(stage(i));
        page_scores<In, D>(s, q, tile + k_at);
        b.weigh(p, s, acc, running, i, scales);
        page_values<In, D>(acc, p, tile + Layout::TILE / 2 + v_at);
      }
      page = ahead;
      ahead = i + 2 < pages ? all.page(b.sequence, i + 2) : -1;
    }
  }

  // Out through the warp's own queries, which nobody needs any more, in whole rows.
  cp_async_wait<0>();
  __syncthreads();
  float scale0 = running.finish(0, v_scale), scale1 = running.finish(1, v_scale);
  uint32_t* to = reinterpret_cast<uint32_t*>(own + b.lane / 4 * PITCH + b.lane % 4 * 2);
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
    to[n * 4] = pack_bf16(acc[n][0] * scale0, acc[n][1] * scale0);
    to[n * 4 + 4 * PITCH] = pack_bf16(acc[n][2] * scale1, acc[n][3] * scale1);
  }
  __syncwarp();
#pragma unroll 4
  for (int i = b.lane; i < 16 * (D / 8); i += WARP) {
    int row = i / (D / 8), chunk = i % (D / 8), at = warp_row + row;
    if (at < rows) store16(out_head + at / group * out_pitch + at % group * D + chunk * 8, load16(own + row * PITCH + chunk * 8));
  }
}

#endif
