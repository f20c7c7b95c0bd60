// Tests of AddedTokens: the longest match, and the flags that widen or forbid one.
#include "models/tokenizer/added_tokens.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

std::vector<std::pair<std::string, int>> Split(const std::vector<AddedToken>& tokens,
                                               const std::string& text) {
  AddedTokens added;
  for (const AddedToken& token : tokens) {
    added.Add(token);
  }
  std::vector<std::pair<std::string, int>> spans;
  for (const AddedTokenSpan& span : added.Split(text)) {
    spans.emplace_back(std::string(span.text.data(), span.text.size()), span.id);
  }
  return spans;
}

AddedToken Make(int32_t id, const std::string& content) {
  AddedToken token;
  token.id = id;
  token.content = content;
  return token;
}

TEST(AddedTokensTest, LeftmostThenLongest) {
  const std::vector<AddedToken> tokens = {Make(1, "<a>"), Make(2, "<a><b>"), Make(3, "b><")};
  EXPECT_THAT(Split(tokens, "x<a><b><a>"),
              ElementsAre(Pair("x", -1), Pair("<a><b>", 2), Pair("<a>", 1)));
  EXPECT_THAT(Split(tokens, "<a><b"), ElementsAre(Pair("<a>", 1), Pair("<b", -1)));
  EXPECT_THAT(Split(tokens, ""), ElementsAre());
  EXPECT_THAT(Split({}, "<a>"), ElementsAre(Pair("<a>", -1)));
}

TEST(AddedTokensTest, StripsTakeWhiteSpaceAlong) {
  AddedToken left = Make(1, "<l>");
  left.lstrip = true;
  AddedToken right = Make(2, "<r>");
  right.rstrip = true;
  EXPECT_THAT(Split({left, right}, u8"a \u3000<l> b<r>\n <l>"),
              ElementsAre(Pair("a", -1), Pair(u8" \u3000<l>", 1), Pair(" b", -1), Pair("<r>\n ", 2),
                          Pair("<l>", 1)));
}

TEST(AddedTokensTest, SingleWordsStandAlone) {
  AddedToken word = Make(1, "word");
  word.single_word = true;
  EXPECT_THAT(
      Split({word}, u8"word,words \u00e9word _word word"),
      ElementsAre(Pair("word", 1), Pair(u8",words \u00e9word _word ", -1), Pair("word", 1)));
}

}  // namespace
}  // namespace lockstep
