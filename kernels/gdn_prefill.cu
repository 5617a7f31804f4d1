// The gated delta rule over prompts, in chunks of 64 tokens (the chunked form of Yang, Kautz and Hatamizadeh, 2024).
//
// Per value head and chunk, c the running sum of g, S the state before, fq and fk the factors that make q and k unit vectors:
//   A[i,j] = beta_i fk_i fk_j (k_i . k_j) e^(c_i - c_j), j < i;   T = (I + A)^-1 diag(beta)
//   P[i,j] = fq_i fk_j (q_i . k_j) e^(c_i - c_j) / sqrt(dk), j <= i
//   X = T (v - diag(e^c fk) k S);  o = diag(e^c fq / sqrt(dk)) q S + P X;  S <- e^c_last S + k^T diag(fk e^(c_last - c)) X
//
// `chunk` makes T, P and the three diagonals of every (chunk, value head) of a piece, all in parallel; `scan` then walks
// the chunks of a sequence with the state in registers, and does only what depends on it. q and k are operands as they
// are in conv, since their factors are diagonals: bf16 rounds T, P, S (as an operand only), v - kS and X, and nothing else.
//
// A packed matrix is the lower triangle of 4 x 4 tiles of 16 x 16, row of tiles by row; a tile is four 8 x 8 matrices
// (rows 0.., columns 0..), (8, 0), (0, 8), (8, 8) of 128 bytes each, as ldmatrix reads them.
#include "lib/gdn.cuh"
#include "lib/ptx.cuh"

#ifndef SCAN_WARPS
#define SCAN_WARPS 4
#endif

constexpr int TILES = 4;                                   // 16 x 16 tiles along a chunk
constexpr int PACKED_BYTES = TILES * (TILES + 1) / 2 * 512;
constexpr int DIAGONAL_BYTES = (3 * CHUNK + 4) * 4;        // e^c fk; e^c fq / sqrt(dk); fk e^(c_last - c); e^c_last
constexpr int P_AT = PACKED_BYTES + DIAGONAL_BYTES;        // T, the diagonals, P: as `scan` needs them
constexpr int CHUNK_BYTES = P_AT + PACKED_BYTES;
constexpr int PITCH = HEAD + 8;                            // elements of a row of q or k in shared memory: no bank conflicts

DEVICE constexpr int tile_bytes(int row, int column) { return (row * (row + 1) / 2 + column) * 512; }

// Rows of one chunk; `rows` is 0 where there is no such chunk.
struct ChunkRows {
  int first, rows;
};

// Chunk `chunk` of the chunks of `spans` sequences, whose first rows are starts[0..=spans]. By a whole warp.
DEVICE ChunkRows chunk_rows(const int* starts, int spans, int chunk, int tokens) {
  int lane = threadIdx.x & 31;
  for (int base = 0; base < spans; base += WARP) {
    int start = 0, end = 0;
    if (base + lane < spans) start = max(starts[base + lane], 0), end = min(starts[base + lane + 1], tokens);
    int chunks = max(0, CEIL_DIV(end - start, CHUNK)), through = chunks;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
      int before = __shfl_up_sync(ALL_LANES, through, offset);
      if (lane >= offset) through += before;
    }
    unsigned past = __ballot_sync(ALL_LANES, through > chunk);
    if (past != 0) {
      int owner = __ffs(past) - 1;
      int first = start + (chunk - (through - chunks)) * CHUNK;
      first = __shfl_sync(ALL_LANES, first, owner);
      return {first, min(CHUNK, __shfl_sync(ALL_LANES, end, owner) - first)};
    }
    chunk -= __shfl_sync(ALL_LANES, through, WARP - 1);
  }
  return {0, 0};
}

// Chunks of the sequences before `span`. By a whole warp.
DEVICE int chunks_before(const int* starts, int span, int tokens) {
  int chunks = 0;
  for (int i = threadIdx.x & 31; i < span; i += WARP)
    chunks += max(0, CEIL_DIV(min(starts[i + 1], tokens) - max(starts[i], 0), CHUNK));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) chunks += __shfl_xor_sync(ALL_LANES, chunks, offset);
  return chunks;
}

