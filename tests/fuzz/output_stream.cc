// The streamer of one output against a naive oracle, which looks at the whole text after every
// token: the same end, the same text, and held back exactly what must be.
//
// Input: flags, min_tokens, max_tokens, number of stop strings, each behind its length; then the
// tokens: a byte of length (or 255: EOS, 254: the stop id) and the token's bytes.
#include "coordinator/output_stream.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "models/tokenizer/tokenizer.h"
#include "models/tokenizer/utf8.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

constexpr int32_t kEos = 0;
constexpr int32_t kStop = 1;

// Ids are indices into a list of byte strings.
class ListTokenizer : public Tokenizer {
 public:
  std::vector<std::string> tokens = {"<eos>", "<stop>"};

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view, bool) const override {
    return absl::UnimplementedError("only decodes");
  }
  absl::string_view TokenBytes(int32_t id, bool skip_special) const override {
    return skip_special && IsSpecial(id) ? absl::string_view() : tokens[static_cast<size_t>(id)];
  }
  int32_t size() const override { return static_cast<int32_t>(tokens.size()); }
  bool IsSpecial(int32_t id) const override { return id == kEos; }
  int32_t FindToken(absl::string_view) const override { return -1; }
  int32_t eos_id() const override { return kEos; }
};

struct Expected {
  std::string text;  // raw, everything that is ever released
  bool finished = false;
  inference::v1::FinishReason reason = inference::v1::FINISH_REASON_UNSPECIFIED;
  std::string stop_text;
};

bool EndsWith(const std::string& text, size_t end, const std::string& suffix) {
  return end >= suffix.size() && text.compare(end - suffix.size(), suffix.size(), suffix) == 0;
}

// After the last of `ids`; the ones before have not ended the output.
Expected Oracle(const ListTokenizer& tokenizer, const OutputStreamOptions& options,
                const std::vector<int32_t>& ids) {
  Expected expected;
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    expected.text += std::string(tokenizer.TokenBytes(ids[i], true));
  }
  const int32_t id = ids.back();
  const size_t before = expected.text.size();
  const bool may_stop = static_cast<int32_t>(ids.size()) > options.min_tokens;
  const bool ends = may_stop && (id == kEos || id == kStop);
  if (!ends || options.include_stop_in_output) {
    expected.text += std::string(tokenizer.TokenBytes(id, true));
  }
  expected.finished = true;
  if (ends) {
    expected.reason = id == kEos ? inference::v1::EOS : inference::v1::STOP_TOKEN;
    return expected;
  }
  for (size_t end = before + 1; may_stop && end <= expected.text.size(); ++end) {
    for (const std::string& stop : options.stop_strings) {
      if (EndsWith(expected.text, end, stop) && stop.size() > expected.stop_text.size()) {
        expected.stop_text = stop;
      }
    }
    if (expected.stop_text.empty()) continue;
    expected.reason = inference::v1::STOP_TEXT;
    expected.text.resize(options.include_stop_in_output ? end : end - expected.stop_text.size());
    return expected;
  }
  if (static_cast<int32_t>(ids.size()) >= options.max_tokens) {
    expected.reason =
        options.max_tokens_is_context ? inference::v1::CONTEXT_FULL : inference::v1::MAX_TOKENS;
    return expected;
  }
  expected.finished = false;
  return expected;
}

// The longest end of the text that a stop string begins with, or that is a broken-off character.
size_t MustHold(const std::string& text, const std::vector<std::string>& stops) {
  size_t hold = text.size() - CompleteUtf8Prefix(text);
  for (const std::string& stop : stops) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > hold; --n) {
      if (EndsWith(text, text.size(), stop.substr(0, n))) {
        hold = n;
        break;
      }
    }
  }
  return hold;
}

void Run(FuzzInput input) {
  OutputStreamOptions options;
  const uint8_t flags = input.Byte();
  options.include_stop_in_output = flags & 1;
  options.max_tokens_is_context = flags & 2;
  options.eos_token_ids = {kEos};
  options.stop_token_ids = {kStop};
  options.min_tokens = input.Byte() % 8;
  options.max_tokens = 1 + input.Byte() % 64;
  for (int count = input.Byte() % 4; count > 0; --count) {
    const std::string stop(input.Bytes(1 + input.Byte() % 8));
    if (!stop.empty() && IsValidUtf8(stop, nullptr)) options.stop_strings.push_back(stop);
  }
  ListTokenizer tokenizer;
  std::vector<int32_t> ids;
  OutputStream stream(&tokenizer, options);
  std::string raw, text;
  while (!input.empty()) {
    const uint8_t kind = input.Byte();
    if (kind < 254) tokenizer.tokens.emplace_back(input.Bytes(kind % 6));
    ids.push_back(kind == 255 ? kEos : kind == 254 ? kStop : tokenizer.size() - 1);
    const OutputStream::Step step = stream.Push(ids.back());
    raw += step.raw_bytes;
    text += step.text;
    CHECK(IsValidUtf8(step.text, nullptr));
    const Expected expected = Oracle(tokenizer, options, ids);
    CHECK_EQ(step.finished, expected.finished);
    CHECK_EQ(step.reason, expected.reason);
    CHECK_EQ(step.stop_text, expected.stop_text);
    if (expected.finished) {
      CHECK_EQ(raw, expected.text);
      CHECK_EQ(text, ToValidUtf8(raw));
      return;
    }
    const size_t hold = MustHold(expected.text, options.stop_strings);
    CHECK_EQ(raw, expected.text.substr(0, expected.text.size() - hold));
  }
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lockstep::fuzz::Run(lockstep::fuzz::FuzzInput(data, size));
  return 0;
}
