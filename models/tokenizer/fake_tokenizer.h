// FakeTokenizer: a tokenizer for tests that needs no file. Ids 0..255 are the bytes, then come the
// special tokens below, then the multi-byte tokens given to the constructor.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "models/tokenizer/tokenizer.h"

namespace lockstep {

class FakeTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kEndOfText = 256;  // "<|endoftext|>", the eos_id()
  static constexpr int32_t kImStart = 257;    // "<|im_start|>"
  static constexpr int32_t kImEnd = 258;      // "<|im_end|>"
  static constexpr int32_t kFirstExtra = 259;

  explicit FakeTokenizer(std::vector<std::string> extra = {"Hello", " world", "\xC3\xA9", "the ",
                                                           "\xE6\x97\xA5\xE6\x9C\xAC"}) {
    for (int i = 0; i < 256; ++i) {
      tokens_.push_back(std::string(1, static_cast<char>(i)));
    }
    tokens_.push_back("<|endoftext|>");
    tokens_.push_back("<|im_start|>");
    tokens_.push_back("<|im_end|>");
    for (std::string& token : extra) {
      tokens_.push_back(std::move(token));
    }
  }

  // At each place the longest token.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              bool parse_special) const override {
    size_t bad = 0;
    if (!IsValidUtf8(text, &bad)) {
      return absl::InvalidArgumentError(absl::StrCat("text is not UTF-8 at byte ", bad));
    }
    std::vector<int32_t> ids;
    while (!text.empty()) {
      int32_t best = static_cast<uint8_t>(text[0]);
      for (int32_t id = kEndOfText; id < size(); ++id) {
        const bool allowed = parse_special || !IsSpecial(id);
        if (allowed && tokens_[id].size() > tokens_[best].size() &&
            absl::StartsWith(text, tokens_[id])) {
          best = id;
        }
      }
      ids.push_back(best);
      text.remove_prefix(tokens_[best].size());
    }
    return ids;
  }

  absl::string_view TokenBytes(int32_t id, bool skip_special) const override {
    if (id < 0 || id >= size() || (skip_special && IsSpecial(id))) {
      return "";
    }
    return tokens_[id];
  }
  int32_t size() const override { return static_cast<int32_t>(tokens_.size()); }
  bool IsSpecial(int32_t id) const override { return id >= kEndOfText && id <= kImEnd; }
  int32_t FindToken(absl::string_view content) const override {
    for (int32_t id = 0; id < size(); ++id) {
      if (tokens_[id] == content) {
        return id;
      }
    }
    return -1;
  }
  int32_t eos_id() const override { return kEndOfText; }

 private:
  std::vector<std::string> tokens_;
};

}  // namespace lockstep
