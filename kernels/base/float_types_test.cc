#include "kernels/base/float_types.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(E4M3, EveryByteDecodesByTheFormula) {
  for (int byte = 0; byte < 256; ++byte) {
    const int e = (byte >> 3) & 15, m = byte & 7;
    const double sign = (byte & 128) ? -1.0 : 1.0;
    const float got = E4M3ToFloat(static_cast<uint8_t>(byte));
    if (e == 15 && m == 7) {
      EXPECT_TRUE(std::isnan(got)) << byte;
      continue;
    }
    const double want =
        sign * (e == 0 ? m * std::pow(2.0, -9) : (1.0 + m / 8.0) * std::pow(2.0, e - 7));
    EXPECT_EQ(got, static_cast<float>(want)) << byte;
    EXPECT_EQ(std::signbit(got), (byte & 128) != 0) << byte;
  }
}

TEST(E4M3, EveryByteRoundTrips) {
  for (int byte = 0; byte < 256; ++byte) {
    if (IsE4M3Nan(static_cast<uint8_t>(byte))) continue;
    EXPECT_EQ(FloatToE4M3(E4M3ToFloat(static_cast<uint8_t>(byte))), byte);
  }
}

// Nearest value by exhaustive search, ties to the even mantissa.
uint8_t NearestE4M3(double x) {
  int best = 0;
  double best_distance = 1e30;
  for (int byte = 0; byte < 0x7f; ++byte) {
    const double distance = std::fabs(E4M3ToFloat(static_cast<uint8_t>(byte)) - x);
    if (distance < best_distance || (distance == best_distance && byte % 2 == 0)) {
      best = byte;
      best_distance = distance;
    }
  }
  return static_cast<uint8_t>(best);
}

TEST(E4M3, EncodesToTheNearestWithTiesToEven) {
  for (int i = 0; i < 20000; ++i) {
    const float x = std::ldexp(static_cast<float>(i), -13) * (1.0f + static_cast<float>(i % 97));
    if (x > 448.0f) continue;
    ASSERT_EQ(FloatToE4M3(x), NearestE4M3(x)) << x;
    ASSERT_EQ(FloatToE4M3(-x), NearestE4M3(x) | 0x80) << x;
  }
  for (int byte = 0; byte + 1 < 0x7f; ++byte) {  // the exact midpoints
    const float tie = 0.5f * (E4M3ToFloat(static_cast<uint8_t>(byte)) +
                              E4M3ToFloat(static_cast<uint8_t>(byte + 1)));
    ASSERT_EQ(FloatToE4M3(tie), byte % 2 == 0 ? byte : byte + 1) << tie;
  }
}

TEST(E4M3, KnownVectors) {
  const struct {
    double value;
    int byte;
  } rows[] = {{448, 0x7e},       {449, 0x7e},        {470, 0x7e}, {1e9, 0x7e},     {18, 0x59},
              {17, 0x58},        {19, 0x5a},         {0.1, 0x1d}, {1.0 / 3, 0x2b}, {0x1p-6, 8},
              {7.5 * 0x1p-9, 8}, {0.75 * 0x1p-9, 1}, {0x1p-9, 1}, {0x1p-10, 0},    {-0.0, 0x80}};
  for (const auto& row : rows) {
    EXPECT_EQ(FloatToE4M3(static_cast<float>(row.value)), row.byte) << row.value;
  }
  EXPECT_EQ(FloatToE4M3(std::numeric_limits<float>::infinity()), 0x7e);
  EXPECT_EQ(FloatToE4M3(std::nanf("")), 0x7f);
}

TEST(E2M1, EveryCodeAndEveryMidpoint) {
  const float values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ(E2M1ToFloat(static_cast<uint8_t>(code)), values[code]);
    EXPECT_EQ(E2M1ToFloat(static_cast<uint8_t>(code | 8)), -values[code]);
    EXPECT_EQ(FloatToE2M1(values[code]), code);
    EXPECT_EQ(FloatToE2M1(-values[code]), code | 8);
    if (code == 7) continue;
    const float tie = 0.5f * (values[code] + values[code + 1]);
    EXPECT_EQ(FloatToE2M1(tie), code % 2 == 0 ? code : code + 1) << tie;
    EXPECT_EQ(FloatToE2M1(std::nextafterf(tie, 0)), code) << tie;
    EXPECT_EQ(FloatToE2M1(std::nextafterf(tie, 9)), code + 1) << tie;
  }
  EXPECT_EQ(FloatToE2M1(100.0f), 7);
  EXPECT_EQ(FloatToE2M1(-0.0f), 8);
}

TEST(BF16, RoundsToNearestEven) {
  EXPECT_EQ(ToBF16(1.0f).bits, 0x3f80);
  EXPECT_EQ(ToBF16(BitsToFloat(0x3f808000u)).bits, 0x3f80);  // tie, even stays
  EXPECT_EQ(ToBF16(BitsToFloat(0x3f818000u)).bits, 0x3f82);  // tie, odd goes up
  EXPECT_EQ(ToBF16(BitsToFloat(0x3f808001u)).bits, 0x3f81);
  EXPECT_EQ(ToBF16(-0.0f).bits, 0x8000);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::nanf("")))));
  EXPECT_TRUE(std::isinf(ToFloat(ToBF16(3.4e38f))));
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float f = ToFloat(BF16{static_cast<uint16_t>(bits)});
    if (std::isnan(f)) continue;
    ASSERT_EQ(ToBF16(f).bits, bits);
  }
}

TEST(F16, Decodes) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0x0001), 0x1p-24f);
  EXPECT_TRUE(std::isinf(F16ToFloat(0x7c00)));
  EXPECT_TRUE(std::isnan(F16ToFloat(0x7e00)));
}

}  // namespace
}  // namespace lockstep