// A sum in two f32, so that differences of running sums keep their digits: g may saturate far below what follows it.
struct alignas(8) Sum {
  float high, low;
};
DEVICE Sum plus(Sum a, Sum b) {
  float s = a.high + b.high, t = s - a.high;
  float rest = (a.high - (s - t)) + (b.high - t) + (a.low + b.low);
  float high = s + rest;
  return {high, rest - (high - s)};
}
// e^(later - earlier). Asked the wrong way round it may be infinite: such a value is chosen away, never multiplied away.
DEVICE float gate(Sum later, Sum earlier) {
  return __expf((later.high - earlier.high) + (later.low - earlier.low));
}

// exp(g) is 0 in f32 from -104 on; a g below this counts as this, so that -inf has finite differences.
constexpr float LOG_ZERO = -1e3f;

constexpr int CHUNK_THREADS = 128;
// Blocks of `chunk` on a multiprocessor: the small ones' shared memory holds two.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int CHUNK_BLOCKS = 2;
#else
constexpr int CHUNK_BLOCKS = 3;
#endif
constexpr int A_PITCH = CHUNK + 8, T_PITCH = CHUNK + 4;

// What `chunk` keeps of q and k until the products are in registers, and then of one value head's matrices.
struct ChunkTiles {
  bf16 q[CHUNK][PITCH], k[CHUNK][PITCH];
};
struct ChunkMatrices {
  float a[CHUNK][A_PITCH];  // a[j][i] = A[i,j], j < i
  float t[CHUNK][T_PITCH];  // (I + A)^-1; what stands right of its upper left quarter is scratch
};

// The inverse of I + A, all of whose diagonal is 1: the two diagonal quarters by forward substitution, a column per lane,
// and -T22 (A21 T11) below. In f32, sums in index order.
DEVICE void invert(ChunkMatrices& m) {
  constexpr int HALF = CHUNK / 2, ROWS = HALF / (CHUNK_THREADS / WARP);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp < 2) {
    int origin = warp * HALF;
    float t[HALF] = {};
#pragma unroll
    for (int j = 0; j < HALF; j++) {
      if (j == lane) t[j] = 1.0f;
#pragma unroll
      for (int from = (j + 1) / 4 * 4; from < HALF; from += 4) {
        float a[4];
        load_run(&m.a[origin + j][origin + from], a);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (from + i > j) t[from + i] -= a[i] * t[j];
      }
    }
#pragma unroll
    for (int i = 0; i < HALF; i++) m.t[origin + i][origin + lane] = t[i];
  }
  __syncthreads();
  int row = warp * ROWS;
  float sum[ROWS] = {};
#pragma unroll 8
  for (int j = 0; j < HALF; j++) {
    float t = m.t[j][lane], a[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
      float part[4];
      load_run(&m.a[j][HALF + row + i], part);
#pragma unroll
      for (int l = 0; l < 4; l++) a[i + l] = part[l];
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum[i] += a[i] * t;
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) m.t[row + i][HALF + lane] = sum[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROWS; i++) sum[i] = 0.0f;
#pragma unroll 2
  for (int j = 0; j < HALF; j += 4) {
    float y[4];
#pragma unroll
    for (int l = 0; l < 4; l++) y[l] = m.t[j + l][HALF + lane];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float t[4];
      load_run(&m.t[HALF + row + i][HALF + j], t);
#pragma unroll
      for (int l = 0; l < 4; l++) sum[i] -= t[l] * y[l];
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) m.t[HALF + row + i][lane] = sum[i];
  __syncthreads();
}

// This warp's 16 rows (i) and a tile's columns (j) of q k^T, gated, to a packed tile.
DEVICE void gate_p(unsigned char* to, const float (&product)[2][4], int tile, const Sum* sums, const float* q_factor,
                   const float* k_factor) {
  int lane = threadIdx.x & 31, group = lane >> 2, pair = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int i = (threadIdx.x >> 5) * 16 + r * 8 + group;
    Sum sum = sums[i];
    float factor = q_factor[i];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int j = tile * 16 + half * 8 + 2 * pair;
      float value[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float gated = product[half][2 * r + c] * (factor * k_factor[j + c] * gate(sum, sums[j + c]));
        value[c] = j + c <= i ? gated : 0.0f;
      }
      *reinterpret_cast<uint32_t*>(to + (r + 2 * half) * 128 + group * 16 + pair * 4) = pack_bf16(value[0], value[1]);
    }
  }
}

