// One token of the gated delta rule per sequence.
//
// Per value head, S [dk, dv]: S *= e^g; delta = beta (v - S^T k); S += k (x) delta; o = S^T q. A column of S needs no other
// column, so a block has PART of them and all of dk. It reads its part of the state once into registers, adds up both
// m = S^T k and n = S^T q before the update (o = e^g n + (q . k) delta), meets once, and writes the part once. q and k stay
// raw in the sums; the factors that make them unit vectors follow, so the norms are not in the way of the loads.
//
// Row i is sequence i's. Everything that changes from step to step is read from device memory: a graph can be replayed.
#include "lib/gdn.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROW_THREADS = 8;                                  // threads along dv, 16 bytes of state each
constexpr int ROWS = HEAD * ROW_THREADS / THREADS;              // rows of the state a thread has: adjacent ones
constexpr int WARP_ROWS = ROWS * (WARP / ROW_THREADS);

// Heads of 128 x 128. Grid: (parts of dv, value heads, sequences).
template <class T, class S>
DEVICE void step(const T* conv, const float* g, const float* beta, S* state, const int* contexts, const int* slot_in,
                 const int* slot_out, T* out, int slots, int key_heads, int value_heads) {
  constexpr int COLS = 16 / sizeof(S);        // columns of a thread
  constexpr int PART = ROW_THREADS * COLS;    // columns of a block
  __shared__ __align__(16) float partial[2][WARPS][PART];
  Heads heads{key_heads, value_heads, HEAD, HEAD};
  int head = blockIdx.y, i = blockIdx.z, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int along = lane & (ROW_THREADS - 1), column = blockIdx.x * PART + along * COLS;
  int first = warp * WARP_ROWS + lane / ROW_THREADS * ROWS;
  T* o = out + i * value_width(heads) + int64_t(head) * HEAD;

  // No way out before the loads: what they wait for is short, and they should not wait for each other.
  int from = slot_in[i], to = slot_out[i], context = contexts[i];
  Place place = place_of(from, to, slots);
  int64_t at = (int64_t(head) * HEAD + first) * HEAD + column;
  float s[ROWS][COLS] = {};
  if (place.runs && context != 0) {
    const S* source = state + from * state_len(heads) + at;
#pragma unroll
    for (int r = 0; r < ROWS; r++) load_run(source + r * HEAD, s[r]);
  }

  const T* row = conv + i * channels(heads);
  const T* q_row = row + q_column(heads, head);
  const T* k_row = row + k_column(heads, head);
  float q[ROWS], k[ROWS], v[COLS], all_q[4], all_k[4];
  load_run(q_row + first, q);
  load_run(k_row + first, k);
  load_run(q_row + 4 * lane, all_q);
  load_run(k_row + 4 * lane, all_k);
  load_run(row + v_column(heads, head) + column, v);
  float decay = expf(g[int64_t(i) * value_heads + head]), b = beta[int64_t(i) * value_heads + head];
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    qq += all_q[j] * all_q[j];
    kk += all_k[j] * all_k[j];
    qk += all_q[j] * all_k[j];
  }
  float q_factor = 1.0f / (sqrtf(float(HEAD)) * sqrtf(warp_sum(qq) + L2_EPS));
  float k_factor = 1.0f / sqrtf(warp_sum(kk) + L2_EPS);
  qk = warp_sum(qk) * q_factor * k_factor;

  float m[COLS] = {}, n[COLS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      m[c] += k[r] * s[r][c];
      n[c] += q[r] * s[r][c];
    }
  }
#pragma unroll
  for (int c = 0; c < COLS; c++) {
#pragma unroll
    for (int offset = ROW_THREADS; offset < WARP; offset *= 2) {
      m[c] += __shfl_xor_sync(ALL_LANES, m[c], offset);
      n[c] += __shfl_xor_sync(ALL_LANES, n[c], offset);
    }
  }
  if (lane < ROW_THREADS) {
    store_run(&partial[0][warp][along * COLS], m);
    store_run(&partial[1][warp][along * COLS], n);
  }
  __syncthreads();

  float delta[COLS] = {};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    float part[COLS];
    load_run(&partial[0][w][along * COLS], part);
