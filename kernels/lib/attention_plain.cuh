// Attention of any types and any head_dim, decode and prefill alike: for f32 numerics and for what the tensor-core kernels
// do not take. f32 throughout; one block a (row, head), pages ascending as on the CPU arm. Correct, not fast.
#ifndef LIB_ATTENTION_PLAIN
#define LIB_ATTENTION_PLAIN
#include "lib/attention.cuh"

// Element types as the launch gives them.
enum Type { TYPE_F32 = 0, TYPE_BF16 = 1, TYPE_E4M3 = 2 };

DEVICE float value(const float* p) { return *p; }
DEVICE float value(const bf16* p) { return to_f32(*p); }
DEVICE float value(const uint8_t* p) { return e4m3_to_f32(*p); }

// The sequence of a row: the last one that starts at it or before.
DEVICE int sequence_of(const int* starts, int sequences, int row) {
  int low = 0, high = sequences - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (starts[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Shared memory: the query and the accumulators, head_dim f32 each.
template <class KV>
DEVICE void attend_plain(void* out, const void* qkv, const KV* k, const KV* v, const int* starts, Sequences all,
                         int sequences, int head_dim, int qkv_cols, float scale, float v_scale, int type, int out_type) {
  constexpr int THREADS = 128, WARPS = 4;
  DYNAMIC_SHARED(memory);
  __shared__ float weights[PAGE_TOKENS];
  float *query = reinterpret_cast<float*>(memory), *acc = query + head_dim;
  int row = int(blockIdx.x), head = int(blockIdx.y), kv_head = head / all.group, heads = all.kv_heads * all.group;
  int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  int sequence = sequence_of(starts, sequences, row);
  int length = all.visible(int64_t(all.contexts[sequence]) + row - starts[sequence] + 1);
  if (all.inert(sequence)) length = 0;

  int64_t q_at = int64_t(row) * qkv_cols + int64_t(head) * 2 * head_dim;
  for (int c = int(threadIdx.x); c < head_dim; c += THREADS) {
    query[c] = type == TYPE_BF16 ? value(static_cast<const bf16*>(qkv) + q_at + c)
                                 : value(static_cast<const float*>(qkv) + q_at + c);
    acc[c] = 0.0f;
  }
  float max = minus_infinity(), sum = 0.0f;
  for (int first = 0; first < length; first += PAGE_TOKENS) {
    int page = all.page(sequence, first / PAGE_TOKENS), count = length - first < PAGE_TOKENS ? length - first : PAGE_TOKENS;
    if (page < 0) continue;
    int64_t token_pitch = int64_t(all.kv_heads) * head_dim;
    int64_t at = int64_t(page) * PAGE_TOKENS * token_pitch + int64_t(kv_head) * head_dim;
    __syncthreads();
    for (int j = warp; j < count; j += WARPS) {
      const KV* key = k + at + j * token_pitch;
      float s = 0.0f;
      for (int c = lane; c < head_dim; c += WARP) s = fmaf(query[c], value(key + c), s);
      s = warp_sum(s);
      if (lane == 0) weights[j] = s * scale;
    }
    __syncthreads();
    float raised = max;
    for (int j = 0; j < count; j++) raised = fmaxf(raised, weights[j]);
    float shrink = exp2f(max - raised);
    __syncthreads();
    for (int j = int(threadIdx.x); j < count; j += THREADS) weights[j] = exp2f(weights[j] - raised);
    __syncthreads();
    max = raised;
    sum *= shrink;
    for (int j = 0; j < count; j++) sum += weights[j];
    for (int c = int(threadIdx.x); c < head_dim; c += THREADS) {
      float total = acc[c] * shrink;
      for (int j = 0; j < count; j++) total = fmaf(weights[j], value(v + at + j * token_pitch + c), total);
      acc[c] = total;
    }
  }
  // A thread reads the accumulators that it wrote.
  float last = sum == 0.0f ? 0.0f : v_scale / sum;
  int64_t out_at = (int64_t(row) * heads + head) * head_dim;
  for (int c = int(threadIdx.x); c < head_dim; c += THREADS) {
    if (out_type == TYPE_BF16) static_cast<bf16*>(out)[out_at + c] = to_bf16(acc[c] * last);
    else static_cast<float*>(out)[out_at + c] = acc[c] * last;
  }
}

#endif