// This warp's 16 rows (j) and a tile's columns (i) of k k^T, gated.
DEVICE void gate_a(ChunkMatrices& to, const float (&product)[2][4], int tile, const Sum* sums, const float* k_factor,
                   const float* betas) {
  int lane = threadIdx.x & 31, group = lane >> 2, pair = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int j = (threadIdx.x >> 5) * 16 + r * 8 + group;
    Sum sum = sums[j];
    float factor = k_factor[j];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = tile * 16 + half * 8 + 2 * pair;
      float value[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float gated = product[half][2 * r + c] * (factor * k_factor[i + c] * betas[i + c] * gate(sums[i + c], sum));
        value[c] = i + c > j ? gated : 0.0f;
      }
      *reinterpret_cast<Words2*>(&to.a[j][i]) = {f32_bits(value[0]), f32_bits(value[1])};
    }
  }
}

// T, P and the diagonals of the chunks of a piece, heads of 128 x 128. Grid: (value heads / heads_per_block, chunks); the
// heads of a block share a key head. The matrices of chunk y and head h are at work + (y * value_heads + h) * CHUNK_BYTES.
// Nothing is let begin meanwhile: the scan has fewer blocks than a card multiprocessors, and they would crowd on those first free.
KERNEL LAUNCH_BOUNDS(CHUNK_THREADS, CHUNK_BLOCKS)
chunk_bf16(const bf16* conv, const float* g, const float* beta, const int* starts, unsigned char* work, int spans,
           int first_chunk, int tokens, int key_heads, int value_heads, int heads_per_block) {
  wait_for_earlier_kernels();
  __shared__ __align__(16) unsigned char shared[sizeof(ChunkMatrices) > sizeof(ChunkTiles) ? sizeof(ChunkMatrices) : sizeof(ChunkTiles)];
  __shared__ float q_factor[CHUNK], k_factor[CHUNK], betas[CHUNK];
  __shared__ Sum sums[CHUNK];
  ChunkTiles& tiles = *reinterpret_cast<ChunkTiles*>(shared);
  ChunkMatrices& matrices = *reinterpret_cast<ChunkMatrices*>(shared);
  Heads heads{key_heads, value_heads, HEAD, HEAD};
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  ChunkRows chunk = chunk_rows(starts, spans, first_chunk + blockIdx.y, tokens);
  if (chunk.rows <= 0) return;
  int first_head = blockIdx.x * heads_per_block;

  for (int i = thread; i < CHUNK * (HEAD / 8); i += CHUNK_THREADS) {
    int row = i / (HEAD / 8), part = i % (HEAD / 8) * 8, bytes = row < chunk.rows ? 16 : 0;
    const bf16* source = conv + (chunk.first + (row < chunk.rows ? row : 0)) * channels(heads) + part;
    cp_async16(&tiles.q[row][part], source + q_column(heads, first_head), bytes);
    cp_async16(&tiles.k[row][part], source + k_column(heads, first_head), bytes);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  {
    int row = threadIdx.x % CHUNK;
    const bf16* x = threadIdx.x < CHUNK ? tiles.k[row] : tiles.q[row];
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < HEAD; i += 4) {
      float part[4];
      load_run(x + i, part);
#pragma unroll
      for (int j = 0; j < 4; j++) sum += part[j] * part[j];
    }
    float factor = 1.0f / sqrtf(sum + L2_EPS);
    if (thread < CHUNK) k_factor[row] = row < chunk.rows ? factor : 0.0f;
    else q_factor[row] = row < chunk.rows ? factor / sqrtf(float(HEAD)) : 0.0f;
  }

  // Warp w has 16 rows of both products, where their triangles are: q k^T left of and on the diagonal, k k^T (whose rows
  // are j here, so that A is stored transposed) on it and right of it. Column pair w of q k^T has the place at the end.
  float product[TILES + 1][2][4] = {};
  int a_row = (lane & 15), a_column = (lane >> 4) * 8;
  int b_row = (lane & 7) + (lane >> 4) * 8, b_column = (lane >> 3 & 1) * 8;
#pragma unroll
  for (int depth = 0; depth < HEAD; depth += 16) {
    uint32_t q[4], k[4];
    ldmatrix_x4(q, &tiles.q[warp * 16 + a_row][depth + a_column]);
    ldmatrix_x4(k, &tiles.k[warp * 16 + a_row][depth + a_column]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      uint32_t b[4];
      ldmatrix_x4(b, &tiles.k[tile * 16 + b_row][depth + b_column]);
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = tile < warp ? q[i] : k[i];
      mma_bf16(product[tile][0], a, {b[0], b[1]});
      mma_bf16(product[tile][1], a, {b[2], b[3]});
      if (tile == warp) {
        mma_bf16(product[TILES][0], q, {b[0], b[1]});
        mma_bf16(product[TILES][1], q, {b[2], b[3]});
      }
    }
  }

  for (int head = first_head; head < first_head + heads_per_block; head++) {
    unsigned char* to = work + (int64_t(blockIdx.y) * value_heads + head) * CHUNK_BYTES;
    __syncthreads();
    if (warp == 0) {
      // Lane l has rows 2l and 2l + 1; the scan's order is fixed.
      float part[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        int64_t at = int64_t(chunk.first + row) * value_heads + head;
        float log_decay = row < chunk.rows ? g[at] : 0.0f;
        part[i] = log_decay < LOG_ZERO ? LOG_ZERO : log_decay;
        betas[row] = row < chunk.rows ? beta[at] : 0.0f;
      }
      Sum one{part[0], 0.0f}, two = plus(one, {part[1], 0.0f}), through = two;
#pragma unroll
      for (int offset = 1; offset < WARP; offset *= 2) {
        Sum before{__shfl_up_sync(ALL_LANES, through.high, offset), __shfl_up_sync(ALL_LANES, through.low, offset)};
        if (lane >= offset) through = plus(before, through);
      }
      Sum before{__shfl_up_sync(ALL_LANES, through.high, 1), __shfl_up_sync(ALL_LANES, through.low, 1)};
      if (lane > 0) one = plus(before, one);
      sums[2 * lane] = one;
      sums[2 * lane + 1] = through;
    }
    __syncthreads();

    if (thread < CHUNK) {
      float* diagonal = reinterpret_cast<float*>(to + PACKED_BYTES);
      float from_start = gate(sums[thread], {0.0f, 0.0f});
      float to_end = gate(sums[CHUNK - 1], sums[thread]);
      diagonal[thread] = from_start * k_factor[thread];
      diagonal[CHUNK + thread] = from_start * q_factor[thread];
      diagonal[2 * CHUNK + thread] = to_end * k_factor[thread];
      if (thread < 4) diagonal[3 * CHUNK + thread] = gate(sums[CHUNK - 1], {0.0f, 0.0f});
    }
    // Both triangles get their gates.
    unsigned char* p = to + P_AT;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      if (tile < warp) gate_p(p + tile_bytes(warp, tile), product[tile], tile, sums, q_factor, k_factor);
      else gate_a(matrices, product[tile], tile, sums, k_factor, betas);
    }
    gate_p(p + tile_bytes(warp, warp), product[TILES], warp, sums, q_factor, k_factor);
    __syncthreads();
    invert(matrices);
    for (int i = thread; i < PACKED_BYTES / 16; i += CHUNK_THREADS) {
      int tile = i / 32, row_tile = (tile > 0) + (tile > 2) + (tile > 5);
      int column = (tile - row_tile * (row_tile + 1) / 2) * 16 + (i >> 4 & 1) * 8;
      const float* row = &matrices.t[row_tile * 16 + (i >> 3 & 1) * 8 + (i & 7)][column];
      float x[4], y[4];
      load_run(row, x);
      load_run(row + 4, y);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] *= betas[column + j], y[j] *= betas[column + 4 + j];
      store16(to + i * 16, {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])});
    }
  }
}
EXPORT(chunk_bf16)

