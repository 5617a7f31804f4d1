// The draw: lanes compete by e^(t - most) / E, with t the logit at temperature, `most` the largest t, and E the exponential
// variate of (seed, step, id); the largest score wins, of equal ones the lower id. As src/ops/reference/sampler.rs, bit for
// bit, in a file that is compiled without contraction.
#ifndef LIB_RACE
#define LIB_RACE
#include "lib/base.cuh"
#include "lib/elementary.cuh"
#include "lib/philox.cuh"
#include "lib/select.cuh"

// Fourth counter word of every draw.
constexpr uint32_t DRAW = 0x73616D70u;

// One IEEE division; an overflow stays the largest number, so that differences of two are no NaN.
DEVICE float tempered(float z, float temperature) { return fminf(fmaxf(z / temperature, -LARGEST), LARGEST); }

// The bits below the largest mass, so that a row's masses sum to less than 2^63.
DEVICE int mass_shift(int lanes) { return 62 - (31 - __clz(lanes)); }

// e in 0..=1 as an integer of 2^-shift, cut.
DEVICE uint64_t mass_of(float e, int shift) {
  uint32_t bits = f32_bits(e);
  int by = int(bits >> 23) - 150 + shift;
  uint32_t digits = (bits & 0x007FFFFFu) | 0x00800000u;
  if (by >= 0) return uint64_t(digits) << by;
  return by > -32 ? digits >> -by : 0;
}

// One row's race, as one thread sees it.
struct Race {
  float temperature, most;
  uint32_t seed[2], step[2];
  float inverse, base;  // of the estimate from above: e^(z inverse - base)
  uint64_t best;        // this thread's winner: score, then inverted id
  float bar;            // a score that some kept lane has
};

DEVICE float race_score(const Race& race, float z, uint32_t high, uint32_t low) {
  float e = exact_exp(tempered(z, race.temperature) - race.most);
  return e / exponential(uint64_t(high) << 32 | low);
}

// The exact score of a lane enters it for this thread.
DEVICE void race_exactly(Race& race, float z, uint32_t id, uint32_t high, uint32_t low) {
  uint64_t key = uint64_t(f32_bits(race_score(race, z, high, low))) << 32 | ~id;
  race.best = key > race.best ? key : race.best;
}

DEVICE Words4 race_words(const Race& race, uint32_t block) {
  return philox4x32(race.seed[0], race.seed[1], block, race.step[0], race.step[1], DRAW);
}

DEVICE void race_lane(Race& race, float z, uint32_t id) {
  Words4 words = race_words(race, id / 2);
  race_exactly(race, z, id, id & 1 ? words.w[2] : words.w[0], id & 1 ? words.w[3] : words.w[1]);
}

// `best` is the row's largest lane and `most` what the temperature makes of it. It is kept whatever the filters are, so its
// score is a bar for all.
DEVICE Race race_of(float temperature, const uint32_t* seed, const uint32_t* step, float best, uint32_t best_id, float most) {
  Race race;
  race.temperature = temperature;
  race.most = most;
  for (int i = 0; i < 2; ++i) {
    race.seed[i] = seed[i];
    race.step[i] = step[i];
  }
  // The estimate's product and difference are within 2e-7 of |t| <= |most| + 87, its exponential within 1e-5; where that
  // is no bound at all, nothing is below the estimate.
  race.inverse = 1.0f / temperature;
  float off = 4e-5f + 1e-6f * (fabsf(most) + 90.0f);
  race.base = off < 0.5f ? most - off : -INFINITE;
  race.best = 0;
  race_lane(race, best, best_id);
  race.bar = bits_f32(uint32_t(race.best >> 32));
  race.best = 0;
  return race;
}

// Lets a lane compete. E >= u of the random bits, so most lanes are seen to lose against `bar` without their exact score.
DEVICE void race_estimated(Race& race, float z, uint32_t id, uint32_t high, uint32_t low) {
  float u = bits_f32(0x3F800000u | high >> 9) - 1.0f;
  float above = __expf(z * race.inverse - race.base);
  if (!(above < race.bar * u)) race_exactly(race, z, id, high, low);
}

// Raises the bar to what a lane of the warp has reached. All its lanes call.
DEVICE void raise_bar(Race& race) {
  float own = bits_f32(uint32_t(race.best >> 32));
  if (__any_sync(ALL_LANES, own > race.bar)) race.bar = fmaxf(race.bar, warp_max(own));
}

// Lets the lanes of a vector compete that are in `in`, pair by pair: two ids share random words. They go through `own`, the
// thread's place in shared memory, so that one copy of the code serves all pairs. All lanes of the warp call; ids start even.
template <int N>
DEVICE void race_vector(Race& race, uint32_t id, const float (&z)[N], uint32_t in, float* own) {
#pragma unroll
  for (int i = 0; i < N; ++i) own[i] = z[i];
#pragma unroll 1
  for (int i = 0; i < N; i += 2) {
    if ((in >> i & 3u) == 0) continue;
    Words4 words = race_words(race, (id + i) / 2);
    if (in >> i & 1u) race_estimated(race, own[i], id + i, words.w[0], words.w[1]);
    if (in >> i & 2u) race_estimated(race, own[i + 1], id + i + 1, words.w[2], words.w[3]);
  }
  raise_bar(race);
}

#endif
