// F32x16: sixteen floats as one value, over AVX-512, AVX2 or plain C++. Every operation is exact
// per lane (IEEE, round to nearest even), so all three give the same bits. Include it only from
// sources built by cpu_simd_library, which defines LOCKSTEP_ISA and
// LOCKSTEP_ISA_{AVX512,AVX2,GENERIC}.
#pragma once

#include <cstddef>
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
  const __m512i i = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
  return {_mm512_i32gather_ps(i, table, 4)};
}
// Sixteen E4M3 bytes (no NaN codes) as floats: as halves with the exponent 8 too small, then times
// 2^8.
inline F32x16 DecodeE4M3(__m128i bytes) {
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                     _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {_mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f))};
}
inline F32x16 LoadE4M3(const uint8_t* p) {
  return DecodeE4M3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Sixteen bytes of two E2M1 codes each: `low` gets the values of the low nibbles.
inline void DecodeE2M1(__m128i bytes, F32x16* low, F32x16* high) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m512i codes = _mm512_cvtepu8_epi32(bytes);
  // The permutation reads the low four bits of each index only.
  low->v = _mm512_permutexvar_ps(codes, table);
  high->v = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
}
inline void LoadE2M1(const uint8_t* p, F32x16* low, F32x16* high) {
  DecodeE2M1(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), low, high);
}

// The first n lanes; the others are zero and their memory is not read.
inline __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline F32x16 LoadLanes(const float* p, int n) { return {_mm512_maskz_loadu_ps(FirstLanes(n), p)}; }
inline F32x16 LoadBF16Lanes(const uint16_t* p, int n) {
  const __m256i h = _mm256_maskz_loadu_epi16(FirstLanes(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline F32x16 LoadE4M3Lanes(const uint8_t* p, int n) {
  return DecodeE4M3(_mm_maskz_loadu_epi8(FirstLanes(n), p));
}
inline void LoadE2M1Lanes(const uint8_t* p, int n, F32x16* low, F32x16* high) {
  DecodeE2M1(_mm_maskz_loadu_epi8(FirstLanes(n), p), low, high);
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
inline F32x16 Add(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32x16 Sub(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32x16 Mul(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
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
inline F32x16 LoadE4M3(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                     _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256 scale = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), scale),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), scale)};
}
// The float of the code in the low four bits of each lane.
inline __m256 DecodeE2M1(__m256i codes) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  // The permutation reads the low three bits of each index only.
  return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign));
}
inline void LoadE2M1(const uint8_t* p, F32x16* low, F32x16* high) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i a = _mm256_cvtepu8_epi32(bytes);
  const __m256i b = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
  *low = {DecodeE2M1(a), DecodeE2M1(b)};
  *high = {DecodeE2M1(_mm256_srli_epi32(a, 4)), DecodeE2M1(_mm256_srli_epi32(b, 4))};
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
inline F32x16 LoadE4M3(const uint8_t* p) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits =
        (static_cast<uint32_t>(p[i] & 0x80) << 24) | (static_cast<uint32_t>(p[i] & 0x7f) << 20);
    std::memcpy(&r.v[i], &bits, 4);
    r.v[i] *= 0x1p120f;  // the exponent's bias is 127 - 7 too small
  }
  return r;
}
inline void LoadE2M1(const uint8_t* p, F32x16* low, F32x16* high) {
  static constexpr float kTable[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int i = 0; i < 16; ++i) {
    low->v[i] = kTable[p[i] & 15];
    high->v[i] = kTable[p[i] >> 4];
  }
}

#endif

#if !defined(LOCKSTEP_ISA_AVX512)

inline F32x16 LoadLanes(const float* p, int n) {
  float lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * 4);
  return Load(lanes);
}
inline F32x16 LoadBF16Lanes(const uint16_t* p, int n) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * 2);
  return LoadBF16(lanes);
}
inline F32x16 LoadE4M3Lanes(const uint8_t* p, int n) {
  uint8_t lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n));
  return LoadE4M3(lanes);
}
inline void LoadE2M1Lanes(const uint8_t* p, int n, F32x16* low, F32x16* high) {
  uint8_t lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n));
  LoadE2M1(lanes, low, high);
}

#endif

// The first n lanes, as they are or rounded to bfloat16 (ties to even; a NaN stays a quiet NaN).
#if defined(LOCKSTEP_ISA_AVX512)

inline void StoreLanes(float* p, F32x16 a, int n) { _mm512_mask_storeu_ps(p, FirstLanes(n), a.v); }
inline __m256i RoundToBF16(F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i number = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i nan = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(number, is_nan, nan));
}
inline void StoreBF16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), RoundToBF16(a));
}
inline void StoreBF16Lanes(uint16_t* p, F32x16 a, int n) {
  _mm256_mask_storeu_epi16(p, FirstLanes(n), RoundToBF16(a));
}

#else

inline void StoreLanes(float* p, F32x16 a, int n) {
  float lanes[16];
  Store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(n) * 4);
}
#if defined(LOCKSTEP_ISA_AVX2)
// Eight results in the lower halves of the lanes.
inline __m256i RoundToBF16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i number = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(number, nan, is_nan);
}
inline void RoundToBF16(F32x16 x, uint16_t* rounded) {
  // Packing takes turns between the halves of its operands.
  const __m256i packed = _mm256_packus_epi32(RoundToBF16(x.a), RoundToBF16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), _mm256_permute4x64_epi64(packed, 0xd8));
}
#else
inline void RoundToBF16(F32x16 a, uint16_t* rounded) {
  uint32_t bits[16];
  float lanes[16];
  Store(lanes, a);
  std::memcpy(bits, lanes, sizeof bits);
  for (int i = 0; i < 16; ++i) {
    const uint32_t nan = (bits[i] >> 16) | 0x40u;
    const uint32_t number = (bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16;
    rounded[i] = static_cast<uint16_t>((bits[i] & 0x7fffffffu) > 0x7f800000u ? nan : number);
  }
}
#endif
inline void StoreBF16(uint16_t* p, F32x16 a) { RoundToBF16(a, p); }
inline void StoreBF16Lanes(uint16_t* p, F32x16 a, int n) {
  uint16_t rounded[16];
  RoundToBF16(a, rounded);
  std::memcpy(p, rounded, static_cast<size_t>(n) * 2);
}

#endif

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