constexpr int SCAN_THREADS = SCAN_WARPS * WARP;
constexpr int SCAN_COLUMNS = SCAN_WARPS * 16;       // columns of the state a block has, 16 a warp
constexpr int V_PITCH = SCAN_COLUMNS + 8;

// Of two chunks: q and k are needed first and are on their way for a whole chunk. The rest is fetched once the chunk before
// is done with it, and is needed later.
struct ScanShared {
  bf16 q[2][CHUNK][PITCH], k[2][CHUNK][PITCH];
  bf16 v[CHUNK][V_PITCH];
  unsigned char t[PACKED_BYTES];
  float diagonal[DIAGONAL_BYTES / 4];
  unsigned char p[PACKED_BYTES];
};

// The lower triangle's tile as two operands of 8 columns each (or its rows as one operand of 16 rows).
DEVICE void load_tile(uint32_t (&r)[4], const unsigned char* packed, int row, int column) {
  ldmatrix_x4(r, packed + tile_bytes(row, column) + (threadIdx.x & 31) * 16);
}

// Four accumulators of 16 columns of a transposed product, as the operand whose depth those columns are.
DEVICE void pack_tile(uint32_t (&r)[4], const float (&left)[4], const float (&right)[4]) {
  r[0] = pack_bf16(left[0], left[1]);
  r[1] = pack_bf16(left[2], left[3]);
  r[2] = pack_bf16(right[0], right[1]);
  r[3] = pack_bf16(right[2], right[3]);
}

