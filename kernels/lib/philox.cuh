// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and the values made of its
// words: as src/num/philox.rs, bit for bit. Integer arithmetic but for the last line of each value.
#ifndef LIB_PHILOX
#define LIB_PHILOX
#include "lib/base.cuh"

// The four words of block (c0, c1, c2, c3) under the key (k0, k1).
DEVICE Words4 philox4x32(uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0;
    uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words4{{c0, c1, c2, c3}};
}

// In [0, 1), with 24 bits.
DEVICE float uniform(uint32_t word) { return float(word >> 8) * (1.0f / 16777216.0f); }

// The sum of a word's four bytes.
DEVICE uint32_t byte_sum(uint32_t word) {
#ifdef HIGHWATER_EMULATE
  return (word & 0xFFu) + (word >> 8 & 0xFFu) + (word >> 16 & 0xFFu) + (word >> 24);
#else
  uint32_t sum;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(word), "r"(0x01010101u), "r"(0u));
  return sum;
#endif
}

// Near-normal, mean 0 and variance 1: the centred sum of the word's four bytes. The sum is exact and the only rounding is
// the multiplication's, so there is nothing to contract.
DEVICE float normal(uint32_t word) {
  return (float(byte_sum(word)) - 510.0f) * 0.00676587f;  // 1 / sqrt(21845), the variance of four bytes
}

#endif
