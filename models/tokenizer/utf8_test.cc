// Tests of utf8: well-formedness, maximal subparts, whole-character prefixes.
#include "models/tokenizer/utf8.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

constexpr char kFffd[] = "\xEF\xBF\xBD";

std::string Repeat(int count) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    out += kFffd;
  }
  return out;
}

TEST(Utf8Test, EveryScalarValueRoundTrips) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) {
      continue;
    }
    std::string bytes;
    AppendUtf8(c, &bytes);
    const Utf8Unit unit = NextUtf8(bytes);
    ASSERT_EQ(unit.kind, Utf8Kind::kValid) << c;
    ASSERT_EQ(unit.codepoint, c);
    ASSERT_EQ(static_cast<size_t>(unit.length), bytes.size());
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      ASSERT_EQ(NextUtf8(bytes.substr(0, cut)).kind, Utf8Kind::kTruncated) << c;
      ASSERT_EQ(CompleteUtf8Prefix("a" + bytes.substr(0, cut)), 1u) << c;
    }
    ASSERT_EQ(CompleteUtf8Prefix(bytes), bytes.size());
  }
}

TEST(Utf8Test, ReplacesOnePerMaximalSubpart) {
  // The example of the Unicode Standard, section 3.9.
  EXPECT_EQ(ToValidUtf8("a\xF1\x80\x80\xE1\x80\xC2"
                        "b\x80"
                        "c\x80\xBF"
                        "d"),
            "a" + Repeat(3) + "b" + Repeat(1) + "c" + Repeat(2) + "d");
  EXPECT_EQ(ToValidUtf8("\xC0\xAF"), Repeat(2));              // overlong
  EXPECT_EQ(ToValidUtf8("\xE0\x80\xAF"), Repeat(3));          // overlong
  EXPECT_EQ(ToValidUtf8("\xED\xA0\x80"), Repeat(3));          // surrogate
  EXPECT_EQ(ToValidUtf8("\xF4\x90\x80\x80"), Repeat(4));      // above U+10FFFF
  EXPECT_EQ(ToValidUtf8("\xF8\x88\x80\x80\x80"), Repeat(5));  // five bytes
  EXPECT_EQ(ToValidUtf8("\xE2\x82"), Repeat(1));              // truncated at the end
  EXPECT_EQ(ToValidUtf8(kFffd), kFffd);                       // a real one survives
  EXPECT_EQ(ToValidUtf8(absl::string_view("\0x", 2)), std::string("\0x", 2));
}

TEST(Utf8Test, FirstBadIsTheOffsetOfTheSequence) {
  size_t bad = 0;
  EXPECT_TRUE(IsValidUtf8("", &bad));
  EXPECT_EQ(bad, 0u);
  EXPECT_TRUE(IsValidUtf8("h\xC3\xA9", &bad));
  EXPECT_EQ(bad, 3u);
  EXPECT_FALSE(IsValidUtf8("h\xC3\xA9\xC3", &bad));
  EXPECT_EQ(bad, 3u);
  EXPECT_FALSE(IsValidUtf8("ab\xED\xBF\xBF", &bad));
  EXPECT_EQ(bad, 2u);
}

TEST(Utf8Test, CompletePrefixHoldsOnlyABeginningOfACharacter) {
  EXPECT_EQ(CompleteUtf8Prefix(""), 0u);
  EXPECT_EQ(CompleteUtf8Prefix("a\xF0\x9F\x98"), 1u);
  EXPECT_EQ(CompleteUtf8Prefix("a\xF0\x9F\x98\x80"), 5u);
  EXPECT_EQ(CompleteUtf8Prefix("\x80\x80\x80\x80"), 4u);  // never a character
  EXPECT_EQ(CompleteUtf8Prefix("\xE0\x80"), 2u);          // known to be invalid
  EXPECT_EQ(CompleteUtf8Prefix("\xF0\x9F\xE2\x82"), 2u);  // the first is broken by the second
  EXPECT_EQ(CompleteUtf8Prefix("\xFF"), 1u);
  EXPECT_EQ(CompleteUtf8Prefix("\xC3"), 0u);
}

TEST(Utf8Test, SplittingAtACompletePrefixChangesNothing) {
  const std::string alphabet = "a\x80\xBF\xC3\xE2\x82\xAC\xF0\x9F\xED\xA0\xF4\x90";
  uint32_t state = 1;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) {
      state = state * 1664525u + 1013904223u;
      bytes.push_back(alphabet[(state >> 16) % alphabet.size()]);
    }
    const size_t cut = 1 + (state >> 8) % 7;
    const size_t whole = CompleteUtf8Prefix(bytes.substr(0, cut));
    ASSERT_EQ(ToValidUtf8(bytes.substr(0, whole)) + ToValidUtf8(bytes.substr(whole)),
              ToValidUtf8(bytes));
  }
}

}  // namespace
}  // namespace lockstep
