// Products X W^T on tensor cores by mma.sync: tokens X [M, K], a weight W [N, K] in any stored form, one tile of the result
// per block. The same code from one token (weight streaming) to thousands; archs from sm_80 on.
//
// How to use it (kernels/fp8_gemm.cu through `project` below; kernels/moe.cu with gathered rows):
//
//   using G = Gemm<Tile<R, TM, WN, WM, WK, SLICE, STAGES>, X_FORM, W_FORM, BLOCKED>;
//   KERNEL LAUNCH_BOUNDS(G::THREADS, G::BLOCKS_PER_SM) name(...) {        // dynamic shared memory: G::SHARED bytes
//     DYNAMIC_SHARED(shared);
//     G::run(shared, x, w, K);            // every thread of the block; barriers inside
//     G::finish(shared, tokens, out);     // or: any loop over G::sum4(shared, token, n, v)
//   }
//
// x and w are types of the caller's for which these functions are found; `row` counts from the tile's first row:
//   bool has_row(const Rows&, int row)                        asked before the next two
//   const uint8_t* codes_of(const Rows&, int row)             the row's first byte, multiple of 16
//   const uint8_t* scales_of(const Rows&, int row)            NVFP4: its first e4m3 scale, multiple of 4
//   float block_scale(const Rows&, int row, int block)        BLOCKED: of 128 columns; must answer for missing rows too
// `Rows` below is dense rows one pitch apart. A missing row's results are undefined, those of others never depend on it.
// out is a type for which `store4(const Out&, int token, int n, const float (&v)[4])` is found: four results of
// neighbouring n, tile rows; it applies scales and bounds. NVFP4 operands leave 2^-9 each in the sums (NVFP4_UNSHIFT).
//
// Needs: K % 16 == 0; K % 64 == 0 where an operand is NVFP4. x is FORM_BF16 with any weight, FORM_FP8 with FP8 weights or
// FORM_NVFP4 with NVFP4 weights. BLOCKED (either operand FP8 with scales of 128 columns): SLICE 128.
//
// The tile: a warp holds R x 16 weight rows by TM x 8 tokens (weights are the mma's 16 rows, tokens its 8 columns); WN
// warps side by side along N, WM along M, and WK that split K. A stage of the cp.async ring holds WK slices; a slice is
// SLICE bytes (64 or 128) of each weight row and the same K of each token.
//
// Which K an mma multiplies is free as long as both operands agree. Lane (g, t) reads 16 contiguous bytes of weight row g,
// its piece, and takes four elements of it for each mma; the tokens' bytes for the same K lie together too, in RATIO pieces.
// Every read of shared memory is then one of 16 bytes without bank conflicts (see `swizzle`), whatever the form.
//
// The order of an element's sum: the pieces of warp wk's slices (slice wk, wk + WK, ...) in rising K, then wk = 0 .. WK - 1.
// R, TM, WN, WM, SLICE and STAGES do not enter, neither does M: with WK fixed, results are the same bits in any batch.
#ifndef LIB_GEMM
#define LIB_GEMM
#include "lib/operand.cuh"

// Archs that multiply e4m3 themselves in mma.sync; others (and the emulator) convert to half, exactly, and multiply that.
#ifndef NATIVE_E4M3
#if !defined(HIGHWATER_EMULATE) && defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define NATIVE_E4M3 1
#else
#define NATIVE_E4M3 0
#endif
#endif

template <int R_, int TM_, int WN_, int WM_, int WK_, int SLICE_, int STAGES_>
struct Tile {
  static constexpr int R = R_, TM = TM_, WN = WN_, WM = WM_, WK = WK_, SLICE = SLICE_, STAGES = STAGES_;
  static constexpr int BN = 16 * R * WN, BM = 8 * TM * WM;
  static constexpr int THREADS = 32 * WN * WM * WK;
  static_assert(SLICE == 64 || SLICE == 128, "a slice is 64 or 128 bytes");
  static_assert(STAGES >= 2, "one stage loads while another is used");
};