// A warp's 16 columns of a state, transposed: s[n] is rows 8n.. of S, as accumulators have them.
template <class S>
DEVICE void load_state(float (&s)[16][4], const S* from) {
  from += (threadIdx.x & 3) * 2 * HEAD + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int n = 0; n < 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = to_f32(from[(8 * n + i % 2) * HEAD + i / 2 * 8]);
  }
}
template <class S>
DEVICE void store_state(S* to, const float (&s)[16][4]) {
  to += (threadIdx.x & 3) * 2 * HEAD + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int n = 0; n < 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[(8 * n + i % 2) * HEAD + i / 2 * 8] = round_to<S>(s[n][i]);
  }
}

// COLUMNS of a chunk's rows, `pitch` apart, to shared memory; rows from `left` on are zeros and are not read. `source` and
// `target` are this thread's own first 16 bytes.
template <int COLUMNS>
DEVICE void copy_rows(bf16* target, int target_pitch, const bf16* source, int pitch, int left) {
  constexpr int STEP = SCAN_THREADS * 8 / COLUMNS;
  int row = int(threadIdx.x) * 8 / COLUMNS;
#pragma unroll
  for (int i = 0; i < CHUNK / STEP; i++) {
    cp_async16(target + i * STEP * target_pitch, source, row + i * STEP < left ? 16 : 0);
    source += int64_t(STEP) * pitch;
  }
}
template <int BYTES>
DEVICE void copy_flat(unsigned char* target, const unsigned char* source) {
  constexpr int STEP = SCAN_THREADS * 16;
  int at = threadIdx.x * 16;
  target += at;
  source += at;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; i++) cp_async16(target + i * STEP, source + i * STEP);
  if (at < BYTES % STEP) cp_async16(target + BYTES / STEP * STEP, source + BYTES / STEP * STEP);
}

