// Bit-exact conversions between float and the small float types: BF16, F16, E4M3 (FP8) and E2M1
// (FP4). All encoders round to nearest, ties to even. Formats: OCP FP8 and OCP MX specifications.
#pragma once

#include <cstdint>
#include <cstring>

// Inlined wherever it is used: sources for different instruction sets must not share one copy. In
// CUDA sources these functions are there for the device too and give the same bits.
#if defined(__CUDACC__)
#define LOCKSTEP_ALWAYS_INLINE __host__ __device__ __attribute__((always_inline))
#else
#define LOCKSTEP_ALWAYS_INLINE __attribute__((always_inline))
#endif

namespace lockstep {

LOCKSTEP_ALWAYS_INLINE inline float BitsToFloat(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

LOCKSTEP_ALWAYS_INLINE inline uint32_t FloatToBits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

// A bfloat16 in memory: the upper half of a float.
struct BF16 {
  uint16_t bits;
};

LOCKSTEP_ALWAYS_INLINE inline float ToFloat(float f) { return f; }
LOCKSTEP_ALWAYS_INLINE inline float ToFloat(BF16 b) {
  return BitsToFloat(static_cast<uint32_t>(b.bits) << 16);
}

// Rounds to nearest even. A NaN stays a (quiet) NaN; values beyond the range become infinity.
LOCKSTEP_ALWAYS_INLINE inline BF16 ToBF16(float f) {
  const uint32_t bits = FloatToBits(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return BF16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds f to T and gives the result: Round<float> is the identity.
template <typename T>
T FromFloat(float f);
template <>
LOCKSTEP_ALWAYS_INLINE inline float FromFloat<float>(float f) {
  return f;
}
template <>
LOCKSTEP_ALWAYS_INLINE inline BF16 FromFloat<BF16>(float f) {
  return ToBF16(f);
}

// IEEE half precision, decode only (scales of some exports).
float F16ToFloat(uint16_t bits);

// E4M3FN: exact value of a byte; 0x7F and 0xFF give NaN.
float E4M3ToFloat(uint8_t byte);
inline bool IsE4M3Nan(uint8_t byte) { return (byte & 0x7f) == 0x7f; }
// Saturates at +-448 (0x7E / 0xFE); NaN gives 0x7F. The sign of zero is kept.
uint8_t FloatToE4M3(float f);

// E2M1: value of a 4-bit code (bit 3 is the sign; code 8 is -0).
float E2M1ToFloat(uint8_t code);
// Saturates at +-6; ties to even; NaN saturates to 6 with its sign. The sign of zero is kept.
uint8_t FloatToE2M1(float f);

}  // namespace lockstep
