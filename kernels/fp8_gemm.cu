// y = x W^T with W in e4m3 codes [N, K] under f32 scales of rows or of blocks, on tensor cores (lib/gemm.cuh): x as bf16
// (FP8_X 0) or as e4m3 codes under one scale, a scale per token, or (FP8_BLOCKED 1) one per token and 128 columns.
// FP8_BLOCKED 1: W has scales of 128 x 128 blocks, x bf16 or of groups. K and both pitches are multiples of 16 bytes.
// Sums are f32; scales are applied to them, at the end or after every 128 columns.
#include "lib/gemm.cuh"

#ifndef TILE
#error "TILE is the packed tile of lib/gemm.cuh"
#endif
#ifndef FP8_X
#error "FP8_X is 1 where x is e4m3 codes, 0 where it is bf16"
#endif
#ifndef FP8_BLOCKED
#error "FP8_BLOCKED is 1 where scales are those of blocks"
#endif

constexpr int X = FP8_X ? FORM_FP8 : FORM_BF16;
using G = Gemm<PackedTile<TILE>, X, FORM_FP8, FP8_BLOCKED != 0>;

KERNEL LAUNCH_BOUNDS(G::THREADS, G::BLOCKS_PER_SM)
    fp8_gemm(const uint8_t* x, int64_t x_pitch, const float* x_scales, float x_scale, const uint8_t* w,
             const float* w_blocks, int segment_rows, const float* w_scales, void* y, int64_t y_pitch, int y_bf16,
             int tokens, int rows, int cols) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  Projection p{x, x_pitch, nullptr, x_scales, x_scale, w,      nullptr, w_blocks, segment_rows,
               w_scales, 0, y, y_pitch, y_bf16, tokens, rows, cols};
  project<G, X, FORM_FP8, FP8_BLOCKED != 0>(shared, p);
}
EXPORT(fp8_gemm)