// A tile's numbers packed in one: R, TM, WN, WM, WK, SLICE / 64, STAGES, four bits each from the lowest; TM is in bits 4-8.
template <unsigned PACKED>
using PackedTile = Tile<(PACKED & 15), (PACKED >> 4 & 31), (PACKED >> 9 & 15), (PACKED >> 13 & 15), (PACKED >> 17 & 15),
                        64 * (PACKED >> 21 & 3), (PACKED >> 23 & 15)>;

// Rows one pitch apart.
struct Rows {
  const uint8_t* codes;      // of the tile's first row
  int pitch;                 // bytes
  int scale_pitch;           // bytes; of `blocks`, floats
  const uint8_t* scales;     // NVFP4: e4m3 of the tile's first row
  const float* blocks;       // f32 of blocks, of the grid's first row; null where there are none
  int first;                 // the tile's first row in the whole matrix: where its blocks are
  int segment_rows;          // rows after which blocks start anew
  int count;                 // rows from the tile's first on
};
DEVICE bool has_row(const Rows& rows, int row) { return row < rows.count; }
DEVICE const uint8_t* codes_of(const Rows& rows, int row) { return rows.codes + int64_t(row) * rows.pitch; }
DEVICE const uint8_t* scales_of(const Rows& rows, int row) { return rows.scales + int64_t(row) * rows.scale_pitch; }
DEVICE float block_scale(const Rows& rows, int row, int block) {
  if (rows.blocks == nullptr) return 1.0f;
  if (row >= rows.count) return 0.0f;
  return rows.blocks[int64_t(block_row(rows.first + row, rows.segment_rows)) * rows.scale_pitch + block];
}

// Where a thread reads: its unit of rows FIRST, FIRST + PASS, ..., moving along K. This form asks a source for every row
// once; dense rows need one address.
template <class Source, bool SCALES, int COUNT, int PASS>
struct Cursor {
  const uint8_t* at[COUNT];
  uint32_t present;
  DEVICE Cursor start(const Source& rows, int first, int offset, int end) {
    Cursor c;
    c.present = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      bool present = first + i * PASS < end && has_row(rows, first + i * PASS);
      c.at[i] = nullptr;
      if (present) c.at[i] = (SCALES ? scales_of(rows, first + i * PASS) : codes_of(rows, first + i * PASS)) + offset;
      c.present |= uint32_t(present) << i;
    }
    return c;
  }
  DEVICE bool has(const Cursor& c, int i) { return c.present >> i & 1; }
  DEVICE const uint8_t* row(const Cursor& c, int i) { return c.at[i]; }
  DEVICE void advance(Cursor& c, int bytes) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) c.at[i] += bytes;
  }
};
template <bool SCALES, int COUNT, int PASS>
struct Cursor<Rows, SCALES, COUNT, PASS> {
  const uint8_t* at;
  int pitch, left;  // rows from `at` on
  DEVICE Cursor start(const Rows& rows, int first, int offset, int end) {
    int left = (rows.count < end ? rows.count : end) - first;
    return Cursor{(SCALES ? scales_of(rows, first) : codes_of(rows, first)) + offset,
                  SCALES ? rows.scale_pitch : rows.pitch, left};
  }
  DEVICE bool has(const Cursor& c, int i) { return i * PASS < c.left; }
  DEVICE const uint8_t* row(const Cursor& c, int i) { return c.at + int64_t(i * PASS) * c.pitch; }
  DEVICE void advance(Cursor& c, int bytes) { c.at += bytes; }
};

// Where 16-byte chunk c of a row goes. Eight lanes read together: two rows g (even, odd) by four lanes t, which are RATIO
// chunks apart; the result modulo 8 differs for all eight. Within a row it permutes aligned groups of eight (four) chunks.
template <int RATIO, int CHUNKS>
DEVICE int swizzle(int row, int c) {
  if constexpr (RATIO == 4) {
    return c ^ (c >> 3 & 1) ^ (row & 1) << 1;
  } else if constexpr (RATIO == 2) {
    return c ^ (row & 1);
  } else if constexpr (CHUNKS >= 8) {
    return c ^ (row & 1) << 2;
  } else {
    return c;  // rows of 64 bytes: two of them are 128 neighbouring bytes
  }
}

