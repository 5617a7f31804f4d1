// What the kernels of the experts share: how matrices are stored, where an expert is, which pairs a block has.
//
// A pair is one (token, place in its routing): pair p is of token p / k. Activations and outputs of pairs lie by pair, so
// only the order in which pairs are worked on is sorted, never the data; but for the activations of moe_hopper.cu.
#ifndef LIB_EXPERTS
#define LIB_EXPERTS
#include "lib/operand.cuh"

// How an input is quantised.
constexpr int INPUT_PLAIN = 0, INPUT_TENSOR = 1, INPUT_TOKEN = 2, INPUT_GROUP = 3, INPUT_NVFP4 = 4;

// What a pair's id leads to: a slot, nothing (the expert is absent: its slot is negative), or garbage.
constexpr int ABSENT = -1, INVALID = -2;

DEVICE int slot_of(int id, const int* table, int experts, int slots) {
  if (id < 0 || id >= experts) return INVALID;
  int slot = table[id];
  return slot < 0 ? ABSENT : slot >= slots ? INVALID : slot;
}

// A tile of at most `size` pairs of one expert.
struct PairTile {
  int expert;  // negative: this tile has no pairs
  int first;   // of the sorted pairs
  int pairs;
};

// Tile number `tile` of the sorted pairs, tiles never crossing an expert's end. Expert e's tiles are numbered from
// floor(offsets[e] / size) + e: that leaves at least ceil(pairs of e / size) numbers before those of e + 1, so a grid of
// pairs / size + experts tiles has them all, whatever the routing. `shared` is one PairTile that no one else uses until the
// next barrier; all threads of the block must call.
DEVICE PairTile pair_tile(const int* offsets, int experts, int tile, int size, PairTile* shared) {
  if (threadIdx.x == 0) shared->expert = -1;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int first = offsets[e], pairs = offsets[e + 1] - first;
    int part = tile - (first / size + e);
    if (part >= 0 && int64_t(part) * size < pairs) {
      int rest = pairs - part * size;
      *shared = PairTile{e, first + part * size, rest < size ? rest : size};
    }
  }
  __syncthreads();
  return *shared;
}

#endif