#pragma unroll
    for (int c = 0; c < COLS; c++) delta[c] += part[c];
  }
#pragma unroll
  for (int c = 0; c < COLS; c++) delta[c] = b * (v[c] - decay * k_factor * delta[c]);
  if (place.runs) {
    S* target = state + to * state_len(heads) + at;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float key = k[r] * k_factor;
#pragma unroll
      for (int c = 0; c < COLS; c++) s[r][c] = s[r][c] * decay + key * delta[c];
      store_run(target + r * HEAD, s[r]);
    }
  }
  if (threadIdx.x < ROW_THREADS) {
    float sum[COLS] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float part[COLS];
      load_run(&partial[1][w][along * COLS], part);
#pragma unroll
      for (int c = 0; c < COLS; c++) sum[c] += part[c];
    }
#pragma unroll
    for (int c = 0; c < COLS; c++) sum[c] = place.runs ? decay * q_factor * sum[c] + qk * delta[c] : place.fill;
    store_run(o + column, sum);
  }
}

// Heads of any size. Grid: (warps of RULE_COLUMNS columns, value heads, sequences); rule_floats of shared memory a warp.
template <class T, class S>
DEVICE void any(const T* conv, const float* g, const float* beta, S* state, const int* contexts, const int* slot_in,
                const int* slot_out, T* out, int slots, int key_heads, int value_heads, int key_dim, int value_dim) {
  DYNAMIC_SHARED(shared);
  Heads heads{key_heads, value_heads, key_dim, value_dim};
  int warp = threadIdx.x >> 5, head = blockIdx.y, i = blockIdx.z;
  int column = (blockIdx.x * (blockDim.x >> 5) + warp) * RULE_COLUMNS;
  if (column >= value_dim) return;
  int from = slot_in[i], to = slot_out[i];
  Place place = place_of(from, to, slots);
  if (!place.runs) {
    rule_fill(heads, out, head, column, i, 1, place.fill);
    return;
  }
  const S* source = contexts[i] == 0 ? nullptr : state + from * state_len(heads);
  rule(heads, conv, g, beta, source, state + to * state_len(heads), out, head, column, i, 1,
       reinterpret_cast<float*>(shared) + warp * rule_floats(key_dim));
}

#define ENTRIES(T, S, BLOCKS)                                                                                           \
  KERNEL LAUNCH_BOUNDS(THREADS, BLOCKS) step_##T##_##S(const ELEMENT_##T* conv, const float* g, const float* beta,      \
                                                       ELEMENT_##S* state, const int* contexts, const int* slot_in,     \
                                                       const int* slot_out, ELEMENT_##T* out, int slots, int key_heads, \
                                                       int value_heads) {                                               \
    after_earlier_kernels();                                                                                            \
    step(conv, g, beta, state, contexts, slot_in, slot_out, out, slots, key_heads, value_heads);                        \
  }                                                                                                                     \
  EXPORT(step_##T##_##S)                                                                                                \
  KERNEL any_##T##_##S(const ELEMENT_##T* conv, const float* g, const float* beta, ELEMENT_##S* state,                  \
                       const int* contexts, const int* slot_in, const int* slot_out, ELEMENT_##T* out, int slots,       \
                       int key_heads, int value_heads, int key_dim, int value_dim) {                                    \
    after_earlier_kernels();                                                                                            \
    any(conv, g, beta, state, contexts, slot_in, slot_out, out, slots, key_heads, value_heads, key_dim, value_dim);     \
  }                                                                                                                     \
  EXPORT(any_##T##_##S)

#define ELEMENT_f32 float
#define ELEMENT_bf16 bf16
ENTRIES(f32, f32, 4)
ENTRIES(f32, bf16, 3)
ENTRIES(bf16, f32, 4)
ENTRIES(bf16, bf16, 3)