template <class T, int X, int W, bool BLOCKED>
struct Gemm {
  static constexpr int R = T::R, TM = T::TM, WN = T::WN, WM = T::WM, WK = T::WK, STAGES = T::STAGES;
  static constexpr int BN = T::BN, BM = T::BM, THREADS = T::THREADS;
  static_assert(X == FORM_BF16 || X == W, "x is bf16, or quantised as the weight is");
  static_assert(W == FORM_BF16 || W == FORM_FP8 || W == FORM_NVFP4, "blocks are asked for by BLOCKED");
  static_assert(!BLOCKED || (W == FORM_FP8 && T::SLICE == FP8_BLOCK), "a slice is one block");
  static constexpr bool HALF_TYPE = X == FORM_FP8;
  static constexpr bool NATIVE = HALF_TYPE && NATIVE_E4M3;
  // Sums go over to f32 registers after every slice: for the scales of blocks, and where the unit's own sums are short.
  static constexpr bool PROMOTED = BLOCKED || NATIVE;
  static constexpr int RATIO = Piece<W>::ELEMENTS / Piece<X>::ELEMENTS;
  static constexpr int W_ROW = T::SLICE, X_ROW = T::SLICE * RATIO;  // bytes of a row in a slice
  static constexpr int SCALE_ROW = T::SLICE / 8;                   // bytes of NVFP4 scales
  static constexpr int W_SCALES = BN * W_ROW;
  static constexpr int X_CODES = W_SCALES + (W == FORM_NVFP4 ? BN * SCALE_ROW : 0);
  static constexpr int X_SCALES = X_CODES + BM * X_ROW;
  static constexpr int SLICE_BYTES = X_SCALES + (X == FORM_NVFP4 ? BM * SCALE_ROW : 0);
  static constexpr int STAGE_BYTES = WK * SLICE_BYTES;
  // The sums on their way out: WK copies of [BM, BN], in the ring's place.
  static constexpr int SUM_PITCH = BN + 4;
  static constexpr int SUM_BYTES = 4 * WK * BM * SUM_PITCH;
  static constexpr int SHARED = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
  static constexpr int MMAS = NATIVE ? 2 : Piece<X>::ELEMENTS / 4;  // by a piece of x
  // What a warp has in registers at a time: its sums, the weights of RUN mmas, TOGETHER x 8 tokens. With many sums there is
  // room for few weights.
  static constexpr int SUMS = 4 * R * TM * (PROMOTED ? 2 : 1);
  static constexpr int RUN = SUMS >= 128 ? (MMAS < 4 ? 1 : 2) : (MMAS < 4 ? MMAS : 4);
  static constexpr int TOGETHER = TM < 2 ? TM : 2;
  // What a thread needs, roughly: sums, weights as they are and decoded, tokens, addresses. As many blocks share a
  // multiprocessor's 64 Ki registers as have room.
  static constexpr int REGISTERS =
      SUMS + (BLOCKED ? 2 * (R + TM) + 8 : 0) + (W == FORM_NVFP4 ? 12 : 8) * R + 4 * R * RUN + 6 * TOGETHER + 44;
  static constexpr int ROOM = 65536 / (THREADS * REGISTERS), MOST = 768 / THREADS;
  static constexpr int BLOCKS_PER_SM = ROOM < 1 ? 1 : ROOM > MOST ? MOST : ROOM;

