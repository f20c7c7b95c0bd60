// Tests of NFC: composition, order of marks, Hangul, exclusions, long runs.
#include "models/tokenizer/normalizer.h"

#include <chrono>
#include <string>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(NormalizerTest, Composes) {
  EXPECT_EQ(NormalizeNfc(""), "");
  EXPECT_EQ(NormalizeNfc(std::string("a\0b", 3)), std::string("a\0b", 3));
  EXPECT_EQ(NormalizeNfc(u8"e\u0301"), u8"\u00e9");
  EXPECT_EQ(NormalizeNfc(u8"\u212b"), u8"\u00c5");               // singleton
  EXPECT_EQ(NormalizeNfc(u8"\u1100\u1161\u11a8"), u8"\uac01");   // Hangul
  EXPECT_EQ(NormalizeNfc(u8"\u0958"), u8"\u0915\u093c");         // composition exclusion
  EXPECT_EQ(NormalizeNfc(u8"a\u0301\u0323"), u8"\u1ea1\u0301");  // order of marks
  EXPECT_EQ(NormalizeNfc(u8"a\u0300\u0301"), u8"\u00e0\u0301");  // equal classes keep order
  EXPECT_EQ(NormalizeNfc(u8"\u00e9\ufb01\u00bd"), u8"\u00e9\ufb01\u00bd");  // canonical only
}

TEST(NormalizerTest, LongRunsOfMarksAreQuick) {
  constexpr int kMarks = 200000;
  std::string above;
  std::string below;
  for (int i = 0; i < kMarks; ++i) {
    above += u8"\u0301";
    below += u8"\u0323";
  }
  std::string mixed = "q";
  for (int i = 0; i < kMarks; ++i) {
    mixed += u8"\u0301\u0323";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(NormalizeNfc(mixed) == "q" + below + above);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

}  // namespace
}  // namespace lockstep
