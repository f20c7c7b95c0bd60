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

}  // namespace
}  // namespace lockstep
