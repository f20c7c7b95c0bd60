// Tests of OutputStream: every split of stop strings, a naive oracle over random streams, all ends.
#include "coordinator/output_stream.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
namespace v1 = ::lockstep::inference::v1;

struct StreamRun {
  std::string text;
  std::string raw;
  OutputStream::Step last;
  int64_t tokens = 0;
  std::vector<std::string> steps;
};

// Pushes ids until the output finishes or they run out.
StreamRun PushAll(const Tokenizer* tokenizer, OutputStreamOptions options,
                  const std::vector<int32_t>& ids) {
  OutputStream stream(tokenizer, std::move(options));
  StreamRun run;
  for (const int32_t id : ids) {
    run.last = stream.Push(id);
    EXPECT_TRUE(IsValidUtf8(run.last.text));
    EXPECT_EQ(run.last.text, ToValidUtf8(run.last.raw_bytes));
    run.text += run.last.text;
    run.raw += run.last.raw_bytes;
    run.steps.push_back(run.last.text);
    if (run.last.finished) {
      break;
    }
  }
  run.tokens = stream.num_tokens();
  return run;
}

OutputStreamOptions Long() {
  OutputStreamOptions options;
  options.max_tokens = 1 << 20;
  return options;
}

std::vector<int32_t> Bytes(const std::string& text) {
  std::vector<int32_t> ids;
  for (const char c : text) {
    ids.push_back(static_cast<uint8_t>(c));
  }
  return ids;
}

TEST(OutputStreamTest, NothingOfAStopLeaksHoweverItIsSplit) {
  for (const std::string stop :
       {"a", "STOP", "aab", "</s>", "\n\n", u8"\u505c\u6b62", u8"x\U0001f600"}) {
    const std::string all = u8"\u00e9 before " + stop + u8" after \u00e9";
    // Bit i of `cuts`: a token ends behind byte i of the stop string.
    for (uint32_t cuts = 0; cuts < (1u << stop.size()); ++cuts) {
      std::vector<std::string> tokens = {u8"\u00e9 before "};
      for (size_t i = 0; i < stop.size(); ++i) {
        tokens.back() += stop[i];
        if ((cuts >> i) & 1) {
          tokens.emplace_back();
        }
      }
      tokens.back() += u8" after \u00e9";
      std::vector<int32_t> ids;
      for (size_t i = 0; i < tokens.size(); ++i) {
        ids.push_back(FakeTokenizer::kFirstExtra + static_cast<int32_t>(i));
      }
      const FakeTokenizer tokenizer(tokens);
      OutputStreamOptions options = Long();
      options.stop_strings = {"never", stop};
      // "a" is in "after" only: every other stop is not in the text before.
      const size_t end = all.find(stop);
      const StreamRun run = PushAll(&tokenizer, options, ids);
      ASSERT_TRUE(run.last.finished);
      EXPECT_EQ(run.last.reason, v1::STOP_TEXT);
      EXPECT_EQ(run.last.stop_text, stop);
      EXPECT_EQ(run.text, all.substr(0, end));
      EXPECT_TRUE(run.last.token_visible);
      options.include_stop_in_output = true;
      EXPECT_EQ(PushAll(&tokenizer, options, ids).text, all.substr(0, end) + stop);
    }
  }
}

TEST(OutputStreamTest, HoldsOnlyWhatMayBecomeAStop) {
  const FakeTokenizer tokenizer;
  OutputStreamOptions options = Long();
  options.stop_strings = {"aabaac"};
  const StreamRun run = PushAll(&tokenizer, options, Bytes("xaabaabaaax"));
  EXPECT_THAT(run.steps,
              ::testing::ElementsAre("x", "", "", "", "", "", "aab", "", "", "aaba", "aax"));
}

