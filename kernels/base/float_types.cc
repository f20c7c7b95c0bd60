#include "kernels/base/float_types.h"

#include <cmath>

namespace lockstep {

float F16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) return BitsToFloat(sign | 0x7f800000u | (mantissa << 13));
  return BitsToFloat(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float E4M3ToFloat(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  const uint32_t exponent = (byte >> 3) & 0xf;
  const uint32_t mantissa = byte & 7;
  if (IsE4M3Nan(byte)) return BitsToFloat(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return sign ? -magnitude : magnitude;
  }
  return BitsToFloat(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

uint8_t FloatToE4M3(float f) {
  const uint8_t sign = static_cast<uint8_t>((FloatToBits(f) >> 24) & 0x80u);
  const float magnitude = std::fabs(f);
  if (std::isnan(f)) return 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {
    // Subnormal: a multiple of 2^-9; the product is exact, nearbyint rounds ties to even.
    return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
  }
  const uint32_t bits = FloatToBits(magnitude);
  const uint32_t rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

float E2M1ToFloat(uint8_t code) {
  static constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitude[code & 7];
  return (code & 8) ? -magnitude : magnitude;
}

uint8_t FloatToE2M1(float f) {
  const uint8_t sign = static_cast<uint8_t>((FloatToBits(f) >> 28) & 8u);
  const float m = std::fabs(f);
  uint8_t code;
  if (m <= 0.25f) {
    code = 0;
  } else if (m < 0.75f) {
    code = 1;
  } else if (m <= 1.25f) {
    code = 2;
  } else if (m < 1.75f) {
    code = 3;
  } else if (m <= 2.5f) {
    code = 4;
  } else if (m < 3.5f) {
    code = 5;
  } else if (m <= 5.0f) {
    code = 6;
  } else {
    code = 7;
  }
  return sign | code;
}

}  // namespace lockstep