  // A thread's place among the results, and where it reads in a slice.
  struct Lane {
    int g, t, wn, wm, wk;
    int w, x, w_scales, x_scales;  // bytes
  };
  DEVICE Lane lane() {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    Lane l{g, t, warp % WN, warp / WN % WM, warp / (WN * WM), 0, 0, 0, 0};
    int w_row = l.wn * 16 * R + g, x_row = l.wm * 8 * TM + g;
    l.w = w_row * W_ROW + swizzle<1, W_ROW / 16>(g, t) * 16;
    l.x = X_CODES + x_row * X_ROW + swizzle<RATIO, X_ROW / 16>(g, t * RATIO) * 16;
    l.w_scales = W_SCALES + w_row * SCALE_ROW + 2 * t;
    l.x_scales = X_SCALES + x_row * SCALE_ROW + 2 * t;
    // Kept, not computed again in every step.
    opaque(l.w);
    opaque(l.x);
    return l;
  }
  // Offset of piece 4 i + t of the weight rows of a lane, and of piece p of those of x for it. Bits that `swizzle` has
  // changed are changed again by the same XOR.
  DEVICE int w_piece(const Lane& l, int i) { return l.w ^ i * 64; }
  DEVICE int x_piece(const Lane& l, int i, int p) {
    if constexpr (RATIO == 1) return l.x ^ i * 64;
    return (l.x + i * 64 * RATIO) ^ p * 16;
  }

