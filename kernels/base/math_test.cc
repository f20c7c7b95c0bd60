#include "kernels/base/math.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(Exp, IsWithinTwoUlpOfTheExactValue) {
  double worst = 0;
  for (int i = -870000; i <= 887000; i += 7) {
    const float x = static_cast<float>(i) * 1e-4f;
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
    worst = std::max(worst, std::fabs(Exp(x) - want) / ulp);
  }
  EXPECT_LT(worst, 2.0);
}

TEST(Exp, EdgesAreDefined) {
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-1000.0f), 0.0f);
  EXPECT_EQ(Exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isinf(Exp(1000.0f)));
  EXPECT_TRUE(std::isnan(Exp(std::nanf(""))));
}

TEST(Sigmoid, MatchesDoubleOnBothSides) {
  for (float x = -30; x < 30; x += 0.37f) {
    const double want = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
    EXPECT_NEAR(Sigmoid(x), want, 3e-7 * want) << x;
  }
  EXPECT_EQ(Sigmoid(-200.0f), 0.0f);
  EXPECT_EQ(Sigmoid(200.0f), 1.0f);
}

TEST(Log, IsWithinTwoUlpOfTheExactValue) {
  double worst = 0;
  for (uint32_t bits = 0x00800000u; bits < 0x7f800000u; bits += 9973) {
    const float x = BitsToFloat(bits);
    const double want = std::log(static_cast<double>(x));
    const double ulp = want == 0 ? 1e-30 : std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::fabs(Log(x) - want) / ulp);
  }
  EXPECT_LT(worst, 2.0);
  EXPECT_EQ(Log(1.0f), 0.0f);
  EXPECT_EQ(Log(0.0f), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isinf(Log(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(Log(std::nanf(""))));
}

TEST(Log1p, KeepsSmallArguments) {
  for (float x : {-0.99999994f, -0.5f, -1e-3f, -1e-9f, 0.0f, 1e-20f, 1e-7f, 3e-4f, 0.7f, 1.0f}) {
    const double want = std::log1p(static_cast<double>(x));
    EXPECT_NEAR(Log1p(x), want, 4e-7 * std::fabs(want)) << x;
  }
}

TEST(Softplus, MatchesDoubleOnBothSides) {
  for (float x = -80; x < 80; x += 0.37f) {
    const double want =
        std::log1p(std::exp(-std::fabs(static_cast<double>(x)))) + std::max(x, 0.0f);
    EXPECT_NEAR(Softplus(x), want, 5e-7 * want) << x;
  }
}

TEST(SinCos, AreWithinOneUlpForAnglesOfLongContexts) {
  for (int i = 0; i < 400000; ++i) {
    const float x = static_cast<float>(i) * 2.6173f;
    float s, c;
    SinCos(x, &s, &c);
    ASSERT_NEAR(s, std::sin(static_cast<double>(x)), 6.1e-8 * std::fabs(s) + 1e-14) << x;
    ASSERT_NEAR(c, std::cos(static_cast<double>(x)), 6.1e-8 * std::fabs(c) + 1e-14) << x;
  }
  float s, c;
  SinCos(-0.5f, &s, &c);
  EXPECT_NEAR(s, std::sin(-0.5), 3e-8);
  EXPECT_NEAR(c, std::cos(-0.5), 6e-8);
}

}  // namespace
}  // namespace lockstep
