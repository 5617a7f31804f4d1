// Sigmoids as accurate as the type of the result asks.
#ifndef LIB_GATES
#define LIB_GATES
#include "lib/base.cuh"

// 1 / (1 + exp(-x)) for a result that is stored as T. For f32 that is exp and division to the last place or two. For
// bf16 the hardware's 2^x and 1 / x: the argument's rounding makes it worst where x is near -88, 8e-6 relative, where
// half a unit in the last place of bf16 is 2e-3.
template <class T>
DEVICE float sigmoid_as(float x) {
#ifndef HIGHWATER_EMULATE
  if constexpr (sizeof(T) == 2) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504088896340736f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
  }
#endif
  return 1.0f / (1.0f + expf(-x));
}

// x sigmoid(x).
template <class T>
DEVICE float silu_as(float x) {
  return x * sigmoid_as<T>(x);
}

#endif
