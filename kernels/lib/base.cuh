// What every kernel starts from: fixed-size types, bf16, loads of 16 bytes, warp and block sums. No vendor header is
// needed, so NVRTC compiles kernels with nothing but these files. Under HIGHWATER_EMULATE a host compiler builds the same
// sources: emulate.h stands in for what the device provides.
#ifndef LIB_BASE
#define LIB_BASE

#ifdef HIGHWATER_EMULATE
#include "lib/emulate.h"
#define KERNEL extern "C" void
// Makes an entry callable with untyped arguments; nothing on a device.
#define EXPORT(name) \
  extern "C" void name##_call(void** args) { emulate::call(name, args); }
#define LAUNCH_BOUNDS(...)
#define DYNAMIC_SHARED(name) unsigned char* name = emulate::dynamic_shared()
#define DEVICE static inline
#else
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define KERNEL extern "C" __global__ void
#define EXPORT(name)
#define LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define DEVICE static __device__ __forceinline__
#endif

// Where a launch asks for overlap (sm_90 and later), the next kernel's blocks may be placed once all of this one's have come
// here. After the wait: placed while the kernels before still run, they would crowd on the multiprocessors that are free first.
DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All earlier kernels are done and what they wrote is seen: nothing of theirs may be read, or written over, before.
DEVICE void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// First in every kernel that has nothing to do before.
DEVICE void after_earlier_kernels() {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
}

#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

DEVICE uint32_t f32_bits(float x) {
#ifdef HIGHWATER_EMULATE
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
#else
  return __float_as_uint(x);
#endif
}

DEVICE float bits_f32(uint32_t u) {
#ifdef HIGHWATER_EMULATE
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
#else
  return __uint_as_float(u);
#endif
}

// The upper half of an f32. Stores round to nearest even.
struct bf16 {
  uint16_t bits;
};

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return bits_f32(uint32_t(x.bits) << 16); }

// Two f32 as a pair of bf16, `low` in the low half.
DEVICE uint32_t pack_bf16(float low, float high) {
#ifdef HIGHWATER_EMULATE
  auto round = [](float x) -> uint32_t {
    uint32_t u = f32_bits(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

DEVICE bf16 to_bf16(float x) { return bf16{uint16_t(pack_bf16(x, 0.0f))}; }

// x as T stores it.
template <class T>
struct Stored;
template <>
struct Stored<float> {
  DEVICE float of(float x) { return x; }
};
template <>
struct Stored<bf16> {
  DEVICE bf16 of(float x) { return to_bf16(x); }
};
template <class T>
DEVICE T round_to(float x) {
  return Stored<T>::of(x);
}

// The value after rounding to T, as f32.
template <class T>
DEVICE float rounded(float x) {
  return to_f32(round_to<T>(x));
}

DEVICE float bf16_low(uint32_t pair) { return bits_f32(pair << 16); }
DEVICE float bf16_high(uint32_t pair) { return bits_f32(pair & 0xFFFF0000u); }

struct alignas(16) Words4 {
  uint32_t w[4];
};
struct alignas(8) Words2 {
  uint32_t w[2];
};

// 16 bytes from an address that is a multiple of 16.
DEVICE Words4 load16(const void* p) { return *reinterpret_cast<const Words4*>(p); }
DEVICE void store16(void* p, Words4 v) { *reinterpret_cast<Words4*>(p) = v; }

// As load16, for data read once by one block: it does not displace what other blocks share from L1.
DEVICE Words4 load16_stream(const void* p) {
#ifdef HIGHWATER_EMULATE
  return load16(p);
#else
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
#endif
}

// Whether rows that start at p and are `pitch_bytes` apart can be read 16 bytes at a time.
DEVICE bool aligned16(const void* p, int64_t pitch_bytes) {
  return ((uint64_t(p) | uint64_t(pitch_bytes)) & 15u) == 0;
}

// e4m3 (no infinities, 0x7F and 0xFF are NaN) to f32, exactly, on every arch: the exponent moves, 2^120 undoes the bias.
DEVICE float e4m3_to_f32(uint32_t code) {
  uint32_t magnitude = code & 0x7Fu;
  float value = bits_f32(magnitude << 20) * bits_f32(0x7B800000u);  // 2^120
  if (magnitude == 0x7Fu) value = bits_f32(0x7FC00000u);
  return (code & 0x80u) ? -value : value;
}

// e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign) to f32, exactly.
DEVICE float e2m1_to_f32(uint32_t code) {
  float value = bits_f32((code & 7u) << 22) * bits_f32(0x7E800000u);  // 2^126
  return (code & 8u) ? -value : value;
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}

// Over all threads of a block of whole warps, at most 1024; every thread gets the result. `scratch` is shared memory of 32
// floats that no one else uses until the next barrier. The order is fixed: lanes, then warps.
DEVICE float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

DEVICE float block_max(float x, float* scratch) {
  x = warp_max(x);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? scratch[lane] : bits_f32(0xFF800000u));
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

#endif
