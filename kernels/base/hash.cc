#include "kernels/base/hash.h"

#include <xxhash.h>

namespace lockstep {

uint64_t HashBytes(absl::string_view bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace lockstep
