// Reads and copies as fast as memory goes: what a kernel that streams its operands is held against. No op of a model.
#include "lib/base.cuh"

constexpr int THREADS = 256;
// Loads of 16 bytes that a thread has in flight.
constexpr int LOADS = 8;
constexpr int TILE = THREADS * LOADS;

// This thread's part of a tile; vectors past the end are zeros. A whole tile has no conditions, so that all its loads
// start before the first is used.
DEVICE void load_tile(const uint32_t* x, int64_t vectors, int64_t tile, Words4 (&v)[LOADS]) {
  int64_t first = tile * TILE + threadIdx.x;
  if ((tile + 1) * TILE <= vectors) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) v[i] = load16_stream(x + 4 * (first + i * THREADS));
  } else {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int64_t at = first + i * THREADS;
      v[i] = Words4{{0, 0, 0, 0}};
      if (at < vectors) v[i] = load16_stream(x + 4 * at);
    }
  }
}

// fold[b] = the exclusive or of every word of tiles b, b + blocks, b + 2 blocks, ...
KERNEL LAUNCH_BOUNDS(256) stream_read(const uint32_t* x, uint32_t* fold, int64_t vectors) {
  after_earlier_kernels();
  uint32_t folded = 0;
  for (int64_t tile = blockIdx.x; tile * TILE < vectors; tile += gridDim.x) {
    Words4 v[LOADS];
    load_tile(x, vectors, tile, v);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) folded ^= v[i].w[0] ^ v[i].w[1] ^ v[i].w[2] ^ v[i].w[3];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) folded ^= __shfl_xor_sync(ALL_LANES, folded, offset);
  __shared__ uint32_t of_warp[THREADS / WARP];
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = folded;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / WARP; ++warp) folded ^= of_warp[warp];
    fold[blockIdx.x] = folded;
  }
}
EXPORT(stream_read)

// y = x.
KERNEL LAUNCH_BOUNDS(256) stream_copy(const uint32_t* x, uint32_t* y, int64_t vectors) {
  after_earlier_kernels();
  for (int64_t tile = blockIdx.x; tile * TILE < vectors; tile += gridDim.x) {
    Words4 v[LOADS];
    load_tile(x, vectors, tile, v);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int64_t at = tile * TILE + threadIdx.x + i * THREADS;
      if (at < vectors) store16(y + 4 * at, v[i]);
    }
  }
}
EXPORT(stream_copy)
