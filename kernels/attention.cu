// Causal grouped-query attention over paged keys and values: o = softmax(q Kᵀ / sqrt(D)) V, softmax in f32.
//
// qkv [T, qkv_cols], head h's query at column 2 h D; k, v [pages, 64, kv_heads, D]; out [T, heads D]; heads = kv_heads x
// group. The token at position p of a sequence sees tokens 0..=p. A sequence whose first page is negative gives zero rows;
// another page outside the cache is left out, tokens and all.
//
// With HEAD_DIM (a multiple of 16, at most 256): the tensor-core kernels for bf16 activations, pages of bf16 or e4m3 codes.
// PREFILL_WARPS have 16 rows each. TILE_STAGES is how many pages the prefill has in shared memory, 1 or 2; the decode has
// one more tile of 32 tokens than that. What fits is the launch's to know. Without
// HEAD_DIM: the plain kernel, for everything.
//
// Rounding: weights to bf16 before they meet values (to half, where pages are codes), the result to bf16; codes widen exactly,
// their scales are f32.
#ifdef HEAD_DIM
#include "lib/attention_decode.cuh"
#include "lib/attention_prefill.cuh"

#if !defined(PREFILL_WARPS) || !defined(TILE_STAGES)
#error "PREFILL_WARPS and TILE_STAGES go with HEAD_DIM"
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 256, "head_dim of the tensor-core kernels");
constexpr int DECODE_STAGES = TILE_STAGES + 1;

KERNEL LAUNCH_BOUNDS(32 * PREFILL_WARPS, 1)
prefill_bf16(bf16* out, const bf16* qkv, const bf16* k, const bf16* v, const int* starts, const int* contexts,
             const int* table, int table_cols, int pages, int kv_heads, int group, int tokens, int first, int sequences,
             int qkv_cols, float scale, float v_scale) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  prefill<bf16, HEAD_DIM, PREFILL_WARPS, TILE_STAGES>(out, qkv, k, v, starts, all, tokens, first, sequences, qkv_cols, scale, v_scale);
}
EXPORT(prefill_bf16)

KERNEL LAUNCH_BOUNDS(32 * PREFILL_WARPS, 1)
prefill_e4m3(bf16* out, const bf16* qkv, const uint8_t* k, const uint8_t* v, const int* starts, const int* contexts,
             const int* table, int table_cols, int pages, int kv_heads, int group, int tokens, int first, int sequences,
             int qkv_cols, float scale, float v_scale) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  prefill<uint8_t, HEAD_DIM, PREFILL_WARPS, TILE_STAGES>(out, qkv, k, v, starts, all, tokens, first, sequences, qkv_cols, scale,
                                            v_scale);
}
EXPORT(prefill_e4m3)

KERNEL LAUNCH_BOUNDS(128, 2)
decode_bf16(bf16* out, float* partials, const bf16* qkv, const bf16* k, const bf16* v, const int* contexts,
            const int* table, int table_cols, int pages, int kv_heads, int group, int decodes, int splits, int qkv_cols,
            float scale, float v_scale) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  decode<bf16, HEAD_DIM, DECODE_STAGES>(out, partials, qkv, k, v, all, decodes, splits, qkv_cols, scale, v_scale);
}
EXPORT(decode_bf16)

KERNEL LAUNCH_BOUNDS(128, 3)
decode_e4m3(bf16* out, float* partials, const bf16* qkv, const uint8_t* k, const uint8_t* v, const int* contexts,
            const int* table, int table_cols, int pages, int kv_heads, int group, int decodes, int splits, int qkv_cols,
            float scale, float v_scale) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  decode<uint8_t, HEAD_DIM, DECODE_STAGES>(out, partials, qkv, k, v, all, decodes, splits, qkv_cols, scale, v_scale);
}
EXPORT(decode_e4m3)

KERNEL LAUNCH_BOUNDS(512)
combine_bf16(bf16* out, float* partials, const int* contexts, const int* table, int table_cols, int pages, int kv_heads,
             int group, int decodes, int splits, float v_scale) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  combine<HEAD_DIM>(out, partials, all, decodes, splits, v_scale);
}
EXPORT(combine_bf16)

#else
#include "lib/attention_plain.cuh"

// Blocks: x = row, y = head. Types are those of lib/attention_plain.cuh.
KERNEL LAUNCH_BOUNDS(128, 4)
attend(void* out, const void* qkv, const void* k, const void* v, const int* starts, const int* contexts,
       const int* table, int table_cols, int pages, int kv_heads, int group, int sequences, int head_dim, int qkv_cols,
       float scale, float v_scale, int type, int kv_type, int out_type) {
  after_earlier_kernels();
  Sequences all{contexts, table, table_cols, pages, kv_heads, group};
  if (kv_type == TYPE_F32) {
    attend_plain(out, qkv, static_cast<const float*>(k), static_cast<const float*>(v), starts, all, sequences, head_dim,
                 qkv_cols, scale, v_scale, type, out_type);
  } else if (kv_type == TYPE_BF16) {
    attend_plain(out, qkv, static_cast<const bf16*>(k), static_cast<const bf16*>(v), starts, all, sequences, head_dim,
                 qkv_cols, scale, v_scale, type, out_type);
  } else {
    attend_plain(out, qkv, static_cast<const uint8_t*>(k), static_cast<const uint8_t*>(v), starts, all, sequences,
                 head_dim, qkv_cols, scale, v_scale, type, out_type);
  }
}
EXPORT(attend)
#endif