  // One operand's part of a stage: of each row WK slices of ROW_BYTES, in units of UNIT bytes. Neighbouring threads read
  // neighbouring units, and each thread the same place of every PASS-th row.
  template <int ROWS, int ROW_BYTES, int UNIT, int RATIO_OF_ROWS, class Source>
  struct Copy {
    static constexpr int UNITS = ROW_BYTES / UNIT, LINE = WK * UNITS, PASS = THREADS / LINE, COUNT = CEIL_DIV(ROWS, PASS);
    static_assert(THREADS % LINE == 0 && PASS % 2 == 0, "a row is read by whole passes, a thread's rows are alike");
    using At = Cursor<Source, UNIT == 4, COUNT, PASS>;
    At at;
    int left;         // bytes of the row from this thread's unit on
    int to;           // offset in a stage
    DEVICE Copy start(const Source& rows, int row_bytes, int to) {
      int first = threadIdx.x / LINE, in_line = threadIdx.x % LINE, unit = in_line % UNITS;
      to += in_line / UNITS * SLICE_BYTES + first * ROW_BYTES;
      // The rows of a thread are all even or all odd, so that one place in the row serves them.
      to += (UNIT == 16 ? swizzle<RATIO_OF_ROWS, UNITS>(first, unit) : unit) * UNIT;
      opaque(to);
      return Copy{At::start(rows, first, in_line * UNIT, ROWS), row_bytes - in_line * UNIT, to};
    }
    // Starts the copies of the next stage, to `stage`, an address from shared_address.
    DEVICE void next(Copy& c, uint32_t stage) {
      int bytes = c.left > 0 ? UNIT : 0;  // past the end of a row: zeros
      uint32_t to = stage + c.to;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        cp_async_if<UNIT>(At::has(c.at, i), to + i * PASS * ROW_BYTES, At::row(c.at, i), bytes);
      }
      At::advance(c.at, LINE * UNIT);
      c.left -= LINE * UNIT;
    }
  };

  // All of a stage.
  template <class XRows, class WRows>
  struct Loader {
    Copy<BN, W_ROW, 16, 1, WRows> w;
    Copy<BN, SCALE_ROW, 4, 0, WRows> w_scales;
    Copy<BM, X_ROW, 16, RATIO, XRows> x;
    Copy<BM, SCALE_ROW, 4, 0, XRows> x_scales;
    DEVICE void start(Loader& l, const XRows& x, const WRows& w, int cols) {
      l.w = decltype(l.w)::start(w, cols * 16 / Piece<W>::ELEMENTS, 0);
      if constexpr (W == FORM_NVFP4) l.w_scales = decltype(l.w_scales)::start(w, cols / NVFP4_GROUP, W_SCALES);
      l.x = decltype(l.x)::start(x, cols * 16 / Piece<X>::ELEMENTS, X_CODES);
      if constexpr (X == FORM_NVFP4) l.x_scales = decltype(l.x_scales)::start(x, cols / NVFP4_GROUP, X_SCALES);
    }
    DEVICE void next(Loader& l, uint32_t stage) {
      decltype(l.w)::next(l.w, stage);
      if constexpr (W == FORM_NVFP4) decltype(l.w_scales)::next(l.w_scales, stage);
      decltype(l.x)::next(l.x, stage);
      if constexpr (X == FORM_NVFP4) decltype(l.x_scales)::next(l.x_scales, stage);
    }
  };

  // One slice: all products of this warp's rows and tokens.
  DEVICE void multiply(float (&sums)[R][TM][4], const unsigned char* slice, const Lane& l) {
#pragma unroll
    for (int i = 0; i < W_ROW / 64; i++) {
      Words4 w[R][2];
      uint32_t w_scales[R][2][2];
#pragma unroll
      for (int r = 0; r < R; r++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int row = 16 * r + 8 * h;
          w[r][h] = load16(slice + w_piece(l, i) + row * W_ROW);
          if constexpr (W == FORM_NVFP4) {
            const unsigned char* at = slice + l.w_scales + row * SCALE_ROW + 8 * i;
            nvfp4_scales(*reinterpret_cast<const uint16_t*>(at), w_scales[r][h]);
          }
        }
      }
#pragma unroll
      for (int p = 0; p < RATIO; p++) {
#pragma unroll
        for (int from = 0; from < MMAS; from += RUN) {
          // The weights of a run first, so that tokens need few registers at a time.
          uint32_t a[RUN][R][4];
#pragma unroll
          for (int j = 0; j < RUN; j++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
              decode<W, HALF_TYPE, NATIVE>(w[r][0], w_scales[r][0], p * MMAS + from + j, a[j][r][0], a[j][r][2]);
              decode<W, HALF_TYPE, NATIVE>(w[r][1], w_scales[r][1], p * MMAS + from + j, a[j][r][1], a[j][r][3]);
            }
          }
#pragma unroll
          for (int first = 0; first < TM; first += TOGETHER) {
            Words4 x[TOGETHER];
            uint32_t x_scales[TOGETHER][2];
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) {
              x[n] = reload16(slice + x_piece(l, i, p) + 8 * (first + n) * X_ROW);
              if constexpr (X == FORM_NVFP4) {
                const unsigned char* at = slice + l.x_scales + 8 * (first + n) * SCALE_ROW + 8 * i;
                nvfp4_scales(*reinterpret_cast<const uint16_t*>(at), x_scales[n]);
              }
            }
#pragma unroll
            for (int j = 0; j < RUN; j++) {
#pragma unroll
              for (int n = 0; n < TOGETHER; n++) {
                uint32_t b[2];
                decode<X, HALF_TYPE, NATIVE>(x[n], x_scales[n], from + j, b[0], b[1]);
#pragma unroll
                for (int r = 0; r < R; r++) mma(sums[r][first + n], a[j][r], b);
              }
            }
          }
        }
      }
    }
  }

  DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (NATIVE) {
#if HAS_FP8
      mma_e4m3(d, a, b);
#endif
    } else if constexpr (HALF_TYPE) {
      mma_f16(d, a, b);
    } else {
      mma_bf16(d, a, b);
    }
  }

  // One slice into sums that outlast it, under the scales of its block.
  template <class XRows, class WRows>
  DEVICE void multiply_block(float (&sums)[R][TM][4], const unsigned char* slice, const Lane& l, const XRows& x,
                             const WRows& w, int block) {
    float w_scale[R][2], x_scale[TM][2];
    if constexpr (BLOCKED) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        w_scale[r][0] = block_scale(w, l.wn * 16 * R + 16 * r + l.g, block);
        w_scale[r][1] = block_scale(w, l.wn * 16 * R + 16 * r + l.g + 8, block);
      }
