// OutputStream: turns the token ids of one output into text, and finds its end. A pure function of
// the ids fed to it, so a replay gives the same. Never emits a broken character; never emits text
// of a stop string or beyond it (unless asked to include it): text that could be the beginning of a
// stop string is held back, and nothing else is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/inference.pb.h"

namespace lockstep {

class Tokenizer;

struct OutputStreamOptions {
  std::vector<std::string> stop_strings;  // none is empty; valid UTF-8
  std::vector<int32_t> stop_token_ids;
  std::vector<int32_t> eos_token_ids;
  bool include_stop_in_output = false;
  // The first so many tokens end nothing: a stop id among them is an ordinary token, and a stop
  // string that ends in them does not count. One that ends later does, wherever it began.
  int32_t min_tokens = 0;
  int32_t max_tokens = 1;
  bool max_tokens_is_context = false;
};

// Which end wins at one token: an EOS id, a stop id, a stop string, the limit, in this order. Of
// several stop strings the one that ends first in the text, of those the longest; so the end does
// not depend on how the text falls into tokens.
class OutputStream {
 public:
  // `tokenizer` nullptr: no text; stop strings are then not allowed (validated before). It must
  // outlive the stream.
  OutputStream(const Tokenizer* tokenizer, OutputStreamOptions options);

  struct Step {
    std::string text;       // newly released, whole characters; invalid bytes as U+FFFD
    std::string raw_bytes;  // the exact bytes behind `text`
    bool finished = false;
    inference::v1::FinishReason reason = inference::v1::FINISH_REASON_UNSPECIFIED;
    std::string stop_text;       // with STOP_TEXT
    int32_t stop_token_id = -1;  // with STOP_TOKEN and EOS
    // The id belongs to the output (false: a stop or EOS id that is not included).
    bool token_visible = true;
  };
  // The next id. CHECKs that the output has not finished. At the end everything held back is
  // released that is not part of a stop. Amortized O(bytes of the token times stop strings).
  Step Push(int32_t id);

  int64_t num_tokens() const { return num_tokens_; }  // ids pushed, the stop's included

 private:
  // How much of one stop string the text ends with, by Knuth, Morris and Pratt.
  struct StopMatcher {
    std::string stop;
    std::vector<int32_t> border;  // [i]: longest proper prefix of the first i bytes that ends them
    int32_t matched = 0;          // longest proper prefix of `stop` that the text ends with

    explicit StopMatcher(std::string stop_string);
    bool Advance(char byte);  // true when the text now ends with the whole of it
  };

  // Appends to held_; the matcher of the stop string that ends the output, or nullptr.
  const StopMatcher* Append(absl::string_view bytes, bool may_stop);
  int64_t BytesToHold() const;
  void Release(int64_t count, Step* step);
  void Finish(inference::v1::FinishReason reason, Step* step);

  const Tokenizer* tokenizer_;
  OutputStreamOptions options_;
  std::vector<StopMatcher> matchers_;
  std::string held_;  // bytes not yet released
  int64_t num_tokens_ = 0;
  bool finished_ = false;
};

}  // namespace lockstep