// The chunks first_chunk .. first_chunk + piece_chunks of all, heads of 128 x 128. Grid: (parts of dv, value heads,
// sequences). A warp has 16 columns of the state for itself, as S^T [16, 128] in accumulators, and meets the others only
// where they share what was copied. A sequence that goes on in the next piece leaves its state in `carry_out` and finds it
// in `carry_in` (f32, of one sequence: only one can straddle), or in slot_out where those are null: exact in f32.
template <class S>
DEVICE void scan(const bf16* conv, const unsigned char* work, S* state, const float* carry_in, float* carry_out,
                 const int* starts, const int* contexts, const int* slot_in, const int* slot_out, bf16* out,
                 int first_chunk, int piece_chunks, int tokens, int slots, int key_heads, int value_heads) {
  DYNAMIC_SHARED(shared_bytes);
  ScanShared& shared = *reinterpret_cast<ScanShared*>(shared_bytes);
  Heads heads{key_heads, value_heads, HEAD, HEAD};
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = lane >> 2, pair = lane & 3;
  int head = blockIdx.y, span = blockIdx.z, part = blockIdx.x * SCAN_COLUMNS, column = part + warp * 16;

  int start = max(starts[span], 0), end = min(starts[span + 1], tokens);
  if (end <= start) return;
  int before = chunks_before(starts, span, tokens), chunks = CEIL_DIV(end - start, CHUNK);
  int from = max(first_chunk - before, 0), to = min(first_chunk + piece_chunks - before, chunks);
  if (from >= to) return;
  Place place = place_of(slot_in[span], slot_out[span], slots);
  if (!place.runs) {
    int last = min(start + to * CHUNK, end);
    for (int row = start + from * CHUNK + warp; row < last; row += SCAN_WARPS)
      for (int c = lane; c < SCAN_COLUMNS; c += WARP)
        out[row * value_width(heads) + int64_t(head) * HEAD + part + c] = to_bf16(place.fill);
    return;
  }

  // Where this thread copies from, at the chunk at hand; what is fetched lies `ahead` of it.
  constexpr int ROW_PARTS = HEAD / 8, V_PARTS = SCAN_COLUMNS / 8;
  int pitch = int(channels(heads)), left = end - start - from * CHUNK, todo = to - from;
  int k_row = thread / ROW_PARTS, k_at = thread % ROW_PARTS * 8, v_row = thread / V_PARTS, v_at = thread % V_PARTS * 8;
  const bf16* row = conv + int64_t(end - left) * pitch;
  const bf16* q_source = row + int64_t(k_row) * pitch + q_column(heads, head) + k_at;
  const bf16* v_source = row + int64_t(v_row) * pitch + v_column(heads, head) + part + v_at;
  const unsigned char* matrices = work + (int64_t(before + from - first_chunk) * value_heads + head) * CHUNK_BYTES;
  auto fetch_first = [&](int ahead) {
    if (ahead < todo) {
      int stage = (todo - ahead) & 1;
      const bf16* source = q_source + int64_t(ahead * CHUNK) * pitch;
      copy_rows<HEAD>(&shared.q[stage][k_row][k_at], PITCH, source, pitch, left - ahead * CHUNK);
      copy_rows<HEAD>(&shared.k[stage][k_row][k_at], PITCH, source + key_heads * HEAD, pitch, left - ahead * CHUNK);
    }
    cp_async_commit();
  };
  auto fetch_rest = [&](int ahead) {
    if (ahead < todo) {
      const bf16* source = v_source + int64_t(ahead * CHUNK) * pitch;
      copy_rows<SCAN_COLUMNS>(&shared.v[v_row][v_at], V_PITCH, source, pitch, left - ahead * CHUNK);
      copy_flat<CHUNK_BYTES>(shared.t, matrices + int64_t(ahead * CHUNK_BYTES) * value_heads);
    }
    cp_async_commit();
  };
  fetch_first(0);
  fetch_rest(0);

  float s[16][4] = {};
  int at = head * HEAD * HEAD + column;
  if (from > 0 && carry_in != nullptr) load_state(s, carry_in + at);
  else if (from > 0) load_state(s, state + slot_out[span] * state_len(heads) + at);
  else if (contexts[span] != 0) load_state(s, state + slot_in[span] * state_len(heads) + at);

  // Addresses of ldmatrix's rows: the operand's rows first, then its depth; and the other way round.
  int a_row = lane & 15, a_column = (lane >> 4) * 8;
  int b_row = (lane & 7) + (lane >> 4) * 8, b_column = (lane >> 3 & 1) * 8;

  bf16* o_rows = out + int64_t(end - left + group) * value_heads * HEAD + int64_t(head) * HEAD + column + (pair & 1) * 8 + (pair >> 1) * 4;
  for (; todo > 0; todo--) {
    const bf16 (*q)[PITCH] = shared.q[todo & 1];
    const bf16 (*k)[PITCH] = shared.k[todo & 1];
    cp_async_wait<1>();
    __syncthreads();
    fetch_first(1);

    // (k S)^T, and q S with rows of tokens: the state as an operand from the left, and the same registers from the right.
    float y[8][4] = {}, o[TILES][2][4] = {};
#pragma unroll
    for (int depth = 0; depth < 8; depth++) {
      uint32_t state_tile[4];
      pack_tile(state_tile, s[2 * depth], s[2 * depth + 1]);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        uint32_t b[4];
        ldmatrix_x4(b, &k[n * 16 + b_row][depth * 16 + b_column]);
        mma_bf16(y[2 * n], state_tile, {b[0], b[1]});
        mma_bf16(y[2 * n + 1], state_tile, {b[2], b[3]});
      }
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        uint32_t a[4];
        ldmatrix_x4(a, &q[m * 16 + a_row][depth * 16 + a_column]);
        mma_bf16(o[m][0], a, {state_tile[0], state_tile[2]});
        mma_bf16(o[m][1], a, {state_tile[1], state_tile[3]});
      }
    }
    cp_async_wait<1>();
    __syncthreads();

    // (v - e^c fk k S)^T.
    uint32_t rest[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, &shared.v[n * 16 + b_row][warp * 16 + b_column]);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* e = &shared.diagonal[n * 16 + half * 8 + 2 * pair];
        float (&x)[4] = y[2 * n + half];
        x[0] = bf16_low(v[2 * half]) - e[0] * x[0];
        x[1] = bf16_high(v[2 * half]) - e[1] * x[1];
        x[2] = bf16_low(v[2 * half + 1]) - e[0] * x[2];
        x[3] = bf16_high(v[2 * half + 1]) - e[1] * x[3];
      }
      pack_tile(rest[n], y[2 * n], y[2 * n + 1]);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float e = shared.diagonal[CHUNK + m * 16 + half * 8 + group];