TEST(OutputStreamTest, HoldsBeginningsOfCharacters) {
  const FakeTokenizer tokenizer;
  const StreamRun run = PushAll(&tokenizer, Long(),
                                Bytes(u8"\u00e9\U0001f600\ufffd"
                                      "a\xE2\x82z\xFF"));
  EXPECT_THAT(run.steps, ::testing::ElementsAre("", u8"\u00e9", "", "", "", u8"\U0001f600", "", "",
                                                u8"\ufffd", "a", "", "", u8"\ufffdz", u8"\ufffd"));
  OutputStreamOptions options;
  options.max_tokens = 2;
  const StreamRun cut = PushAll(&tokenizer, options, Bytes("\xF0\x9F"));
  EXPECT_EQ(cut.text, u8"\ufffd");
  EXPECT_EQ(cut.raw, "\xF0\x9F");
}

// What OutputStream promises, from the whole string of every step.
class Oracle {
 public:
  explicit Oracle(const OutputStreamOptions& options) : options_(options) {}

  // The expected bytes released up to and including this token; `*stop`: the stop string that ends.
  std::string Push(const std::string& token, std::string* stop) {
    ++tokens_;
    const size_t old_size = all_.size();
    all_ += token;
    stop->clear();
    for (size_t end = old_size + 1; end <= all_.size() && tokens_ > options_.min_tokens; ++end) {
      for (const std::string& candidate : options_.stop_strings) {
        const bool ends = end >= candidate.size() &&
                          all_.compare(end - candidate.size(), candidate.size(), candidate) == 0;
        if (ends && candidate.size() > stop->size()) {
          *stop = candidate;
        }
      }
      if (!stop->empty()) {
        return all_.substr(0, options_.include_stop_in_output ? end : end - stop->size());
      }
    }
    if (tokens_ >= options_.max_tokens) {
      return all_;
    }
    size_t hold = 0;
    for (size_t size = 1; size <= all_.size(); ++size) {
      const std::string suffix = all_.substr(all_.size() - size);
      bool may_go_on = NextUtf8(suffix).kind == Utf8Kind::kTruncated;
      for (const std::string& candidate : options_.stop_strings) {
        may_go_on =
            may_go_on || (candidate.size() > size && candidate.compare(0, size, suffix) == 0);
      }
      hold = may_go_on ? size : hold;
    }
    return all_.substr(0, all_.size() - hold);
  }

 private:
  OutputStreamOptions options_;
  std::string all_;
  int64_t tokens_ = 0;
};

std::string RandomText(std::mt19937* random, int pieces, bool allow_invalid) {
  static const char* const kPieces[] = {
      "a",        "b",  "ab",       u8"\u00e9", u8"\u00e8",     u8"\u65e5", u8"\U0001f600",
      u8"\ufffd", "\n", "\xE2\x82", "\x80",     "\xF0\x9F\x98", "\xFF",     "\xC3"};
  std::string text;
  for (int i = 0; i < pieces; ++i) {
    text += kPieces[(*random)() % (allow_invalid ? 14 : 9)];
  }
  return text;
}

TEST(OutputStreamTest, EqualsTheOracleOnRandomStreams) {
  std::mt19937 random(11);
  int stopped = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::string all =
        RandomText(&random, 1 + static_cast<int>(random() % 25), round % 2 == 0);
    std::vector<std::string> tokens;
    for (size_t at = 0; at < all.size();) {
      const size_t size = random() % 5;
      tokens.push_back(all.substr(at, size));
      at += size;
    }
    OutputStreamOptions options;
    for (uint32_t i = random() % 4; i > 0; --i) {
      options.stop_strings.push_back(
          RandomText(&random, 1 + static_cast<int>(random() % 4), false));
    }
    options.include_stop_in_output = random() % 4 == 0;
    options.min_tokens = static_cast<int32_t>(random() % 6) * static_cast<int32_t>(random() % 2);
    options.max_tokens = static_cast<int32_t>(tokens.size());
    const FakeTokenizer tokenizer(tokens);
    OutputStream stream(&tokenizer, options);
    Oracle oracle(options);
    std::string text;
    std::string raw;
    bool finished = false;
    for (size_t i = 0; i < tokens.size() && !finished; ++i) {
      const auto step = stream.Push(FakeTokenizer::kFirstExtra + static_cast<int32_t>(i));
      text += step.text;
      raw += step.raw_bytes;
      finished = step.finished;
      std::string stop;
      ASSERT_EQ(raw, oracle.Push(tokens[i], &stop)) << "round " << round << " token " << i;
      ASSERT_EQ(step.stop_text, stop);
      ASSERT_EQ(step.reason == v1::STOP_TEXT, !stop.empty());
      stopped += stop.empty() ? 0 : 1;
    }
    ASSERT_TRUE(finished);
    ASSERT_EQ(text, ToValidUtf8(raw)) << "round " << round;
  }
  EXPECT_GT(stopped, 500);
}

