// Tests of BpeModel against a naive merge loop, and of its refusals.
#include "models/tokenizer/bpe.h"

#include <algorithm>
#include <map>
#include <random>
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

BpeConfig Letters() {
  BpeConfig config;
  config.vocab = {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}, {"abc", 5}, {"cab", 9}};
  config.merges = {{"b", "c"}, {"a", "b"}, {"a", "bc"}};
  return config;
}

std::vector<int32_t> EncodeWith(BpeConfig config, const std::string& piece) {
  auto model = BpeModel::Create(std::move(config));
  EXPECT_THAT(model, ::lockstep::testing::IsOk());
  std::vector<int32_t> ids;
  (*model)->EncodePiece(piece, &ids);
  return ids;
}

TEST(BpeTest, LowestRankFirst) {
  EXPECT_THAT(EncodeWith(Letters(), "abc"), ElementsAre(5));
  EXPECT_THAT(EncodeWith(Letters(), "abab"), ElementsAre(3, 3));
  EXPECT_THAT(EncodeWith(Letters(), "cabc"), ElementsAre(2, 5));
  EXPECT_THAT(EncodeWith(Letters(), ""), ElementsAre());
}

TEST(BpeTest, IgnoreMergesTakesAWholeToken) {
  BpeConfig config = Letters();
  EXPECT_THAT(EncodeWith(config, "cab"), ElementsAre(2, 3));
  config.ignore_merges = true;
  EXPECT_THAT(EncodeWith(config, "cab"), ElementsAre(9));
}

TEST(BpeTest, UnknownBytes) {
  BpeConfig config = Letters();
  EXPECT_THAT(EncodeWith(config, "a?b"), ElementsAre(3));
  config.unknown_id = 2;
  EXPECT_THAT(EncodeWith(config, "a?b"), ElementsAre(0, 2, 1));
}

TEST(BpeTest, TokensById) {
  ASSERT_OK_AND_ASSIGN(const auto model, BpeModel::Create(Letters()));
  EXPECT_EQ(model->size(), 10);
  EXPECT_EQ(model->TokenBytes(5), "abc");
  EXPECT_EQ(model->TokenBytes(7), "");
  EXPECT_EQ(model->TokenBytes(10), "");
  EXPECT_EQ(model->TokenBytes(-1), "");
  EXPECT_EQ(model->FindToken("bc"), 4);
  EXPECT_EQ(model->FindToken("cc"), -1);
}

TEST(BpeTest, EqualsTheNaiveLoop) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    BpeConfig config;
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::map<std::pair<std::string, std::string>, int> ranks;
    while (tokens.size() < 14) {
      const std::string left = tokens[random() % tokens.size()];
      const std::string right = tokens[random() % tokens.size()];
      if (!ranks.emplace(std::make_pair(left, right), static_cast<int>(ranks.size())).second) {
        continue;
      }
      config.merges.emplace_back(left, right);
      if (std::find(tokens.begin(), tokens.end(), left + right) == tokens.end()) {
        tokens.push_back(left + right);
      }
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      config.vocab.emplace_back(tokens[i], static_cast<int32_t>(i));
    }
    std::string text;
    for (int i = 0; i < 60; ++i) {
      text.push_back(static_cast<char>('a' + random() % 3));
    }
    std::vector<std::string> parts;
    for (const char c : text) {
      parts.emplace_back(1, c);
    }
    while (true) {
      int best = -1;
      size_t at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto it = ranks.find({parts[i], parts[i + 1]});
        if (it != ranks.end() && (best < 0 || it->second < best)) {
          best = it->second;
          at = i;
        }
      }
      if (best < 0) {
        break;
      }
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<int64_t>(at) + 1);
    }
    std::vector<int32_t> expected;
    for (const std::string& part : parts) {
      expected.push_back(
          static_cast<int32_t>(std::find(tokens.begin(), tokens.end(), part) - tokens.begin()));
    }
    ASSERT_EQ(EncodeWith(config, text), expected) << text;
  }
}

TEST(BpeTest, RefusesBrokenVocabularies) {
  const auto refused = [](BpeConfig config, const std::string& message) {
    EXPECT_THAT(BpeModel::Create(std::move(config)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(message)));
  };
  BpeConfig config = Letters();
  config.vocab.emplace_back("d", 5);
  refused(config, "two vocabulary tokens have the id 5");
  config = Letters();
  config.vocab.emplace_back("a", 11);
  refused(config, "two vocabulary tokens have the bytes \"a\"");
  config = Letters();
  config.vocab.emplace_back("d", 1 << 30);
  refused(config, "has id 1073741824; expected 0 to");
  config = Letters();
  config.merges.emplace_back("c", "c");
  refused(config, "merge 3 (\"c\", \"c\"): the vocabulary lacks its result");
  config = Letters();
  config.merges.emplace_back("c", "d");
  refused(config, "lacks its right part");
}

}  // namespace
}  // namespace lockstep
