// The arithmetic of activation quantization, one source for every arm: safe to include under any
// instruction set and in CUDA sources.
#pragma once

#include <cstdint>

#include "kernels/base/float_types.h"

namespace lockstep {

// The E4M3 code nearest to f, ties to even, saturating at +-448; a NaN gives 0x7f.
LOCKSTEP_ALWAYS_INLINE inline uint32_t E4M3Code(float f) {
  const uint32_t bits = FloatToBits(f);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, the last bit of a float near 2^14.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 16384.0f) - FloatToBits(16384.0f);
  uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  code = magnitude >= 0x43e00000u ? 0x7eu : code;
  code |= sign;
  return magnitude > 0x7f800000u ? 0x7fu : code;
}

// The scale of a group whose largest magnitude is amax; `scale_rule` is that of QuantizeRowArgs, 1
// or 2. The reference divides by 448 as a multiplication with its rounded reciprocal: a division
// differs in the last bit of about half of all scales.
LOCKSTEP_ALWAYS_INLINE inline float DynamicScale(int scale_rule, float amax) {
  constexpr float kReciprocal448 = 1.0f / 448.0f;
  if (scale_rule == 1) {
    const float scale = amax * kReciprocal448;
    const float floor = kReciprocal448 / 512.0f;
    return scale < floor ? floor : scale;
  }
  return (amax < 1e-10f ? 1e-10f : amax) * kReciprocal448;
}

}  // namespace lockstep
