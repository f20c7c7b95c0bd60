// AddedTokens: finds the added tokens of a tokenizer in text, at each place the longest. Immutable
// once built; thread safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace lockstep {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;      // produces no text when special tokens are skipped
  bool normalized = false;   // searched in the normalized text instead of the text as given
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool single_word = false;  // found only where no word character touches it
};

// A stretch of text: `id` < 0: ordinary text; else the added token it is.
struct AddedTokenSpan {
  absl::string_view text;
  int32_t id = -1;
};

class AddedTokens {
 public:
  AddedTokens() : nodes_(1) {}
  // `token.content` is not empty; the last of equal contents wins.
  void Add(const AddedToken& token);
  bool empty() const { return tokens_.empty(); }

  // Cuts `text` into spans in order, without empty ones. O(bytes times the longest token).
  std::vector<AddedTokenSpan> Split(absl::string_view text) const;

 private:
  struct Node {
    std::vector<std::pair<char, int32_t>> children;  // sorted by byte
    int32_t token = -1;                              // index into tokens_
  };

  int32_t Child(int32_t node, char byte) const;
  // The longest token that `text` begins with: index and length; index -1 when there is none.
  std::pair<int32_t, size_t> Longest(absl::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;  // 0 is the root
};

}  // namespace lockstep
