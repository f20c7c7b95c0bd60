// The 64-bit hashes of the system: XXH3 for bytes, and the mixer that digests are built from.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/base/float_types.h"

namespace lockstep {

// XXH3-64 of bytes.
uint64_t HashBytes(absl::string_view bytes, uint64_t seed = 0);

// Finalizer of SplitMix64: a bijection of 64-bit words with full avalanche.
// Always inlined: sources for different instruction sets must not share one copy.
LOCKSTEP_ALWAYS_INLINE inline uint64_t Mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Ordered fold: Fold(Fold(0, a), b) differs from Fold(Fold(0, b), a).
inline uint64_t Fold64(uint64_t accumulator, uint64_t value) {
  return Mix64(accumulator ^ Mix64(value)) + value;
}

}  // namespace lockstep
