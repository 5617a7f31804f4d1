// What CUDA C++ has without any header, for emulate.h: keywords, vector types and intrinsics.
#ifndef LIB_EMULATE_CUDA
#define LIB_EMULATE_CUDA

// GCC takes no standard attribute between `static` and the type, CUDA does.
#define alignas(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#ifndef __clang__
#define __restrict__ __restrict
#define __builtin_assume(condition) ((void)0)
#endif

#define EMULATED_VECTORS(T, name)                                              \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                           \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                     \
  EMULATED name##2 make_##name##2(T x, T y) { return {x, y}; }                 \
  EMULATED name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(unsigned short, ushort)
EMULATED_VECTORS(signed char, char)
EMULATED_VECTORS(unsigned char, uchar)
constexpr int warpSize = 32;

#define threadIdx (emulate::self()->thread)
#define blockIdx (emulate::self()->block->index)
#define blockDim (emulate::self()->block->threads)
#define gridDim (emulate::self()->block->grid)

EMULATED void __syncthreads() { emulate::barrier(0, 0, false); }
EMULATED int __syncthreads_count(int vote) { return emulate::barrier(0, 0, vote != 0); }
EMULATED int __syncthreads_or(int vote) { return emulate::barrier(0, 0, vote != 0) != 0; }
EMULATED int __syncthreads_and(int vote) { return emulate::barrier(0, 0, vote == 0) == 0; }
EMULATED void __syncwarp(unsigned mask = emulate::EVERY_LANE) { emulate::together(&emulate::SYNCWARP, mask, 0); }
EMULATED void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMULATED void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMULATED void __nanosleep(unsigned) { emulate::give_way(emulate::self()); }
EMULATED void __trap() { emulate::fail("__trap"); }
EMULATED long long clock64() { return (long long)__builtin_ia32_rdtsc(); }

// The lanes that have not returned: which of them would run together on a device is not known here.
EMULATED unsigned __activemask() { return emulate::self()->warp->live; }

template <class T>
EMULATED T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  unsigned lane = emulate::self()->lane;
  return emulate::shuffle(mask, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
EMULATED T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  unsigned lane = emulate::self()->lane, from = lane ^ lanes;
  return emulate::shuffle(mask, value, from <= (lane | (width - 1)) ? from : lane);
}
template <class T>
EMULATED T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  unsigned lane = emulate::self()->lane;
  return emulate::shuffle(mask, value, (lane & (width - 1)) >= by ? lane - by : lane);
}
template <class T>
EMULATED T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  unsigned lane = emulate::self()->lane;
  return emulate::shuffle(mask, value, (lane & (width - 1)) + by < unsigned(width) ? lane + by : lane);
}
EMULATED unsigned __ballot_sync(unsigned mask, int vote) {
  return unsigned(emulate::together(&emulate::BALLOT, mask, vote != 0));
}
EMULATED int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
EMULATED int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
template <class T>
EMULATED unsigned __match_any_sync(unsigned mask, T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return unsigned(emulate::together(&emulate::MATCH, mask, bits));
}
template <class T>
EMULATED unsigned __match_all_sync(unsigned mask, T value, int* all) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulate::together(&emulate::MATCH, mask, bits);
  *all = unsigned(bits >> 32) == unsigned(bits);
  return *all ? unsigned(bits) : 0;
}

