// The arithmetic of sampling for one token id, one source for every arm: the keyed noise of a (row,
// token id), the score that is compared, and the weight that top-p adds up.
#pragma once

#include <cstdint>

#include "kernels/base/hash.h"
#include "kernels/base/math.h"

namespace lockstep {

// The key of the noise of one row: (seed, output index) of the request, and the absolute position
// of the token that is sampled.
inline uint64_t RequestNoiseKey(uint64_t seed, uint32_t output_index) {
  return Fold64(Fold64(0, seed), output_index);
}
inline uint64_t RowNoiseKey(uint64_t request_key, int64_t position) {
  return Fold64(request_key, static_cast<uint64_t>(position));
}

// A standard Gumbel variable, -log(E) of an exponential E. E = -log(1 - v) of a uniform v on the
// grid (i + 1/2) / 2^31, which keeps the small E (the winners) to a relative 2^-24 and down to
// 2^-32.
LOCKSTEP_ALWAYS_INLINE inline float GumbelNoise(uint64_t key, uint64_t id) {
  const uint64_t x = Mix64(key + id);
  const float i = static_cast<float>(static_cast<int32_t>(x >> 33));
  const float v = i * 4.656612873077393e-10f + 2.3283064365386963e-10f;
  const float clamped = v > 0.99999994f ? 0.99999994f : v;
  return -Log(-Log1p(-clamped));
}

// The score that Gumbel-max compares. The maximum itself is exactly 0, also at tiny temperatures.
LOCKSTEP_ALWAYS_INLINE inline float ScaledLogit(float logit, float maximum, float temperature) {
  const float scaled = (logit - maximum) / temperature;
  return logit == maximum ? 0.0f : scaled;
}

// The weight of an id in top-p: its probability relative to the best id's, exp(scaled logit), in
// units of 2^-40, rounded down. Sums of integers do not depend on their order, so the nucleus is
// the same set however the vocabulary is cut and visited.
LOCKSTEP_ALWAYS_INLINE inline uint64_t NucleusWeight(float scaled) {
  return static_cast<uint64_t>(static_cast<int64_t>(Exp(scaled) * 1099511627776.0f));
}

}  // namespace lockstep
