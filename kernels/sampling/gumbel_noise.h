// The keyed noise of one (row, token id): a standard Gumbel variable, -log(E) of an exponential E.
#pragma once

#include <cstdint>

#include "kernels/base/hash.h"
#include "kernels/base/math.h"

namespace lockstep {

// E = -log(1 - v) of a uniform v on the grid (i + 1/2) / 2^31, which keeps the small E (the
// winners) to a relative 2^-24 and down to 2^-32.
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

}  // namespace lockstep