#define EMULATED_REDUCE(name, T, value)                                                        \
  namespace emulate {                                                                          \
  struct name##_##T {                                                                          \
    EMULATED T of(T a, T b) { return value; }                                                  \
  };                                                                                           \
  static const Collective OP_##name##_##T{"__reduce_" #name "_sync", do_reduce<T, name##_##T>}; \
  }                                                                                            \
  EMULATED T __reduce_##name##_sync(unsigned mask, T x) {                                      \
    return T(emulate::together(&emulate::OP_##name##_##T, mask, uint64_t(x)));                 \
  }
EMULATED_REDUCE(add, unsigned, a + b)
EMULATED_REDUCE(add, int, int(unsigned(a) + unsigned(b)))
EMULATED_REDUCE(min, unsigned, a < b ? a : b)
EMULATED_REDUCE(min, int, a < b ? a : b)
EMULATED_REDUCE(max, unsigned, a > b ? a : b)
EMULATED_REDUCE(max, int, a > b ? a : b)
EMULATED_REDUCE(and, unsigned, a & b)
EMULATED_REDUCE(or, unsigned, a | b)
EMULATED_REDUCE(xor, unsigned, a ^ b)

// Real atomics: blocks run on several OS threads. The second operand converts, as it does for CUDA's overloads.
template <class T>
using emulated_same = typename std::common_type<T>::type;
template <class T>
EMULATED T atomicSub(T* p, emulated_same<T> x) { return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }
template <class T>
EMULATED T atomicAnd(T* p, emulated_same<T> x) { return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST); }
template <class T>
EMULATED T atomicOr(T* p, emulated_same<T> x) { return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST); }
template <class T>
EMULATED T atomicXor(T* p, emulated_same<T> x) { return __atomic_fetch_xor(p, x, __ATOMIC_SEQ_CST); }
template <class T>
EMULATED T atomicExch(T* p, emulated_same<T> x) {
  T old;
  __atomic_exchange(p, &x, &old, __ATOMIC_SEQ_CST);
  return old;
}
template <class T>
EMULATED T atomicCAS(T* p, emulated_same<T> expected, emulated_same<T> x) {
  __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T, class F>
EMULATED T emulated_atomic(T* p, F next) {
  T old, made;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do made = next(old);
  while (!__atomic_compare_exchange(p, &old, &made, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return old;
}
template <class T>
EMULATED T atomicAdd(T* p, emulated_same<T> x) {
  if constexpr (std::is_floating_point_v<T>) {
    return emulated_atomic(p, [x](T old) { return old + x; });
  } else {
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
  }
}
template <class T>
EMULATED T atomicMin(T* p, emulated_same<T> x) { return emulated_atomic(p, [x](T old) { return old < x ? old : x; }); }
template <class T>
EMULATED T atomicMax(T* p, emulated_same<T> x) { return emulated_atomic(p, [x](T old) { return old > x ? old : x; }); }
EMULATED unsigned atomicInc(unsigned* p, unsigned last) {
  return emulated_atomic(p, [last](unsigned old) { return old >= last ? 0u : old + 1; });
}
EMULATED unsigned atomicDec(unsigned* p, unsigned last) {
  return emulated_atomic(p, [last](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

#define EMULATED_MIN_MAX(T)                             \
  EMULATED T min(T a, T b) { return b < a ? b : a; }    \
  EMULATED T max(T a, T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
EMULATED unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
EMULATED unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
EMULATED unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
EMULATED unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
EMULATED float min(float a, float b) { return fminf(a, b); }
EMULATED float max(float a, float b) { return fmaxf(a, b); }
EMULATED double min(double a, double b) { return fmin(a, b); }
EMULATED double max(double a, double b) { return fmax(a, b); }

EMULATED int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATED int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
EMULATED int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMULATED int __ffs(int x) { return __builtin_ffs(x); }
EMULATED int __ffsll(long long x) { return __builtin_ffsll(x); }
EMULATED unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0F0F0F0Fu) | (x & 0x0F0F0F0Fu) << 4;
  return __builtin_bswap32(x);
}
EMULATED unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
EMULATED int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
EMULATED unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
EMULATED unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(bytes >> (8 * (select >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return out;
}
EMULATED unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
EMULATED unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
EMULATED int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
  return sum;
}

EMULATED unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
EMULATED int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
EMULATED float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
EMULATED float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
EMULATED long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
EMULATED double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
// A whole x of T's range, the end of the range that x is beyond, or 0 for NaN. Doubles hold all of them exactly.
template <class T>
EMULATED T emulated_integer(float x) {
  constexpr T LOW = std::is_signed_v<T> ? T(1) << (sizeof(T) * 8 - 1) : 0, HIGH = T(~LOW);
  return x != x ? T(0) : double(x) <= double(LOW) ? LOW : double(x) >= double(HIGH) ? HIGH : T(x);
}
EMULATED int __float2int_rn(float x) { return emulated_integer<int>(rintf(x)); }
EMULATED int __float2int_rz(float x) { return emulated_integer<int>(truncf(x)); }
EMULATED int __float2int_rd(float x) { return emulated_integer<int>(floorf(x)); }
EMULATED int __float2int_ru(float x) { return emulated_integer<int>(ceilf(x)); }
EMULATED unsigned __float2uint_rn(float x) { return emulated_integer<unsigned>(rintf(x)); }
EMULATED unsigned __float2uint_rz(float x) { return emulated_integer<unsigned>(truncf(x)); }
EMULATED unsigned __float2uint_rd(float x) { return emulated_integer<unsigned>(floorf(x)); }
EMULATED float __int2float_rn(int x) { return float(x); }
EMULATED float __uint2float_rn(unsigned x) { return float(x); }
EMULATED float __ll2float_rn(long long x) { return float(x); }
EMULATED float __ull2float_rn(unsigned long long x) { return float(x); }

// The C library has functions of these names, so they are macros. The approximate ones are as exact as it is.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __isnanf(x) __builtin_isnan(x)
#define __isinff(x) __builtin_isinf(x)
#define __finitef(x) __builtin_isfinite(x)
EMULATED float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMULATED float __fdividef(float a, float b) { return a / b; }
EMULATED float __fadd_rn(float a, float b) { return a + b; }
EMULATED float __fsub_rn(float a, float b) { return a - b; }
EMULATED float __fmul_rn(float a, float b) { return a * b; }
EMULATED float __fdiv_rn(float a, float b) { return a / b; }
EMULATED float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMULATED float __frcp_rn(float x) { return 1.0f / x; }
EMULATED float __fsqrt_rn(float x) { return sqrtf(x); }
EMULATED float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
EMULATED float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }

template <class T>
EMULATED T __ldg(const T* p) { return *p; }
template <class T>
EMULATED T __ldcs(const T* p) { return *p; }
template <class T>
EMULATED T __ldcg(const T* p) { return *p; }
template <class T>
EMULATED T __ldca(const T* p) { return *p; }
template <class T>
EMULATED void __stcs(T* p, emulated_same<T> x) { *p = x; }
template <class T>
EMULATED void __stcg(T* p, emulated_same<T> x) { *p = x; }

#endif
