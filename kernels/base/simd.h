// F32x16: sixteen floats as one value, over AVX-512, AVX2 or plain C++. Every operation is exact per
// lane (IEEE, round to nearest even), so all three give the same bits. Include it only from sources
// built by cpu_simd_library, which defines LOCKSTEP_ISA and LOCKSTEP_ISA_{AVX512,AVX2,GENERIC}.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(LOCKSTEP_ISA_AVX512) || defined(LOCKSTEP_ISA_AVX2)
#include <immintrin.h>
#endif

namespace lockstep {
namespace LOCKSTEP_ISA {

#if defined(LOCKSTEP_ISA_AVX512)

struct F32x16 {
  __m512 v;
};
inline F32x16 Zero() { return {_mm512_setzero_ps()}; }
inline F32x16 Set(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void Store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
// a * b + c with one rounding.
inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Sixteen bfloat16 values (as uint16_t) widened.
inline F32x16 LoadBF16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// table[index[i]] for sixteen byte indices into a table of 256 floats.
inline F32x16 Lookup256(const float* table, const uint8_t* index) {
  const __m512i i =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
  return {_mm512_i32gather_ps(i, table, 4)};
}

#elif defined(LOCKSTEP_ISA_AVX2)

struct F32x16 {
  __m256 a, b;
};
inline F32x16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void Store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F32x16 Add(F32x16 x, F32x16 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline F32x16 Sub(F32x16 x, F32x16 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline F32x16 Mul(F32x16 x, F32x16 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline F32x16 Fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F32x16 LoadBF16(const uint16_t* p) {
  const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
}
inline F32x16 Lookup256(const float* table, const uint8_t* index) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
  const __m256i lo = _mm256_cvtepu8_epi32(bytes);
  const __m256i hi = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
  return {_mm256_i32gather_ps(table, lo, 4), _mm256_i32gather_ps(table, hi, 4)};
}

#else

struct F32x16 {
  float v[16];
};
inline F32x16 Zero() { return {}; }
inline F32x16 Set(float x) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline F32x16 Load(const float* p) {
  F32x16 r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void Store(float* p, F32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F32x16 Add(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
inline F32x16 Sub(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
  return a;
}
inline F32x16 Mul(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
  return a;
}
inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  for (int i = 0; i < 16; ++i) a.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline F32x16 LoadBF16(const uint16_t* p) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline F32x16 Lookup256(const float* table, const uint8_t* index) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = table[index[i]];
  return r;
}

#endif

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