#pragma unroll
      for (int n = 0; n < TM; n++) {
        x_scale[n][0] = block_scale(x, l.wm * 8 * TM + 8 * n + 2 * l.t, block);
        x_scale[n][1] = block_scale(x, l.wm * 8 * TM + 8 * n + 2 * l.t + 1, block);
      }
    }
    float part[R][TM][4] = {};
    multiply(part, slice, l);
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int n = 0; n < TM; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (BLOCKED) {
            sums[r][n][e] += part[r][n][e] * (w_scale[r][e / 2] * x_scale[n][e % 2]);
          } else {
            sums[r][n][e] += part[r][n][e];
          }
        }
      }
    }
  }

  // Computes the tile; the sums are in `shared` afterwards, for sum4.
  template <class XRows, class WRows>
  DEVICE void run(unsigned char* shared, const XRows& x, const WRows& w, int cols) {
    const Lane l = lane();
    const int steps = CEIL_DIV(cols * 16 / Piece<W>::ELEMENTS, WK * W_ROW);
    float sums[R][TM][4] = {};
    int base = shared_address(shared);
    opaque(base);
    Loader<XRows, WRows> loader;
    decltype(loader)::start(loader, x, w, cols);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < steps) decltype(loader)::next(loader, base + s * STAGE_BYTES);
      cp_async_commit();
    }
    int slot = 0;
    for (int step = 0; step < steps; step++) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      // Into the slot that everyone has left at the barrier.
      int free = slot == 0 ? STAGES - 1 : slot - 1;
      if (step + STAGES - 1 < steps) decltype(loader)::next(loader, base + free * STAGE_BYTES);
      cp_async_commit();
      const unsigned char* slice = shared + slot * STAGE_BYTES + l.wk * SLICE_BYTES;
      if constexpr (PROMOTED) {
        int block = step * WK + l.wk;
        if (block * W_ROW < cols) multiply_block(sums, slice, l, x, w, block);
      } else {
        multiply(sums, slice, l);
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    __syncthreads();
    float* to = reinterpret_cast<float*>(shared) + l.wk * BM * SUM_PITCH;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int n = 0; n < TM; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int token = l.wm * 8 * TM + 8 * n + 2 * l.t + e % 2, row = l.wn * 16 * R + 16 * r + 8 * (e / 2) + l.g;
          to[token * SUM_PITCH + row] = sums[r][n][e];
        }
      }
    }
    __syncthreads();
  }

  // The sums of weight rows n .. n + 3 (n % 4 == 0) for a token.
  DEVICE void sum4(const unsigned char* shared, int token, int n, float (&v)[4]) {
    const float* from = reinterpret_cast<const float*>(shared) + token * SUM_PITCH + n;
    Words4 first = load16(from);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = bits_f32(first.w[i]);
#pragma unroll
    for (int k = 1; k < WK; k++) {
      Words4 more = load16(from + k * BM * SUM_PITCH);
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] += bits_f32(more.w[i]);
    }
  }

  // Hands the first `tokens` tokens' results out, four at a time.
  template <class Out>
  DEVICE void finish(const unsigned char* shared, int tokens, const Out& out) {
    constexpr int QUADS = BN / 4;
    int all = (tokens < BM ? tokens : BM) * QUADS;
    for (int i = threadIdx.x; i < all; i += THREADS) {
      float v[4];
      sum4(shared, i / QUADS, i % QUADS * 4, v);
      store4(out, i / QUADS, i % QUADS * 4, v);
    }
  }
};

// The tile a block computes: tiles of neighbouring tokens follow each other in groups of eight, then weights, so that blocks
// that run together share both.
struct Place {
  int m, n;
};
DEVICE Place place(int block, int m_tiles, int n_tiles) {
  constexpr int GROUP = 8;
  int group = block / (GROUP * n_tiles), in_group = block - group * GROUP * n_tiles;
  int height = m_tiles - group * GROUP < GROUP ? m_tiles - group * GROUP : GROUP;
  return Place{group * GROUP + in_group % height, in_group / height};
}