TEST(OutputStreamTest, TheEndDoesNotDependOnTheTokens) {
  OutputStreamOptions options = Long();
  options.stop_strings = {"abcd", "bc", "c", "xbc"};
  for (const std::vector<std::string>& tokens :
       {std::vector<std::string>{"zabcde"}, {"za", "bcd"}, {"z", "a", "b", "c"}, {"zab", "c"}}) {
    const FakeTokenizer tokenizer(tokens);
    std::vector<int32_t> ids;
    for (size_t i = 0; i < tokens.size(); ++i) {
      ids.push_back(FakeTokenizer::kFirstExtra + static_cast<int32_t>(i));
    }
    const StreamRun run = PushAll(&tokenizer, options, ids);
    EXPECT_EQ(run.last.stop_text, "bc");
    EXPECT_EQ(run.text, "za");
  }
}

struct End {
  const char* name;
  OutputStreamOptions options;
  std::vector<int32_t> ids;
  v1::FinishReason reason;
  int64_t tokens;
  std::string text;
  int32_t stop_id = -1;
  bool visible = true;
};

// stops, stop ids, EOS ids, include, min, max, max is context
using Options = OutputStreamOptions;

TEST(OutputStreamTest, Ends) {
  constexpr int32_t kEos = FakeTokenizer::kEndOfText;
  const std::vector<End> ends = {
      {"eos",
       Options{{}, {}, {kEos}, false, 0, 9, false},
       {'a', kEos},
       v1::EOS,
       2,
       "a",
       kEos,
       false},
      {"eos included has no text",
       Options{{}, {}, {kEos}, true, 0, 9, false},
       {'a', kEos},
       v1::EOS,
       2,
       "a",
       kEos,
       true},
      {"eos that is an ordinary token",
       Options{{}, {}, {'e'}, true, 0, 9, false},
       {'a', 'e'},
       v1::EOS,
       2,
       "ae",
       'e',
       true},
      {"eos before stop id",
       Options{{}, {kEos}, {kEos}, false, 0, 9, false},
       {kEos},
       v1::EOS,
       1,
       "",
       kEos,
       false},
      {"eos at the limit",
       Options{{}, {}, {kEos}, false, 0, 2, false},
       {'a', kEos},
       v1::EOS,
       2,
       "a",
       kEos,
       false},
      {"stop id",
       Options{{}, {'s'}, {kEos}, false, 0, 9, false},
       {'a', 's'},
       v1::STOP_TOKEN,
       2,
       "a",
       's',
       false},
      {"stop id included",
       Options{{}, {'s'}, {}, true, 0, 9, false},
       {'a', 's'},
       v1::STOP_TOKEN,
       2,
       "as",
       's',
       true},
      {"stop id releases what is held",
       Options{{"ab"}, {'s'}, {}, false, 0, 9, false},
       {'a', 's'},
       v1::STOP_TOKEN,
       2,
       "a",
       's',
       false},
      {"stop text",
       Options{{"bc"}, {}, {}, false, 0, 9, false},
       {'a', 'b', 'c'},
       v1::STOP_TEXT,
       3,
       "a"},
      {"stop text at the limit",
       Options{{"bc"}, {}, {}, false, 0, 3, true},
       {'a', 'b', 'c'},
       v1::STOP_TEXT,
       3,
       "a"},
      {"stop text around a special token",
       Options{{"bc"}, {}, {}, false, 0, 9, false},
       {'a', 'b', FakeTokenizer::kImStart, 'c'},
       v1::STOP_TEXT,
       4,
       "a"},
      {"length", Options{{"bc"}, {}, {}, false, 0, 2, false}, {'a', 'b'}, v1::MAX_TOKENS, 2, "ab"},
      {"context", Options{{}, {}, {}, false, 0, 2, true}, {'a', 'b'}, v1::CONTEXT_FULL, 2, "ab"},
      {"special token without effect",
       Options{{}, {}, {}, false, 0, 2, false},
       {kEos, 'b'},
       v1::MAX_TOKENS,
       2,
       "b"},
      {"min_tokens: eos",
       Options{{}, {}, {kEos}, false, 2, 9, false},
       {kEos, kEos, kEos},
       v1::EOS,
       3,
       "",
       kEos,
       false},
      {"min_tokens: stop id is text",
       Options{{}, {'s'}, {}, false, 1, 9, false},
       {'s', 's'},
       v1::STOP_TOKEN,
       2,
       "s",
       's',
       false},
      {"min_tokens: stop text",
       Options{{"ab"}, {}, {}, false, 2, 9, false},
       {'a', 'b', 'a', 'b'},
       v1::STOP_TEXT,
       4,
       "ab"},
      {"min_tokens: stop text that begins before",
       Options{{"ab"}, {}, {}, false, 1, 9, false},
       {'a', 'b'},
       v1::STOP_TEXT,
       2,
       ""},
      {"min_tokens up to the limit",
       Options{{"b"}, {}, {}, false, 2, 2, false},
       {'a', 'b'},
       v1::MAX_TOKENS,
       2,
       "ab"},
  };
  const FakeTokenizer tokenizer;
  for (const End& end : ends) {
    SCOPED_TRACE(end.name);
    const StreamRun run = PushAll(&tokenizer, end.options, end.ids);
    EXPECT_TRUE(run.last.finished);
    EXPECT_EQ(run.last.reason, end.reason);
    EXPECT_EQ(run.tokens, end.tokens);
    EXPECT_EQ(run.text, end.text);
    EXPECT_EQ(run.last.stop_token_id, end.stop_id);
    EXPECT_EQ(run.last.token_visible, end.visible);
    EXPECT_EQ(run.last.stop_text.empty(), end.reason != v1::STOP_TEXT);
  }
}

