// Rows by index: copies, widened where the rows are bf16 and the result is f32. An index outside the table gives a row
// of NaN, since a device cannot give an error.
#include "lib/vector.cuh"

// out[i] = table[indices[i]], rows of `cols` elements.
template <class A, class B>
DEVICE void gather(const A* table, const int* indices, B* out, int64_t table_rows, int64_t n, int64_t cols, int shift) {
  constexpr int V = PER16<A>;
  RowShare share = row_share(shift);
  if (share.row >= n) return;
  int64_t index = indices[share.row];
  bool inside = index >= 0 && index < table_rows;
  const A* from = table + (inside ? index : 0) * cols;
  B* to = out + share.row * cols;
  const uint32_t nan = sizeof(A) == 2 ? 0x7FC07FC0u : 0x7FC00000u;
  if (whole_runs<V>(table, cols, cols) && whole_runs<V>(out, cols, cols)) {
    for (int64_t u = share.first; u < cols / V; u += share.step) {
      Words4 run = {{nan, nan, nan, nan}};
      if (inside) run = load16(from + u * V);
      if constexpr (sizeof(A) == sizeof(B)) {
        store16(to + u * V, run);
      } else {
        float x[V];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[2 * i] = bf16_low(run.w[i]);
          x[2 * i + 1] = bf16_high(run.w[i]);
        }
        store_run(to + u * V, x);
      }
    }
  } else {
    for (int64_t c = share.first; c < cols; c += share.step) {
      to[c] = round_to<B>(inside ? to_f32(from[c]) : bits_f32(0x7FC00000u));
    }
  }
}

KERNEL LAUNCH_BOUNDS(256) gather_f32(const float* table, const int* indices, float* out, int64_t table_rows, int64_t n,
                                     int64_t cols, int shift) {
  after_earlier_kernels();
  gather(table, indices, out, table_rows, n, cols, shift);
}
EXPORT(gather_f32)

KERNEL LAUNCH_BOUNDS(256) gather_bf16(const bf16* table, const int* indices, bf16* out, int64_t table_rows, int64_t n,
                                      int64_t cols, int shift) {
  after_earlier_kernels();
  gather(table, indices, out, table_rows, n, cols, shift);
}
EXPORT(gather_bf16)

KERNEL LAUNCH_BOUNDS(256) gather_bf16_f32(const bf16* table, const int* indices, float* out, int64_t table_rows,
                                          int64_t n, int64_t cols, int shift) {
  after_earlier_kernels();
  gather(table, indices, out, table_rows, n, cols, shift);
}
EXPORT(gather_bf16_f32)