#pragma unroll
        for (int n = 0; n < 2; n++) o[m][n][2 * half] *= e, o[m][n][2 * half + 1] *= e;
      }
    }
    // X^T, and P X.
    float x[8][4] = {};
#pragma unroll
    for (int depth = 0; depth < TILES; depth++) {
#pragma unroll
      for (int row = depth; row < TILES; row++) {
        uint32_t b[4];
        load_tile(b, shared.t, row, depth);
        mma_bf16(x[2 * row], rest[depth], {b[0], b[2]});
        mma_bf16(x[2 * row + 1], rest[depth], {b[1], b[3]});
      }
    }
    uint32_t update[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) pack_tile(update[n], x[2 * n], x[2 * n + 1]);
#pragma unroll
    for (int depth = 0; depth < TILES; depth++) {
#pragma unroll
      for (int m = depth; m < TILES; m++) {
        uint32_t a[4];
        load_tile(a, shared.p, m, depth);
        mma_bf16(o[m][0], a, {update[depth][0], update[depth][2]});
        mma_bf16(o[m][1], a, {update[depth][1], update[depth][3]});
      }
    }
    // Neighbouring lanes swap halves, so that four lanes write a row's 32 bytes at once.
#pragma unroll
    for (int m = 0; m < 2 * TILES; m++) {
      const float (&rows)[2][4] = o[m / 2];
      uint32_t near = pack_bf16(rows[0][m % 2 * 2], rows[0][m % 2 * 2 + 1]);
      uint32_t far = pack_bf16(rows[1][m % 2 * 2], rows[1][m % 2 * 2 + 1]);
      bool odd = pair & 1;
      uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? near : far, 1);
      if (m * 8 + group < left) *reinterpret_cast<Words2*>(o_rows) = odd ? Words2{other, far} : Words2{near, other};
      o_rows += value_heads * (8 * HEAD);
    }
    // S^T <- e^c_last S^T + (fk e^(c_last - c) X)^T k.
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float* e = &shared.diagonal[2 * CHUNK + n * 8 + 2 * pair];
      x[n][0] *= e[0], x[n][1] *= e[1], x[n][2] *= e[0], x[n][3] *= e[1];
    }
