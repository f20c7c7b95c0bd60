// Elementwise functions and reductions over F32x16 and over sixteen floats in memory, for sources
// built by cpu_simd_library. Each value is what kernels/base/math.h gives for it, on every
// instruction set: the loops below have independent iterations and no contraction.
#pragma once

#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/base/simd.h"

namespace lockstep {
namespace LOCKSTEP_ISA {

// Sum of the lanes by one tree: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
inline float ReduceAdd(F32x16 x) {
#if defined(LOCKSTEP_ISA_AVX512) || defined(LOCKSTEP_ISA_AVX2)
#if defined(LOCKSTEP_ISA_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#else
  const __m256 eight = _mm256_add_ps(x.a, x.b);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  }
  return x.v[0];
#endif
}

inline F32x16 LoadAs(const float* p) { return Load(p); }
inline F32x16 LoadAs(const BF16* p) { return LoadBF16(reinterpret_cast<const uint16_t*>(p)); }

inline void StoreAs(float* p, F32x16 x) { Store(p, x); }
inline void StoreAs(BF16* p, F32x16 x) {
  float f[16];
  Store(f, x);
  for (int i = 0; i < 16; ++i) p[i] = ToBF16(f[i]);
}

inline F32x16 ExpOf(F32x16 x) {
  float f[16];
  Store(f, x);
  for (int i = 0; i < 16; ++i) f[i] = Exp(f[i]);
  return Load(f);
}

inline F32x16 SigmoidOf(F32x16 x) {
  float f[16];
  Store(f, x);
  for (int i = 0; i < 16; ++i) f[i] = Sigmoid(f[i]);
  return Load(f);
}

inline F32x16 SiluOf(F32x16 x) {
  float f[16];
  Store(f, x);
  for (int i = 0; i < 16; ++i) f[i] = Silu(f[i]);
  return Load(f);
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
