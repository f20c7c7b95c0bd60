// PreTokenizer: cuts text into the pieces that BPE works on, by the steps of a tokenizer file.
// Immutable after Create; thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lockstep {

struct PreTokenizerStep {
  enum class Behavior {
    kIsolated,       // matches and gaps are pieces
    kKeepGaps,       // matches are dropped
    kKeepMatches,    // gaps are dropped
    kAddPrefixSpace  // no pattern: a piece that does not begin with a space gets one
  };
  Behavior behavior = Behavior::kIsolated;
  std::string pattern;  // a regular expression, or a plain string with `literal`
  bool literal = false;
};

class PreTokenizer {
 public:
  // Unimplemented, with the pattern and the place, when a pattern cannot be compiled.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(
      const std::vector<PreTokenizerStep>& steps);
  ~PreTokenizer();

  // Calls `piece` for every piece of `text` in order; the views live during the call only. Every
  // step works on the pieces of the one before, each by itself: a pattern sees nothing outside its
  // piece. `text` is UTF-8. ResourceExhausted when a pattern needs more than its step limit.
  absl::Status Split(absl::string_view text,
                     absl::FunctionRef<void(absl::string_view)> piece) const;

 private:
  class Pattern;
  struct Step;
  struct Scratch;

  PreTokenizer();
  absl::Status RunStep(size_t step, absl::string_view text, const Scratch& scratch,
                       absl::FunctionRef<void(absl::string_view)> piece) const;

  std::vector<Step> steps_;
};

}  // namespace lockstep
