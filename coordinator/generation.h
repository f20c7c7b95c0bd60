// What the front end hands to the engine, and what the engine hands back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "proto/inference.pb.h"
#include "proto/step.pb.h"

namespace lockstep {

// A validated request: everything in range, text tokenized, defaults filled in.
struct GenerationSpec {
  std::string request_id;
  uint64_t body_digest =
      0;  // of the request without its id: same id + same digest = the same request
  std::vector<int32_t> prompt_ids;  // not empty
  std::string prompt_text;          // for echo; may be empty
  // Of output 0; output i differs in output_index only. stop_ids (min_tokens masks them) are filled
  // in.
  worker::v1::SamplingSpec sampling;
  inference::v1::Sampling effective_sampling;  // returned in Accepted
  int32_t n = 1;
  int32_t min_tokens = 0;
  int32_t max_tokens = 1;              // >= 1; prompt + max_tokens <= context
  bool max_tokens_is_context = false;  // the limit is the context: the end is CONTEXT_FULL
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_token_ids;  // the request's own
  std::vector<int32_t> eos_token_ids;   // of the model; empty with ignore_eos
  bool include_stop_in_output = false;
  bool detokenize = true;  // false where the model has no tokenizer
  bool return_token_ids = true;
  bool echo = false;
  bool detachable = false;  // goes on without a reader
  int32_t priority = 0;
  std::string cache_salt;
  bool cache_bypass = false;
  absl::Time queue_deadline = absl::InfiniteFuture();
  absl::Time deadline = absl::InfiniteFuture();
};

// What a journal knows of a request: enough to show its events again as they were, and to go on.
struct RestoredRequest {
  struct Output {
    std::vector<int32_t> ids;
    std::vector<uint64_t> digests;  // of the logits that each id was sampled from
    std::vector<std::vector<worker::v1::Logprob>>
        logprobs;                                      // of each id; empty ones: not asked for
    absl::optional<inference::v1::Finished> finished;  // as it was shown
  };
  GenerationSpec spec;
  absl::Time submitted;
  inference::v1::Accepted accepted;  // as it was shown
  std::vector<Output> outputs;
  absl::optional<absl::Status> end;  // it has ended so
};

// Receives one request's events. Called by the engine's thread, one call at a time, in order; must
// not block and must not call the engine. Exactly one OnDone, last: OK after every output's
// Finished, else the reason why the request ended without.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  // A token was logged; the events that follow show it. `digest` is that of its logits, `result`
  // has the id and the log-probabilities.
  virtual void OnToken(int32_t /*output*/, uint64_t /*digest*/,
                       const worker::v1::SequenceResult& /*result*/) {}
  virtual void OnEvent(inference::v1::GenerateEvent event) = 0;
  virtual void OnDone(const absl::Status& status) = 0;
};

}  // namespace lockstep