TEST(OutputStreamTest, WithoutATokenizerIdsStillEndTheOutput) {
  OutputStreamOptions options;
  options.max_tokens = 3;
  options.stop_token_ids = {7};
  EXPECT_EQ(PushAll(nullptr, options, {5, 7}).last.reason, v1::STOP_TOKEN);
  const StreamRun run = PushAll(nullptr, options, {5, 6, 5});
  EXPECT_EQ(run.last.reason, v1::MAX_TOKENS);
  EXPECT_EQ(run.text, "");
}

TEST(OutputStreamTest, LongStopStringsAreQuick) {
  const FakeTokenizer tokenizer;
  OutputStreamOptions options = Long();
  for (int i = 0; i < 16; ++i) {
    options.stop_strings.push_back(std::string(1023, 'a') + static_cast<char>('b' + i));
  }
  const std::string text(100000, 'a');
  const auto start = std::chrono::steady_clock::now();
  const StreamRun run = PushAll(&tokenizer, options, Bytes(text));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(run.text.size(), text.size() - 1023);
}

TEST(OutputStreamDeathTest, PushAfterTheEnd) {
  const FakeTokenizer tokenizer;
  OutputStream stream(&tokenizer, OutputStreamOptions());
  EXPECT_TRUE(stream.Push('a').finished);
  EXPECT_DEATH(stream.Push('b'), HasSubstr("token 98 after the end"));
}

}  // namespace
}  // namespace lockstep
