#include "kernels/comm/tree_sum.h"

#include <cstring>
#include <random>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

uint32_t Bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

float Oracle(const std::vector<std::vector<float>>& parts, size_t first, size_t count, int64_t i) {
  if (count == 1) return parts[first][static_cast<size_t>(i)];
  return Oracle(parts, first, count / 2, i) + Oracle(parts, first + count / 2, count / 2, i);
}

TEST(TreeSum, JoinsInTreeOrderForEveryNumberOfParts) {
  std::mt19937 rng(7);
  std::normal_distribution<float> dist(0.0f, 1e3f);
  for (size_t count : {1u, 2u, 4u, 8u}) {
    for (int64_t n : {0, 1, 511, 513, 40001}) {
      std::vector<std::vector<float>> parts(count, std::vector<float>(static_cast<size_t>(n)));
      for (auto& part : parts) {
        for (float& x : part) x = dist(rng);
      }
      std::vector<const float*> pointers;
      for (const auto& part : parts) pointers.push_back(part.data());
      std::vector<float> out(static_cast<size_t>(n) + 1, 42.0f);
      ThreadPool pool(2);
      TreeSum(&pool, pointers, n, out.data());
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(Bits(out[static_cast<size_t>(i)]), Bits(Oracle(parts, 0, count, i))) << i;
      }
      EXPECT_EQ(out.back(), 42.0f) << "written behind the end";
    }
  }
}

TEST(TreeSum, OutputMayBeOneOfTheParts) {
  std::vector<float> a = {1, 2, 3}, b = {10, 20, 30}, c = {100, 200, 300}, d = {1000, 2000, 3000};
  TreeSum(nullptr, {a.data(), b.data(), c.data(), d.data()}, 3, c.data());
  EXPECT_EQ(c, (std::vector<float>{1111, 2222, 3333}));
}

TEST(TreeSum, KeepsNegativeZeroOfOnePart) {
  const float x = -0.0f;
  float out = 1.0f;
  TreeSum(nullptr, {&x}, 1, &out);
  EXPECT_EQ(Bits(out), 0x80000000u);
}

}  // namespace
}  // namespace lockstep
