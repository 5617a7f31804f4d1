// y = x W^T. Without TILE: in f32 outside the tensor cores, both operands in any stored form, of any size and alignment:
// the debug mode, and where no other kernel fits. With TILE: bf16 by bf16 on tensor cores (lib/gemm.cuh) for rows of whole
// 16 bytes: what cuBLASLt computes otherwise, with sums whose order does not depend on M.
#ifndef TILE
#include "lib/operand.cuh"

// A block of 256 threads computes BM tokens by 64 weight rows. Each sum adds up runs of 16 products, the runs in rising K:
// the same order for every BM.
constexpr int BN = 64, RUN = 16, THREADS = 256;

template <int BM>
DEVICE void generic(const Matrix& x, const Matrix& w, void* y, int64_t y_pitch, int y_bf16, int tokens, int rows) {
  constexpr int DEPTH = BM == 64 ? RUN : 4 * RUN;   // columns in shared memory
  constexpr int TM = BM == 64 ? 4 : 1, TN = BM == 64 ? 4 : 2;  // tokens and rows of a thread
  constexpr int ACROSS = BN / TN;
  static_assert(BM / TM * ACROSS == THREADS, "every thread has its own results");
  __shared__ float xs[DEPTH][BM + 4], ws[DEPTH][BN + 4];
  int64_t first_token = int64_t(blockIdx.y) * BM, first_row = int64_t(blockIdx.x) * BN;
  int token = threadIdx.x / ACROSS * TM, row = threadIdx.x % ACROSS * TN;
  float sums[TM][TN] = {};
  for (int from = 0; from < x.cols; from += DEPTH) {
    for (int i = threadIdx.x; i < BM * DEPTH; i += THREADS) {
      int k = i % DEPTH, at = i / DEPTH;
      bool inside = from + k < x.cols && first_token + at < tokens;
      xs[k][at] = inside ? element(x, first_token + at, from + k) : 0.0f;
    }
    for (int i = threadIdx.x; i < BN * DEPTH; i += THREADS) {
      int k = i % DEPTH, at = i / DEPTH;
      bool inside = from + k < x.cols && first_row + at < rows;
      ws[k][at] = inside ? element(w, first_row + at, from + k) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int run = 0; run < DEPTH; run += RUN) {
      float part[TM][TN] = {};
#pragma unroll
      for (int k = run; k < run + RUN; k++) {
#pragma unroll
        for (int t = 0; t < TM; t++) {
#pragma unroll
          for (int n = 0; n < TN; n++) part[t][n] += xs[k][token + t] * ws[k][row + n];
        }
      }
#pragma unroll
      for (int t = 0; t < TM; t++) {
#pragma unroll
        for (int n = 0; n < TN; n++) sums[t][n] += part[t][n];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < TM; t++) {
#pragma unroll
    for (int n = 0; n < TN; n++) {
      int64_t to = first_token + token + t, column = first_row + row + n;
      if (to >= tokens || column >= rows) continue;
      if (y_bf16) {
        static_cast<bf16*>(y)[to * y_pitch + column] = to_bf16(sums[t][n]);
      } else {
        static_cast<float*>(y)[to * y_pitch + column] = sums[t][n];
      }
    }
  }
}

#define GENERIC(name, BM)                                                                                               \
  KERNEL LAUNCH_BOUNDS(THREADS, 2)                                                                                      \
      name(const void* x, int64_t x_pitch, const void* x_scales, const float* x_row_scales, float x_one, int x_form,    \
           int x_divides, const void* w, const void* w_scales, const float* w_row_scales, int segment_rows, int w_form, \
           int w_divides, void* y, int64_t y_pitch, int y_bf16, int tokens, int rows, int cols) {                       \
    after_earlier_kernels();                                                                                            \
    Matrix xm{x, x_pitch, x_scales, x_row_scales, x_one, 1, cols, x_form, x_divides};                                   \
    Matrix wm{w, cols, w_scales, w_row_scales, 1.0f, segment_rows, cols, w_form, w_divides};                            \
    generic<BM>(xm, wm, y, y_pitch, y_bf16, tokens, rows);                                                              \
  }                                                                                                                     \
  EXPORT(name)
GENERIC(generic_64, 64)
GENERIC(generic_8, 8)

#else
#include "lib/gemm.cuh"

using G = Gemm<PackedTile<TILE>, FORM_BF16, FORM_BF16, false>;

KERNEL LAUNCH_BOUNDS(G::THREADS, G::BLOCKS_PER_SM)
    bf16_gemm(const uint8_t* x, int64_t x_pitch, const uint8_t* w, void* y, int64_t y_pitch, int y_bf16, int tokens,
              int rows, int cols) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  Projection p{x, x_pitch, nullptr, nullptr, 1.0f, w,      nullptr, nullptr, 1,
               nullptr, 0, y, y_pitch, y_bf16, tokens, rows, cols};
  project<G, FORM_BF16, FORM_BF16, false>(shared, p);
}
EXPORT(bf16_gemm)
#endif
