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
LOCKSTEP_ALWAYS_INLINE inline float Exp(float x) {
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

LOCKSTEP_ALWAYS_INLINE inline float Sigmoid(float x) {
  // One exponential of a non-positive number: no overflow on either side.
  const float e = Exp(x < 0.0f ? x : -x);
  const float positive = 1.0f / (1.0f + e);
  return x < 0.0f ? e * positive : positive;
}

LOCKSTEP_ALWAYS_INLINE inline float Silu(float x) { return x * Sigmoid(x); }

// Natural logarithm of a positive normal number or infinity, about 1 ulp; 0 gives -infinity. The
// mantissa m in [sqrt(1/2), sqrt(2)) goes through 2 atanh((m - 1) / (m + 1)).
LOCKSTEP_ALWAYS_INLINE inline float Log(float x) {
  const uint32_t bits = FloatToBits(x);
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = BitsToFloat(bits - (static_cast<uint32_t>(exponent) << 23));
  const float e = static_cast<float>(exponent);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  float p = 9.09090909e-2f;
  p = __builtin_fmaf(p, s2, 1.11111111e-1f);
  p = __builtin_fmaf(p, s2, 1.42857143e-1f);
  p = __builtin_fmaf(p, s2, 2.00000000e-1f);
  p = __builtin_fmaf(p, s2, 3.33333333e-1f);
  const float twice = s + s;
  const float log_m = __builtin_fmaf(twice * s2, p, twice);
  // ln 2 in two parts; the upper one has 15 significant bits, so that e times it is exact.
  const float low = __builtin_fmaf(e, 1.42860677e-6f, log_m);
  const float y = __builtin_fmaf(e, 0.693145752f, low);
  return x != x ? x : (x == 0.0f ? -__builtin_inff() : (x == __builtin_inff() ? x : y));
}

// log(1 + x) for x > -1, a few ulp: the rounding of 1 + x is divided out.
LOCKSTEP_ALWAYS_INLINE inline float Log1p(float x) {
  const float u = 1.0f + x;
  const float d = u - 1.0f;
  const float y = Log(u) * (x / (d == 0.0f ? 1.0f : d));
  return d == 0.0f ? x : y;
}

// log(1 + exp(x)) without overflow.
LOCKSTEP_ALWAYS_INLINE inline float Softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + Log1p(Exp(x < 0.0f ? x : -x));
}

// Sine and cosine of a float angle, |x| <= 2^20, rounded once from a double result that is accurate
// to about 2^-48. Cody-Waite reduction by pi/2 in double; Taylor polynomials on [-pi/4, pi/4].
LOCKSTEP_ALWAYS_INLINE inline void SinCos(float x, float* sine, float* cosine) {
  const double a = static_cast<double>(x);
  const double shifted = a * 0.63661977236758134308 + 6755399441055744.0;
  const double n = shifted - 6755399441055744.0;
  // pi/2 in three parts; the first two have 33 significant bits, so that n times them is exact.
  double r = a - n * 1.57079632673412561417;
  r = r - n * 6.07710050630396597660e-11;
  r = r - n * 2.02226624879595063154e-21;
  const double r2 = r * r;
  double s = -7.6471637318198164759e-13;
  s = s * r2 + 1.6059043836821614599e-10;
  s = s * r2 - 2.5052108385441718775e-8;
  s = s * r2 + 2.7557319223985890653e-6;
  s = s * r2 - 1.9841269841269841270e-4;
  s = s * r2 + 8.3333333333333333333e-3;
  s = s * r2 - 1.6666666666666666667e-1;
  s = s * r2 * r + r;
  double c = 4.7794773323873852974e-14;
  c = c * r2 - 1.1470745597729724714e-11;
  c = c * r2 + 2.0876756987868098979e-9;
  c = c * r2 - 2.7557319223985890653e-7;
  c = c * r2 + 2.4801587301587301587e-5;
  c = c * r2 - 1.3888888888888888889e-3;
  c = c * r2 + 4.1666666666666666667e-2;
  c = c * r2 - 0.5;
  c = c * r2 + 1.0;
  const int64_t quadrant = static_cast<int64_t>(n) & 3;
  const double sin_value = (quadrant & 1) ? c : s;
  const double cos_value = (quadrant & 1) ? s : c;
  *sine = static_cast<float>((quadrant & 2) ? -sin_value : sin_value);
  *cosine = static_cast<float>(((quadrant + 1) & 2) ? -cos_value : cos_value);
}

}  // namespace lockstep
