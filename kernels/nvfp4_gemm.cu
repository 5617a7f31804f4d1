// y = x W^T with W in NVFP4 (e2m1 codes [N, K/2], e4m3 scales [N, K/16], an f32 global per row that multiplies or divides),
// on tensor cores (lib/gemm.cuh): x as bf16 (NVFP4_X 0) or as NVFP4 under one global (NVFP4_X 1). Codes times group scales
// are exact in bf16; sums are f32, globals are applied to them at the end. K is a multiple of 64.
#include "lib/gemm.cuh"

#ifndef TILE
#error "TILE is the packed tile of lib/gemm.cuh"
#endif
#ifndef NVFP4_X
#error "NVFP4_X is 1 where x is NVFP4, 0 where it is bf16"
#endif

constexpr int X = NVFP4_X ? FORM_NVFP4 : FORM_BF16;
using G = Gemm<PackedTile<TILE>, X, FORM_NVFP4, false>;

KERNEL LAUNCH_BOUNDS(G::THREADS, G::BLOCKS_PER_SM)
    nvfp4_gemm(const uint8_t* x, int64_t x_pitch, const uint8_t* x_groups, float x_scale, const uint8_t* w,
               const uint8_t* w_groups, const float* w_globals, int w_divides, void* y, int64_t y_pitch, int y_bf16,
               int tokens, int rows, int cols) {
  after_earlier_kernels();
  DYNAMIC_SHARED(shared);
  Projection p{x, x_pitch, x_groups, nullptr, x_scale, w,      w_groups, nullptr, 1,
               w_globals, w_divides, y, y_pitch, y_bf16, tokens, rows, cols};
  project<G, X, FORM_NVFP4, false>(shared, p);
}
EXPORT(nvfp4_gemm)