#pragma unroll
    for (int n = 0; n < 4; n++) pack_tile(update[n], x[2 * n], x[2 * n + 1]);
    float decay = shared.diagonal[3 * CHUNK];
    __syncthreads();
    fetch_rest(1);
#pragma unroll
    for (int n = 0; n < 16; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= decay;
    }
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, &k[depth * 16 + a_row][n * 16 + a_column]);
        mma_bf16(s[2 * n], update[depth], {b[0], b[1]});
        mma_bf16(s[2 * n + 1], update[depth], {b[2], b[3]});
      }
    }
    q_source += int64_t(CHUNK) * pitch;
    v_source += int64_t(CHUNK) * pitch;
    matrices += int64_t(CHUNK_BYTES) * value_heads;
    left -= CHUNK;
  }

  if (left > 0 && carry_out != nullptr) store_state(carry_out + at, s);
  else store_state(state + slot_out[span] * state_len(heads) + at, s);
}

// Heads of any size and activations of any type: token by token, all of a sequence at once. Grid: (warps of RULE_COLUMNS
// columns, value heads, sequences); rule_floats of shared memory a warp.
template <class T, class S>
DEVICE void any(const T* conv, const float* g, const float* beta, S* state, const int* starts, const int* contexts,
                const int* slot_in, const int* slot_out, T* out, int tokens, int slots, int key_heads, int value_heads,
                int key_dim, int value_dim) {
  DYNAMIC_SHARED(shared);
  Heads heads{key_heads, value_heads, key_dim, value_dim};
  int warp = threadIdx.x >> 5, head = blockIdx.y, span = blockIdx.z;
  int column = (blockIdx.x * (blockDim.x >> 5) + warp) * RULE_COLUMNS;
  int first = max(starts[span], 0), count = min(starts[span + 1], tokens) - first;
  if (column >= value_dim || count <= 0) return;
  Place place = place_of(slot_in[span], slot_out[span], slots);
  if (!place.runs) {
    rule_fill(heads, out, head, column, first, count, place.fill);
    return;
  }
  const S* from = contexts[span] == 0 ? nullptr : state + slot_in[span] * state_len(heads);
  rule(heads, conv, g, beta, from, state + slot_out[span] * state_len(heads), out, head, column, first, count,
       reinterpret_cast<float*>(shared) + warp * rule_floats(key_dim));
}

#define SCAN(S)                                                                                                        \
  KERNEL LAUNCH_BOUNDS(SCAN_THREADS) scan_bf16_##S(                                                                    \
      const bf16* conv, const unsigned char* work, ELEMENT_##S* state, const float* carry_in, float* carry_out,        \
      const int* starts, const int* contexts, const int* slot_in, const int* slot_out, bf16* out, int first_chunk,     \
      int piece_chunks, int tokens, int slots, int key_heads, int value_heads) {                                       \
    after_earlier_kernels();                                                                                           \
    scan(conv, work, state, carry_in, carry_out, starts, contexts, slot_in, slot_out, out, first_chunk, piece_chunks,  \
         tokens, slots, key_heads, value_heads);                                                                       \
  }                                                                                                                    \
  EXPORT(scan_bf16_##S)
#define ANY(T, S)                                                                                                      \
  KERNEL any_##T##_##S(const ELEMENT_##T* conv, const float* g, const float* beta, ELEMENT_##S* state,                 \
                       const int* starts, const int* contexts, const int* slot_in, const int* slot_out,                \
                       ELEMENT_##T* out, int tokens, int slots, int key_heads, int value_heads, int key_dim,           \
                       int value_dim) {                                                                                \
    after_earlier_kernels();                                                                                           \
    any(conv, g, beta, state, starts, contexts, slot_in, slot_out, out, tokens, slots, key_heads, value_heads,         \
        key_dim, value_dim);                                                                                           \
  }                                                                                                                    \
  EXPORT(any_##T##_##S)

#define ELEMENT_f32 float
#define ELEMENT_bf16 bf16
SCAN(f32)
SCAN(bf16)
ANY(f32, f32)
ANY(f32, bf16)
ANY(bf16, f32)
ANY(bf16, bf16)
