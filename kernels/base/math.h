// Elementary functions of the CPU arm, written out so that every build and every thread gives the
// same bits: no libm, no contraction, every fused multiply-add explicit. Scalar code in a form that
// the compiler may vectorize without changing a bit. Maximum error of each is in its comment.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/float_types.h"

namespace lockstep {

// exp(x), about 1 ulp. Below -87.3 gives 0, above 88.7 infinity. Cody-Waite reduction by ln 2, then
// a degree-7 polynomial on [-ln2/2, ln2/2].
inline float Exp(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const float shifted = __builtin_fmaf(clamped, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = __builtin_fmaf(n, -0.693145752f, clamped);
  r = __builtin_fmaf(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;
  p = __builtin_fmaf(p, r, 1.38888889e-3f);
  p = __builtin_fmaf(p, r, 8.33333333e-3f);
  p = __builtin_fmaf(p, r, 4.16666667e-2f);
  p = __builtin_fmaf(p, r, 1.66666667e-1f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const int32_t exponent = static_cast<int32_t>(n);
  // Two factors, so that n = 128 does not overflow the exponent field.
  const int32_t half = exponent >> 1;
  const float scale_a = BitsToFloat(static_cast<uint32_t>(half + 127) << 23);
  const float scale_b = BitsToFloat(static_cast<uint32_t>(exponent - half + 127) << 23);
  const float y = p * scale_a * scale_b;
  return x != x ? x : (x < -87.3f ? 0.0f : (x > 88.7f ? __builtin_inff() : y));
}

inline float Sigmoid(float x) {
  // One exponential of a non-positive number: no overflow on either side.
  const float e = Exp(x < 0.0f ? x : -x);
  const float positive = 1.0f / (1.0f + e);
  return x < 0.0f ? e * positive : positive;
}

inline float Silu(float x) { return x * Sigmoid(x); }

}  // namespace lockstep
