// Tests of PreTokenizer: behaviors, steps in turn, white space, limits.
#include "models/tokenizer/pre_tokenizer.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Behavior = PreTokenizerStep::Behavior;

std::vector<std::string> Split(const std::vector<PreTokenizerStep>& steps,
                               const std::string& text) {
  auto pre_tokenizer = PreTokenizer::Create(steps);
  EXPECT_THAT(pre_tokenizer, ::lockstep::testing::IsOk());
  std::vector<std::string> pieces;
  EXPECT_OK((*pre_tokenizer)->Split(text, [&](absl::string_view piece) {
    pieces.emplace_back(piece.data(), piece.size());
  }));
  return pieces;
}

TEST(PreTokenizerTest, Behaviors) {
  EXPECT_THAT(Split({{Behavior::kIsolated, "\\p{N}"}}, "a12b"), ElementsAre("a", "1", "2", "b"));
  EXPECT_THAT(Split({{Behavior::kKeepGaps, "\\p{N}"}}, "a12b"), ElementsAre("a", "b"));
  EXPECT_THAT(Split({{Behavior::kKeepMatches, "\\p{N}+"}}, "a12b"), ElementsAre("12"));
  EXPECT_THAT(Split({{Behavior::kIsolated, "a.", true}}, "aba.b"), ElementsAre("ab", "a.", "b"));
  EXPECT_THAT(Split({}, "ab"), ElementsAre("ab"));
  EXPECT_THAT(Split({{Behavior::kIsolated, "a"}}, ""), ElementsAre());
}

TEST(PreTokenizerTest, StepsSeeOnlyTheirPiece) {
  EXPECT_THAT(Split({{Behavior::kIsolated, "x"}, {Behavior::kIsolated, "(?<=x)a"}}, "xab"),
              ElementsAre("x", "ab"));
  EXPECT_THAT(Split({{Behavior::kIsolated, "-"}, {Behavior::kAddPrefixSpace, ""}}, "a- b"),
              ElementsAre(" a", " -", " b"));
}

TEST(PreTokenizerTest, WhiteSpaceIsTheUnicodeProperty) {
  const std::vector<PreTokenizerStep> space = {{Behavior::kKeepMatches, "\\s"}};
  EXPECT_THAT(Split(space, u8"a\u00a0b\u0085c\u3000d\u2028"),
              ElementsAre(u8"\u00a0", u8"\u0085", u8"\u3000", u8"\u2028"));
  EXPECT_THAT(Split(space, u8"\u180e\u200b\u001c"), ElementsAre());
  EXPECT_THAT(Split({{Behavior::kKeepMatches, "[^\\sx]+"}}, u8"a\u180e xb"),
              ElementsAre(u8"a\u180e", "b"));
  EXPECT_THAT(Split({{Behavior::kKeepMatches, "\\S+"}}, "ab c"), ElementsAre("ab", "c"));
}

TEST(PreTokenizerTest, EmptyMatchesEnd) {
  EXPECT_THAT(Split({{Behavior::kIsolated, "x*"}}, u8"\u00e9xxb"),
              ElementsAre(u8"\u00e9", "xx", "b"));
}

TEST(PreTokenizerTest, RefusesWhatDoesNotCompile) {
  EXPECT_THAT(PreTokenizer::Create({{Behavior::kIsolated, "a(b"}}),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("\"a(b\" does not compile")));
}

TEST(PreTokenizerTest, ExplosivePatternsGiveUp) {
  ASSERT_OK_AND_ASSIGN(const auto pre_tokenizer,
                       PreTokenizer::Create({{Behavior::kIsolated, "(?:a|aa|a+)+$(?<!a)"}}));
  EXPECT_THAT(pre_tokenizer->Split(std::string(5000, 'a'), [](absl::string_view) {}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("gave up on a text of")));
}

}  // namespace
}  // namespace lockstep