// A linear layer's operands: x [tokens, cols], w [rows, cols], results to y [tokens, rows] with y_pitch elements from one
// token to the next. x's pitch is in bytes, below 2^31.
struct Projection {
  const uint8_t* x;
  int64_t x_pitch;
  const uint8_t* x_groups;    // NVFP4: e4m3 [tokens, cols / 16]
  const float* x_scales;      // FP8: of tokens, or [tokens, blocks] where BLOCKED; null where there are none
  float x_scale;              // for all tokens, besides those
  const uint8_t* w;
  const uint8_t* w_groups;    // NVFP4: e4m3 [rows, cols / 16]
  const float* w_blocks;      // FP8 blocks
  int segment_rows;
  const float* w_scales;      // of rows; null where there are none
  int w_divides;              // whether those divide
  void* y;
  int64_t y_pitch;
  int y_bf16;
  int tokens, rows, cols;
};

// The epilogue: scales, then the store in y's type.
struct Store {
  const Projection& p;
  int token, row;  // of the tile
  float scale;
  bool x_per_token;
};
DEVICE void store4(const Store& s, int tile_token, int tile_row, const float (&sums)[4]) {
  const Projection& p = s.p;
  int token = s.token + tile_token, row = s.row + tile_row;
  float x_scale = s.scale * (s.x_per_token ? p.x_scales[token] : 1.0f);
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = sums[i] * x_scale;
    if (p.w_scales != nullptr && row + i < p.rows) {
      float scale = p.w_scales[row + i];
      v[i] = p.w_divides ? v[i] / scale : v[i] * scale;
    }
  }
  int64_t at = token * p.y_pitch + row;
  int left = p.rows - row;
  if (p.y_bf16) {
    bf16* y = static_cast<bf16*>(p.y) + at;
    if (left >= 4 && (uint64_t(y) & 7) == 0) {
      *reinterpret_cast<Words2*>(y) = Words2{{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])}};
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < left) y[i] = to_bf16(v[i]);
    }
  } else {
    float* y = static_cast<float*>(p.y) + at;
    if (left >= 4 && (uint64_t(y) & 15) == 0) {
      store16(y, Words4{{f32_bits(v[0]), f32_bits(v[1]), f32_bits(v[2]), f32_bits(v[3])}});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < left) y[i] = v[i];
    }
  }
}

// One block's tile of a linear layer, blockIdx.x of all of them.
template <class G, int X, int W, bool BLOCKED>
DEVICE void project(unsigned char* shared, const Projection& p) {
  Place at = place(blockIdx.x, CEIL_DIV(p.tokens, G::BM), CEIL_DIV(p.rows, G::BN));
  int token = at.m * G::BM, row = at.n * G::BN;
  int groups = p.cols / NVFP4_GROUP, blocks = CEIL_DIV(p.cols, FP8_BLOCK);
  int x_pitch = int(p.x_pitch), w_pitch = p.cols * 16 / Piece<W>::ELEMENTS;
  Rows x{p.x + int64_t(token) * x_pitch, x_pitch, 0, nullptr, nullptr, token, 1, p.tokens - token};
  Rows w{p.w + int64_t(row) * w_pitch, w_pitch, 0, nullptr, nullptr, row, p.segment_rows, p.rows - row};
  if constexpr (X == FORM_NVFP4) {
    x.scales = p.x_groups + int64_t(token) * groups;
    x.scale_pitch = groups;
  }
  if constexpr (W == FORM_NVFP4) {
    w.scales = p.w_groups + int64_t(row) * groups;
    w.scale_pitch = groups;
  }
  // A scale per token fits BLOCKED too: x then has no blocks.
  bool x_blocks = BLOCKED && X == FORM_FP8 && p.x_scales != nullptr;
  if constexpr (BLOCKED) {
    x.blocks = x_blocks ? p.x_scales : nullptr;
    w.blocks = p.w_blocks;
    x.scale_pitch = w.scale_pitch = blocks;
  }
  G::run(shared, x, w, p.cols);
  float scale = p.x_scale * (W == FORM_NVFP4 ? NVFP4_UNSHIFT : 1.0f) * (X == FORM_NVFP4 ? NVFP4_UNSHIFT : 1.0f);
  G::finish(shared, p.tokens - token, Store{p, token, row, scale, X == FORM_FP8 && !BLOCKED && p.x_scales != nullptr});
}

#endif
