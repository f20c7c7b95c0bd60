// OutputStream: turns the token ids of one output into text, and finds its end. A pure function of the
// ids fed to it, so a replay gives the same. Never emits a broken character; never emits text of a stop
// string or beyond it (unless asked to include it): text that could be the beginning of a stop string is
// held back, and nothing else is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/inference.pb.h"

namespace lockstep {

class Tokenizer;

struct OutputStreamOptions {
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_token_ids;
  std::vector<int32_t> eos_token_ids;
  bool include_stop_in_output = false;
  int32_t min_tokens = 0;  // stop strings and stop ids do not count before
  int32_t max_tokens = 1;
  bool max_tokens_is_context = false;
};

class OutputStream {
 public:
  // `tokenizer` nullptr: no text; stop strings are then not allowed (validated before).
  OutputStream(const Tokenizer* tokenizer, OutputStreamOptions options);

  struct Step {
    std::string text;      // newly released, whole characters; invalid bytes as U+FFFD
    std::string raw_bytes; // the exact bytes behind `text`
    bool finished = false;
    inference::v1::FinishReason reason = inference::v1::FINISH_REASON_UNSPECIFIED;
    std::string stop_text;       // with STOP_TEXT
    int32_t stop_token_id = -1;  // with STOP_TOKEN and EOS
    // The id belongs to the output (false: a stop or EOS id that is not included).
    bool token_visible = true;
  };
  // The next id. CHECKs that the output has not finished. At the end everything held back is released
  // that is not part of a stop.
  Step Push(int32_t id);

  int64_t num_tokens() const { return num_tokens_; }

 private:
  const Tokenizer* tokenizer_;
  OutputStreamOptions options_;
  std::string held_;  // bytes not yet released
  int64_t num_tokens_ = 0;
  bool finished_ = false;
};

}  // namespace lockstep
