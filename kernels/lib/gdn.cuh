// What the two kernels of the gated delta rule share: where a sequence's rows and state are, and the rule itself token by
// token for heads of any size.
#ifndef LIB_GDN
#define LIB_GDN
#include "lib/vector.cuh"

constexpr int CHUNK = 64;           // tokens of a chunk
constexpr int HEAD = 128;           // the head size, of keys and of values, that the fast kernels are for
constexpr float L2_EPS = 1e-6f;     // under the root when q and k are made unit vectors
constexpr int RULE_COLUMNS = 4;     // columns of a state that one warp of the any-size kernels keeps

// A row of conv is (q of every key head, k of every key head, v of every value head).
struct Heads {
  int key_heads, value_heads, key_dim, value_dim;
};
DEVICE int64_t key_width(Heads h) { return int64_t(h.key_heads) * h.key_dim; }
DEVICE int64_t value_width(Heads h) { return int64_t(h.value_heads) * h.value_dim; }
DEVICE int64_t channels(Heads h) { return 2 * key_width(h) + value_width(h); }
DEVICE int64_t state_len(Heads h) { return value_width(h) * h.key_dim; }
// Columns of a row at which value head `head` finds its q, k and v.
DEVICE int64_t q_column(Heads h, int head) { return int64_t(head / (h.value_heads / h.key_heads)) * h.key_dim; }
DEVICE int64_t k_column(Heads h, int head) { return key_width(h) + q_column(h, head); }
DEVICE int64_t v_column(Heads h, int head) { return 2 * key_width(h) + int64_t(head) * h.value_dim; }

// Whether a sequence runs. One that does not has rows of `fill`: 0 where slot_in is negative (it is inert), NaN where a
// slot does not exist.
struct Place {
  bool runs;
  float fill;
};
DEVICE Place place_of(int slot_in, int slot_out, int slots) {
  if (slot_in < 0) return {false, 0.0f};
  if (slot_in >= slots || slot_out < 0 || slot_out >= slots) return {false, bits_f32(0x7FC00000u)};
  return {true, 0.0f};
}

// Floats of shared memory that a warp of `rule` has for itself.
DEVICE int rule_floats(int key_dim) { return (RULE_COLUMNS + 1) * key_dim; }

// Rows first .. first + count of value head `head` in f32, RULE_COLUMNS columns from `column` on, by one warp. Lane l keeps
// elements l, l + 32, .. of k and of each column of S in `own`, so no lane waits for another's memory. `from` is the state
// before (none: zero), `to` the state after. The sums run over raw q and k, whose factors follow: with m = S^T k and
// n = S^T q before the token, delta = beta (v - e^g m) and o = e^g n + (q . k) delta.
template <class T, class S>
DEVICE void rule(Heads heads, const T* conv, const float* g, const float* beta, const S* from, S* to, T* out, int head,
                 int column, int first, int count, float* own) {
  int lane = threadIdx.x & 31, dk = heads.key_dim, dv = heads.value_dim;
  int columns = min(RULE_COLUMNS, dv - column);
  int64_t at = int64_t(head) * dk * dv + column;
  float* keys = own;
  float* s = own + dk;
  for (int i = lane; i < dk; i += WARP) {
    for (int c = 0; c < RULE_COLUMNS; c++)
      s[c * dk + i] = from != nullptr && c < columns ? to_f32(from[at + int64_t(i) * dv + c]) : 0.0f;
  }
  float scale = 1.0f / sqrtf(float(dk));
  for (int t = 0; t < count; t++) {
    int64_t r = first + t;
    const T* row = conv + r * channels(heads);
    const T* q = row + q_column(heads, head);
    const T* k = row + k_column(heads, head);
    const T* v = row + v_column(heads, head) + column;
    float qq = 0.0f, kk = 0.0f, qk = 0.0f, m[RULE_COLUMNS] = {}, n[RULE_COLUMNS] = {};
    for (int i = lane; i < dk; i += WARP) {
      float qi = to_f32(q[i]), ki = to_f32(k[i]);
      keys[i] = ki;
      qq += qi * qi;
      kk += ki * ki;
      qk += qi * ki;
#pragma unroll
      for (int c = 0; c < RULE_COLUMNS; c++) {
        m[c] += ki * s[c * dk + i];
        n[c] += qi * s[c * dk + i];
      }
    }
    float q_factor = scale / sqrtf(warp_sum(qq) + L2_EPS), k_factor = 1.0f / sqrtf(warp_sum(kk) + L2_EPS);
    qk = warp_sum(qk) * q_factor * k_factor;
    float decay = expf(g[r * heads.value_heads + head]), b = beta[r * heads.value_heads + head];
#pragma unroll
    for (int c = 0; c < RULE_COLUMNS; c++) {
      float value = c < columns ? to_f32(v[c]) : 0.0f;
      float delta = b * (value - decay * k_factor * warp_sum(m[c]));
      float o = decay * q_factor * warp_sum(n[c]) + qk * delta;
      if (lane == 0 && c < columns) out[r * value_width(heads) + int64_t(head) * dv + column + c] = round_to<T>(o);
      delta *= k_factor;
      for (int i = lane; i < dk; i += WARP) s[c * dk + i] = s[c * dk + i] * decay + keys[i] * delta;
    }
  }
  for (int i = lane; i < dk; i += WARP)
    for (int c = 0; c < columns; c++) to[at + int64_t(i) * dv + c] = round_to<S>(s[c * dk + i]);
}

// Those rows and columns of a sequence that does not run.
template <class T>
DEVICE void rule_fill(Heads heads, T* out, int head, int column, int first, int count, float value) {
  int columns = min(RULE_COLUMNS, heads.value_dim - column);
  for (int t = threadIdx.x & 31; t < count; t += WARP) {
    T* row = out + int64_t(first + t) * value_width(heads) + int64_t(head) * heads.value_dim + column;
    for (int c = 0; c < columns; c++) row[c] = round_to<T>(value);
  }
}

#endif
