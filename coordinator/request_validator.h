// Request validation: GenerateRequest -> GenerationSpec. Pure: no gRPC types, no clock, no
// randomness of its own. Every refusal has the code, the ErrorInfo reason and the proto field path
// that clients rely on:
//
//   INPUT_AMBIGUOUS, PROMPT_EMPTY, INVALID_UTF8, CHAT_INVALID, TOKEN_OUT_OF_VOCAB,
//   CONTEXT_LENGTH_EXCEEDED, SAMPLING_OUT_OF_RANGE, LIMIT_EXCEEDED, REQUEST_ID_INVALID
//                            INVALID_ARGUMENT with BadRequest
//   MODEL_NOT_FOUND          NOT_FOUND
//   FEATURE_UNSUPPORTED      UNIMPLEMENTED: text for a model without tokenizer, chat without
//   template
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "coordinator/served_model.h"
#include "proto/inference.pb.h"

namespace lockstep {

// Caps of the public API (inference.proto names them beside the fields).
struct RequestLimits {
  int32_t max_outputs = 16;
  int32_t max_stop_strings = 16;
  int64_t max_stop_string_bytes = 1024;
  int32_t max_stop_token_ids = 64;
  int32_t max_logit_bias = 1024;
  int32_t max_logprobs = 20;
  int32_t max_labels = 16;
  int64_t max_label_bytes = 128;
  int64_t max_request_id_bytes = 128;
  int32_t max_priority = 100;
};

// What a request gets from outside of its message.
struct RequestContext {
  absl::Time now;
  absl::Time rpc_deadline = absl::InfiniteFuture();
  std::string fresh_request_id;  // used when the client gave none
  uint64_t fresh_seed = 0;       // used when the client gave none
};

absl::StatusOr<GenerationSpec> ValidateGenerateRequest(
    const inference::v1::GenerateRequest& request, const ServedModel& model,
    const RequestContext& context, const RequestLimits& limits = {});

// NOT_FOUND (MODEL_NOT_FOUND) naming what is served, when `asked` is not the served model.
absl::Status CheckModelName(const std::string& asked, const ServedModel& model);

// INVALID_ARGUMENT (TOKEN_OUT_OF_VOCAB) at `field`[i] for the first id outside [0, vocab_size).
template <typename Ids>
absl::Status CheckTokenIds(const Ids& ids, const std::string& field, int64_t vocab_size);

// The ids of a text at proto field `field`, or of a chat at `field`. UNIMPLEMENTED without
// tokenizer.
absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text, const std::string& field,
                                                const ServedModel& model);
absl::StatusOr<std::string> RenderChat(const inference::v1::Chat& chat, const ServedModel& model);

// ---- implementation of the template ----
absl::Status TokenOutOfVocab(const std::string& field, int64_t index, int32_t id,
                             int64_t vocab_size);

template <typename Ids>
absl::Status CheckTokenIds(const Ids& ids, const std::string& field, int64_t vocab_size) {
  int64_t index = 0;
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) return TokenOutOfVocab(field, index, id, vocab_size);
    ++index;
  }
  return absl::OkStatus();
}

}  // namespace lockstep
