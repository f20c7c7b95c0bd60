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

#if defined(LOCKSTEP_ISA_AVX2)
// The last two levels of the trees of eight vectors, four[i] = the four sums of vector i, then
// those of vector i + 4.
inline __m256 ReduceFours(const __m256 (&four)[4]) {
  __m256 two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256 a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                       _mm256_shuffle_ps(two[0], two[1], 0xdd));
}

// Lane i of dots[n] is ReduceAdd of what sums(i) puts into its place n. The sums are taken two at a
// time: all of them do not fit into the registers.
template <int kCount, typename Sums>
inline void ReduceAddOf(const Sums& sums, F32x16 (&dots)[kCount]) {
  const auto half = [&](int first, __m256(&reduced)[kCount]) __attribute__((always_inline)) {
    __m256 four[kCount][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      F32x16 x[kCount], y[kCount];
      sums(first + i, x);
      sums(first + i + 4, y);
#pragma GCC unroll 4
      for (int n = 0; n < kCount; ++n) {
        const __m256 eight_x = _mm256_add_ps(x[n].a, x[n].b);
        const __m256 eight_y = _mm256_add_ps(y[n].a, y[n].b);
        four[n][i] = _mm256_add_ps(_mm256_permute2f128_ps(eight_x, eight_y, 0x20),
                                   _mm256_permute2f128_ps(eight_x, eight_y, 0x31));
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < kCount; ++n) reduced[n] = ReduceFours(four[n]);
  };
  __m256 low[kCount], high[kCount];
  half(0, low);
  half(8, high);
#pragma GCC unroll 4
  for (int n = 0; n < kCount; ++n) dots[n] = {low[n], high[n]};
}
#endif

// Lane i is ReduceAdd(x[i]), by the same tree: the sixteen trees go up side by side.
inline F32x16 ReduceAdd16(const F32x16 (&x)[16]) {
#if defined(LOCKSTEP_ISA_AVX512)
  // Blocks of four lanes: a vector of `eight` holds the eight sums of two inputs, one of `four` the
  // four sums of x[i], x[i + 4], x[i + 8], x[i + 12], and so on.
  __m512 four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = x[i].v, b = x[i + 4].v, c = x[i + 8].v, d = x[i + 12].v;
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  __m512 two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88),
                        _mm512_shuffle_ps(two[0], two[1], 0xdd))};
#elif defined(LOCKSTEP_ISA_AVX2)
  F32x16 sums[1];
  ReduceAddOf<1>(
      [&](int i, F32x16(&sum)[1]) __attribute__((always_inline)) { sum[0] = x[i]; }, sums);
  return sums[0];
#else
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = ReduceAdd(x[i]);
  return Load(sums);
#endif
}

inline F32x16 LoadAs(const float* p) { return Load(p); }
inline F32x16 LoadAs(const BF16* p) { return LoadBF16(reinterpret_cast<const uint16_t*>(p)); }

inline void StoreAs(float* p, F32x16 x) { Store(p, x); }
inline void StoreAs(BF16* p, F32x16 x) { StoreBF16(reinterpret_cast<uint16_t*>(p), x); }

// Lane i of dots[n] is the dot product of x[n] and row i of sixteen rows, each with sixteen lanes
// (index mod 16, ascending, one fused multiply-add each) and one tree. dim is a multiple of 16.
template <int kCount, typename T>
inline void Dots16(const T* rows, int64_t stride, const float* const (&x)[kCount], int64_t dim,
                   F32x16 (&dots)[kCount]) {
#if defined(LOCKSTEP_ISA_AVX2)
  const auto dot = [&](int i, F32x16(&sums)[kCount]) __attribute__((always_inline)) {
    const F32x16 first = LoadAs(rows + i * stride);
#pragma GCC unroll 4
    for (int n = 0; n < kCount; ++n) sums[n] = Fma(first, Load(x[n]), Zero());
    for (int64_t c = 16; c < dim; c += 16) {
      const F32x16 row = LoadAs(rows + i * stride + c);
#pragma GCC unroll 4
      for (int n = 0; n < kCount; ++n) sums[n] = Fma(row, Load(x[n] + c), sums[n]);
    }
  };
  ReduceAddOf<kCount>(dot, dots);
#else
#pragma GCC unroll 4
  for (int n = 0; n < kCount; ++n) {
    F32x16 sums[16];
    const F32x16 first = Load(x[n]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = Fma(LoadAs(rows + i * stride), first, Zero());
    for (int64_t c = 16; c < dim; c += 16) {
      const F32x16 v = Load(x[n] + c);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sums[i] = Fma(LoadAs(rows + i * stride + c), v, sums[i]);
    }
    dots[n] = ReduceAdd16(sums);
  }
#endif
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

inline F32x16 SoftplusOf(F32x16 x) {
  float f[16];
  Store(f, x);
  for (int i = 0; i < 16; ++i) f[i] = Softplus(f[i]);
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
