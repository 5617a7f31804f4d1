// One-line wrappers of instructions that C++ has no name for. All run on sm_80 and later unless a line says otherwise.
#ifndef LIB_PTX
#define LIB_PTX
#include "lib/base.cuh"

// The address of shared memory as the instructions take it.
DEVICE uint32_t shared_address(const void* p) {
#ifdef HIGHWATER_EMULATE
  return emulate::shared_address(p);
#else
  return uint32_t(__cvta_generic_to_shared(p));
#endif
}

// 16 bytes from global to shared memory, not through registers; `bytes` (0 or 16) are read, the rest is zeros.
DEVICE void cp_async16(void* shared, const void* global, int bytes = 16) {
#ifdef HIGHWATER_EMULATE
  emulate::copy16(shared, global, bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
#endif
}

DEVICE void cp_async_commit() {
#ifdef HIGHWATER_EMULATE
  emulate::copy_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's committed groups are unfinished; a barrier must follow.
template <int pending>
DEVICE void cp_async_wait() {
#ifdef HIGHWATER_EMULATE
  emulate::copy_wait(pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned).
// Register i of lane l then holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
#ifdef HIGHWATER_EMULATE
  emulate::ldmatrix_x4(r, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// As ldmatrix_x4, each matrix transposed.
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
#ifdef HIGHWATER_EMULATE
  emulate::ldmatrix_x4(r, row, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// d += a b. a is 16 x 16, row by row; b is 16 x 8, column by column; d is 16 x 8 f32. With g = lane / 4, t = lane % 4:
// a[0] = rows g, k 2t..; a[1] = row g + 8, k 2t..; a[2] = row g, k 2t + 8..; a[3] = row g + 8, k 2t + 8..;
// b[0] = k 2t.., column g; b[1] = k 2t + 8.., column g; d[0..2] = row g, columns 2t, 2t + 1; d[2..4] = row g + 8.
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef HIGHWATER_EMULATE
  emulate::mma_16816(d, a, b, true);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// As mma_bf16, with IEEE half operands.
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef HIGHWATER_EMULATE
  emulate::mma_16816(d, a, b, false);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Whether the compilation's arch has FP8 conversions and mma.
#if defined(HIGHWATER_EMULATE) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890)
#define HAS_FP8 1
#else
#define HAS_FP8 0
#endif

// Two e4m3 codes (low byte first) as a pair of halves, exactly; NaN stays NaN.
DEVICE uint32_t e4m3x2_to_f16x2(uint32_t pair) {
#if defined(HIGHWATER_EMULATE)
  return emulate::e4m3x2_to_f16x2(pair);
#elif HAS_FP8
  uint32_t halves;
  asm("{.reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p;}" : "=r"(halves) : "r"(pair & 0xFFFFu));
  return halves;
#else
  // Seven bits move to the top of half's exponent and mantissa; 2^8 undoes the bias. 0x7F would become 480.
  uint32_t spread = (pair & 0xFFu) << 8 | (pair & 0xFF00u) << 16;
  uint32_t halves = (spread & 0x80008000u) | (spread & 0x7F007F00u) >> 1;
  asm("mul.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x5C005C00u));
  if ((pair & 0x7Fu) == 0x7Fu) halves |= 0x7E00u;
  if ((pair & 0x7F00u) == 0x7F00u) halves |= 0x7E000000u;
  return halves;
#endif
}

#if HAS_FP8
// d += a b with e4m3 operands, 16 x 32 by 32 x 8; sm_89 and later. As mma_bf16 with four bytes where that has two halves:
// a[0] = row g, k 4t..; a[1] = row g + 8, k 4t..; a[2] = row g, k 4t + 16..; a[3] = row g + 8, k 4t + 16..;
// b[0] = k 4t.., column g; b[1] = k 4t + 16.., column g.
DEVICE void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef HIGHWATER_EMULATE
  emulate::mma_e4m3_16832(d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
#endif

// f32 to an e4m3 code, to nearest even, 448 at most; NaN gives 0x7F. The same bits on every arch.
DEVICE uint32_t f32_to_e4m3(float x) {
#if !defined(HIGHWATER_EMULATE) && HAS_FP8
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 0xFFu;
#else
  uint32_t bits = f32_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7Fu;
  if (magnitude >= 0x43E00000u) return sign | 0x7Eu;  // 448 and above
  if (magnitude < 0x3C800000u) {                      // below 2^-6: multiples of 2^-9
    float scaled = bits_f32(magnitude) * 512.0f;
    uint32_t code = uint32_t(scaled);
    float rest = scaled - float(code);
    code += rest > 0.5f || (rest == 0.5f && (code & 1u));
    return sign | code;
  }
  uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
  uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | (code > 0x7Eu ? 0x7Eu : code);
#endif
}

#endif
