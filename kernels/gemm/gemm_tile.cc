// Transposes up to sixteen rows of x: values are copied, so every instruction set gives the same.
#include "kernels/gemm/gemm_tile.h"

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

#if defined(LOCKSTEP_ISA_AVX512)

// Lane t of rows[c] and lane c of rows[t] change places.
inline void Transpose(__m512 (&rows)[16]) {
  // Four rows at a time: u[4 * g + c] has columns c, c + 4, c + 8, c + 12 of rows 4 * g to
  // 4 * g + 3, one block of four lanes each.
  __m512 u[16];
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    const __m512d low_a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[g], rows[g + 1]));
    const __m512d low_b = _mm512_castps_pd(_mm512_unpacklo_ps(rows[g + 2], rows[g + 3]));
    const __m512d high_a = _mm512_castps_pd(_mm512_unpackhi_ps(rows[g], rows[g + 1]));
    const __m512d high_b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[g + 2], rows[g + 3]));
    u[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_a, low_b));
    u[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_a, low_b));
    u[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_a, high_b));
    u[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_a, high_b));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 ab_low = _mm512_shuffle_f32x4(u[c], u[c + 4], 0x44);
    const __m512 ab_high = _mm512_shuffle_f32x4(u[c], u[c + 4], 0xee);
    const __m512 cd_low = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0x44);
    const __m512 cd_high = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0xee);
    rows[c] = _mm512_shuffle_f32x4(ab_low, cd_low, 0x88);
    rows[c + 4] = _mm512_shuffle_f32x4(ab_low, cd_low, 0xdd);
    rows[c + 8] = _mm512_shuffle_f32x4(ab_high, cd_high, 0x88);
    rows[c + 12] = _mm512_shuffle_f32x4(ab_high, cd_high, 0xdd);
  }
}

// Columns in blocks of sixteen. How many columns that were.
template <typename T>
int64_t FillBlocks(const T* x, int64_t stride, int64_t tokens, int64_t k, float* out) {
  int64_t c = 0;
  for (; c + 16 <= k; c += 16) {
    __m512 rows[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      rows[t] = t < tokens ? LoadAs(x + t * stride + c).v : _mm512_setzero_ps();
    }
    Transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      StoreLanes(out + (c + i) * tokens, {rows[i]}, static_cast<int>(tokens));
    }
  }
  return c;
}

#elif defined(LOCKSTEP_ISA_AVX2)

// Lane t of rows[c] and lane c of rows[t] change places.
inline void Transpose(__m256 (&rows)[8]) {
  // Four rows at a time: u[4 * g + c] has columns c and c + 4 of rows 4 * g to 4 * g + 3.
  __m256 u[8];
#pragma GCC unroll 2
  for (int g = 0; g < 8; g += 4) {
    const __m256d low_a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[g], rows[g + 1]));
    const __m256d low_b = _mm256_castps_pd(_mm256_unpacklo_ps(rows[g + 2], rows[g + 3]));
    const __m256d high_a = _mm256_castps_pd(_mm256_unpackhi_ps(rows[g], rows[g + 1]));
    const __m256d high_b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[g + 2], rows[g + 3]));
    u[g] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_a, low_b));
    u[g + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_a, low_b));
    u[g + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_a, high_b));
    u[g + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_a, high_b));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(u[c], u[c + 4], 0x20);
    rows[c + 4] = _mm256_permute2f128_ps(u[c], u[c + 4], 0x31);
  }
}

inline __m256 LoadEight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 LoadEight(const BF16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Blocks of eight columns and up to eight rows. How many columns that were.
template <typename T>
int64_t FillBlocks(const T* x, int64_t stride, int64_t tokens, int64_t k, float* out) {
  int64_t c = 0;
  for (; c + 8 <= k; c += 8) {
    for (int64_t begin = 0; begin < tokens; begin += 8) {
      const int64_t count = tokens - begin < 8 ? tokens - begin : 8;
      __m256 rows[8];
#pragma GCC unroll 8
      for (int t = 0; t < 8; ++t) {
        rows[t] = t < count ? LoadEight(x + (begin + t) * stride + c) : _mm256_setzero_ps();
      }
      Transpose(rows);
      float* to = out + c * tokens + begin;
      if (count == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + i * tokens, rows[i]);
        continue;
      }
      const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                                               _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm256_maskstore_ps(to + i * tokens, lanes, rows[i]);
    }
  }
  return c;
}

#else

template <typename T>
int64_t FillBlocks(const T*, int64_t, int64_t, int64_t, float*) {
  return 0;
}

#endif

template <typename T>
void Fill(const T* x, int64_t stride, int64_t tokens, int64_t k, float* out) {
  int64_t begin = 0;
  if (tokens == 1) {
    for (; begin + 16 <= k; begin += 16) Store(out + begin, LoadAs(x + begin));
  } else {
    begin = FillBlocks(x, stride, tokens, k, out);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = begin; c < k; ++c) out[c * tokens + t] = ToFloat(x[t * stride + c]);
  }
}

}  // namespace

void FillTile(const void* x, bool bf16, int64_t stride, int64_t tokens, int64_t k, float* out) {
  bf16 ? Fill(static_cast<const BF16*>(x), stride, tokens, k, out)
       : Fill(static_cast<const float*>(x), stride, tokens, k, out);
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
