// Request validation: see request_validator.h.
#include "coordinator/request_validator.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using inference::v1::GenerateRequest;
using inference::v1::Sampling;

constexpr char kOutOfRange[] = "SAMPLING_OUT_OF_RANGE";
constexpr char kLimit[] = "LIMIT_EXCEEDED";

absl::Status Unsupported(absl::string_view field, absl::string_view message) {
  ErrorDetail detail;
  detail.reason = "FEATURE_UNSUPPORTED";
  detail.field = std::string(field);
  return MakeError(absl::StatusCode::kUnimplemented, message, detail);
}

struct FloatRange {
  double low;
  double high;
  bool low_open = false;
};

absl::Status CheckFloat(float value, const std::string& field, const FloatRange& range) {
  const bool above = range.low_open ? value > range.low : value >= range.low;
  if (std::isfinite(value) && above && value <= range.high) return absl::OkStatus();
  return InvalidField(kOutOfRange, field,
                      absl::StrCat(field, " is ", value, "; it must be a number in ",
                                   range.low_open ? "(" : "[", range.low, ", ", range.high, "]"));
}

absl::Status CheckAtLeast(int64_t value, int64_t low, const std::string& field) {
  if (value >= low) return absl::OkStatus();
  return InvalidField(kOutOfRange, field,
                      absl::StrCat(field, " is ", value, "; it must be at least ", low));
}

absl::Status CheckCount(int64_t count, int64_t cap, const std::string& field) {
  if (count <= cap) return absl::OkStatus();
  return InvalidField(
      kLimit, field, absl::StrCat(field, " has ", count, " entries; at most ", cap, " are allowed"),
      {{"found", absl::StrCat(count)}, {"limit", absl::StrCat(cap)}});
}

// A length, not the value itself.
constexpr char kBytes[] = "has a size in bytes of ";

absl::Status CheckInterval(int64_t value, int64_t low, int64_t high, const std::string& field,
                           absl::string_view what = "is ") {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(
      kLimit, field,
      absl::StrCat(field, " ", what, value, "; it must be in [", low, ", ", high, "]"),
      {{"found", absl::StrCat(value)}, {"limit", absl::StrCat(value < low ? low : high)}});
}

// Every scalar that the client left out gets its default, so that the result says what is in force.
// max_tokens is filled in later: its default depends on the prompt.
Sampling WithDefaults(const Sampling& asked, uint64_t fresh_seed) {
  Sampling s = asked;
  if (!s.has_temperature()) s.set_temperature(1);
  if (!s.has_top_k()) s.set_top_k(0);
  if (!s.has_top_p()) s.set_top_p(1);
  if (!s.has_min_p()) s.set_min_p(0);
  if (!s.has_presence_penalty()) s.set_presence_penalty(0);
  if (!s.has_frequency_penalty()) s.set_frequency_penalty(0);
  if (!s.has_repetition_penalty()) s.set_repetition_penalty(1);
  if (!s.has_seed()) s.set_seed(fresh_seed);
  if (!s.has_n()) s.set_n(1);
  if (!s.has_min_tokens()) s.set_min_tokens(0);
  return s;
}

absl::Status CheckScalars(const Sampling& s, const RequestLimits& limits) {
  RETURN_IF_ERROR(CheckFloat(s.temperature(), "sampling.temperature", {0, 100}));
  RETURN_IF_ERROR(CheckAtLeast(s.top_k(), 0, "sampling.top_k"));
  RETURN_IF_ERROR(CheckFloat(s.top_p(), "sampling.top_p", {0, 1, /*low_open=*/true}));
  RETURN_IF_ERROR(CheckFloat(s.min_p(), "sampling.min_p", {0, 1}));
  RETURN_IF_ERROR(CheckFloat(s.presence_penalty(), "sampling.presence_penalty", {-2, 2}));
  RETURN_IF_ERROR(CheckFloat(s.frequency_penalty(), "sampling.frequency_penalty", {-2, 2}));
  RETURN_IF_ERROR(CheckFloat(s.repetition_penalty(), "sampling.repetition_penalty",
                             {0, 10, /*low_open=*/true}));
  RETURN_IF_ERROR(CheckAtLeast(s.n(), 1, "sampling.n"));
  RETURN_IF_ERROR(CheckInterval(s.n(), 1, limits.max_outputs, "sampling.n"));
  RETURN_IF_ERROR(CheckAtLeast(s.min_tokens(), 0, "sampling.min_tokens"));
  if (!s.has_max_tokens()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckAtLeast(s.max_tokens(), 1, "sampling.max_tokens"));
  if (s.min_tokens() <= s.max_tokens()) return absl::OkStatus();
  return InvalidField(kLimit, "sampling.min_tokens",
                      absl::StrCat("sampling.min_tokens is ", s.min_tokens(),
                                   ", more than sampling.max_tokens, which is ", s.max_tokens()));
}

absl::Status CheckTokenLists(const Sampling& s, int64_t vocab_size, const RequestLimits& limits) {
  RETURN_IF_ERROR(CheckCount(s.logit_bias_size(), limits.max_logit_bias, "sampling.logit_bias"));
  std::set<int32_t> biased;
  for (int i = 0; i < s.logit_bias_size(); ++i) {
    const std::string field = absl::StrCat("sampling.logit_bias[", i, "]");
    const int32_t id = s.logit_bias(i).token_id();
    if (id < 0 || id >= vocab_size) {
      return TokenOutOfVocab(absl::StrCat(field, ".token_id"), -1, id, vocab_size);
    }
    RETURN_IF_ERROR(CheckFloat(s.logit_bias(i).bias(), absl::StrCat(field, ".bias"), {-100, 100}));
    if (!biased.insert(id).second) {
      return InvalidField(kOutOfRange, absl::StrCat(field, ".token_id"),
                          absl::StrCat("token id ", id, " has two biases; give each id once"));
    }
  }
  RETURN_IF_ERROR(CheckCount(s.allowed_token_ids_size(), vocab_size, "sampling.allowed_token_ids"));
  RETURN_IF_ERROR(CheckTokenIds(s.allowed_token_ids(), "sampling.allowed_token_ids", vocab_size));
  RETURN_IF_ERROR(CheckCount(s.banned_token_ids_size(), vocab_size, "sampling.banned_token_ids"));
  return CheckTokenIds(s.banned_token_ids(), "sampling.banned_token_ids", vocab_size);
}

// Some token must be left to sample: with min_tokens the ids that end an output are masked too.
absl::Status CheckCandidates(const Sampling& s, const std::vector<int32_t>& stop_ids,
                             int64_t vocab_size) {
  std::set<int32_t> excluded(s.banned_token_ids().begin(), s.banned_token_ids().end());
  if (s.min_tokens() > 0) excluded.insert(stop_ids.begin(), stop_ids.end());
  if (s.allowed_token_ids().empty()) {
    if (static_cast<int64_t>(excluded.size()) < vocab_size) return absl::OkStatus();
  } else {
    for (const int32_t id : s.allowed_token_ids()) {
      if (excluded.count(id) == 0) return absl::OkStatus();
    }
  }
  return InvalidField(
      kOutOfRange,
      s.allowed_token_ids().empty() ? "sampling.banned_token_ids" : "sampling.allowed_token_ids",
      "no token is left to sample: banned_token_ids (and, with min_tokens, the ids "
      "that end an output) exclude all that are allowed");
}

absl::Status CheckStopping(const inference::v1::Stopping& stopping, const ServedModel& model,
                           const RequestLimits& limits) {
  RETURN_IF_ERROR(
      CheckCount(stopping.stop_strings_size(), limits.max_stop_strings, "stopping.stop_strings"));
  for (int i = 0; i < stopping.stop_strings_size(); ++i) {
    RETURN_IF_ERROR(CheckInterval(static_cast<int64_t>(stopping.stop_strings(i).size()), 1,
                                  limits.max_stop_string_bytes,
                                  absl::StrCat("stopping.stop_strings[", i, "]"), kBytes));
  }
  if (stopping.stop_strings_size() > 0 && model.tokenizer == nullptr) {
    return Unsupported("stopping.stop_strings",
                       absl::StrCat("model ", model.name,
                                    " has no tokenizer, so stop strings "
                                    "cannot be matched; send stop_token_ids"));
  }
  RETURN_IF_ERROR(CheckCount(stopping.stop_token_ids_size(), limits.max_stop_token_ids,
                             "stopping.stop_token_ids"));
  return CheckTokenIds(stopping.stop_token_ids(), "stopping.stop_token_ids", model.vocab_size);
}

absl::Status CheckOutput(const inference::v1::OutputOptions& output, const ServedModel& model,
                         const RequestLimits& limits) {
  if (output.has_logprobs()) {
    RETURN_IF_ERROR(CheckInterval(output.logprobs(), -1, limits.max_logprobs, "output.logprobs"));
  }
  if (model.tokenizer != nullptr) return absl::OkStatus();
  for (const auto& [wanted, field] :
       {std::pair<bool, const char*>{output.detokenize(), "output.detokenize"},
        {output.echo(), "output.echo"}}) {
    if (!wanted) continue;
    return Unsupported(field, absl::StrCat("model ", model.name, " has no tokenizer, so ", field,
                                           " cannot be served; read token_ids"));
  }
  return absl::OkStatus();
}

absl::Status CheckEnvelope(const GenerateRequest& request, const RequestLimits& limits) {
  const std::string& id = request.request_id();
  const bool printable =
      std::all_of(id.begin(), id.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
  if (!printable || static_cast<int64_t>(id.size()) > limits.max_request_id_bytes) {
    return InvalidField("REQUEST_ID_INVALID", "request_id",
                        absl::StrCat("request_id has ", id.size(), " bytes; it must be 1 to ",
                                     limits.max_request_id_bytes, " printable ASCII characters"));
  }
  RETURN_IF_ERROR(
      CheckInterval(request.priority(), -limits.max_priority, limits.max_priority, "priority"));
  RETURN_IF_ERROR(
      CheckCount(static_cast<int64_t>(request.labels().size()), limits.max_labels, "labels"));
  for (const auto& [key, value] : request.labels()) {
    RETURN_IF_ERROR(CheckInterval(static_cast<int64_t>(std::max(key.size(), value.size())), 0,
                                  limits.max_label_bytes, "labels", kBytes));
  }
  RETURN_IF_ERROR(CheckInterval(request.queue_timeout_ms(), 0, INT64_MAX, "queue_timeout_ms"));
  return CheckInterval(request.generation_timeout_ms(), 0, INT64_MAX, "generation_timeout_ms");
}

absl::Status PromptEmpty(const std::string& field) {
  return InvalidField("PROMPT_EMPTY", field,
                      absl::StrCat("the prompt is empty: ", field, " gives no token"));
}

// Fills in prompt_ids and prompt_text. Returns the field that the prompt came from.
absl::StatusOr<std::string> FillPrompt(const GenerateRequest& request, const ServedModel& model,
                                       GenerationSpec* spec) {
  std::string field;
  switch (request.input_case()) {
    case GenerateRequest::kText:
      field = "text";
      spec->prompt_text = request.text();
      break;
    case GenerateRequest::kChat: {
      field = "chat.messages";
      if (request.chat().messages().empty()) return PromptEmpty(field);
      ASSIGN_OR_RETURN(spec->prompt_text, RenderChat(request.chat(), model));
      break;
    }
    case GenerateRequest::kTokenIds: {
      field = "token_ids.ids";
      const auto& ids = request.token_ids().ids();
      if (ids.empty()) return PromptEmpty(field);
      RETURN_IF_ERROR(CheckTokenIds(ids, field, model.vocab_size));
      spec->prompt_ids.assign(ids.begin(), ids.end());
      if (spec->echo) {
        spec->prompt_text = ToValidUtf8(model.tokenizer->DecodeBytes(spec->prompt_ids, false));
      }
      return field;
    }
    case GenerateRequest::INPUT_NOT_SET:
      return InvalidField("INPUT_AMBIGUOUS", "input",
                          "no input: set exactly one of text, token_ids and chat");
  }
  ASSIGN_OR_RETURN(spec->prompt_ids, EncodeText(spec->prompt_text, field, model));
  if (spec->prompt_ids.empty()) return PromptEmpty(field);
  return field;
}

absl::Status ContextExceeded(const std::string& field, int64_t prompt, absl::string_view what,
                             int64_t wanted, int64_t limit) {
  return InvalidField(
      "CONTEXT_LENGTH_EXCEEDED", field,
      absl::StrCat("the prompt has ", prompt, " tokens and ", what, " is ", wanted, ": together ",
                   prompt + wanted, ", more than the context of ", limit, " tokens"),
      {{"prompt", absl::StrCat(prompt)},
       {std::string(what), absl::StrCat(wanted)},
       {"limit", absl::StrCat(limit)}});
}

absl::Status FitContext(const std::string& prompt_field, int64_t limit, GenerationSpec* spec) {
  Sampling& s = spec->effective_sampling;
  const int64_t prompt = static_cast<int64_t>(spec->prompt_ids.size());
  const int64_t least = std::max<int64_t>(s.min_tokens(), 1);
  if (prompt + least > limit) {
    return ContextExceeded(prompt_field, prompt, "min_tokens", least, limit);
  }
  spec->max_tokens_is_context = !s.has_max_tokens();
  if (!s.has_max_tokens()) s.set_max_tokens(static_cast<int32_t>(limit - prompt));
  if (prompt + s.max_tokens() > limit) {
    return ContextExceeded("sampling.max_tokens", prompt, "max_tokens", s.max_tokens(), limit);
  }
  return absl::OkStatus();
}

void FillSamplingSpec(const std::vector<int32_t>& stop_ids, int32_t logprobs,
                      GenerationSpec* spec) {
  const Sampling& s = spec->effective_sampling;
  worker::v1::SamplingSpec& out = spec->sampling;
  out.set_temperature(s.temperature());
  out.set_top_k(s.top_k());
  out.set_top_p(s.top_p());
  out.set_min_p(s.min_p());
  out.set_presence_penalty(s.presence_penalty());
  out.set_frequency_penalty(s.frequency_penalty());
  out.set_repetition_penalty(s.repetition_penalty());
  out.set_seed(s.seed());
  out.set_output_index(0);
  for (const auto& bias : s.logit_bias()) {
    out.add_bias_ids(bias.token_id());
    out.add_bias_values(bias.bias());
  }
  *out.mutable_allowed_ids() = s.allowed_token_ids();
  *out.mutable_banned_ids() = s.banned_token_ids();
  out.mutable_stop_ids()->Add(stop_ids.begin(), stop_ids.end());
  out.set_min_tokens(s.min_tokens());
  out.set_num_logprobs(logprobs);
}

// The digest of everything that decides the answer: the request without its id.
uint64_t BodyDigest(const GenerateRequest& request) {
  GenerateRequest body = request;
  body.clear_request_id();
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    body.SerializeToCodedStream(&coded);
  }
  return HashBytes(bytes);
}

absl::Time After(absl::Time now, int64_t milliseconds) {
  return milliseconds == 0 ? absl::InfiniteFuture() : now + absl::Milliseconds(milliseconds);
}

void FillOptions(const GenerateRequest& request, const ServedModel& model,
                 const RequestContext& context, GenerationSpec* spec) {
  spec->request_id = request.request_id().empty() ? context.fresh_request_id : request.request_id();
  spec->body_digest = BodyDigest(request);
  spec->stop_strings.assign(request.stopping().stop_strings().begin(),
                            request.stopping().stop_strings().end());
  spec->stop_token_ids.assign(request.stopping().stop_token_ids().begin(),
                              request.stopping().stop_token_ids().end());
  if (!request.stopping().ignore_eos()) spec->eos_token_ids = model.eos_token_ids;
  spec->include_stop_in_output = request.stopping().include_stop_in_output();
  const inference::v1::OutputOptions& output = request.output();
  spec->detokenize = output.has_detokenize() ? output.detokenize() : model.tokenizer != nullptr;
  spec->return_token_ids = output.has_return_token_ids() ? output.return_token_ids() : true;
  spec->echo = output.echo();
  spec->priority = request.priority();
  spec->cache_salt = request.cache().salt();
  spec->cache_bypass = request.cache().bypass();
  spec->queue_deadline = After(context.now, request.queue_timeout_ms());
  spec->detachable = request.detachable();
  spec->deadline = After(context.now, request.generation_timeout_ms());
  if (!request.detachable()) spec->deadline = std::min(spec->deadline, context.rpc_deadline);
}

}  // namespace

absl::Status CheckModelName(const std::string& asked, const ServedModel& model) {
  if (model.Answers(asked)) return absl::OkStatus();
  std::vector<std::string> served = {model.name};
  served.insert(served.end(), model.aliases.begin(), model.aliases.end());
  ErrorDetail detail;
  detail.reason = "MODEL_NOT_FOUND";
  detail.field = "model";
  detail.metadata = {{"asked", asked}, {"served", absl::StrJoin(served, ",")}};
  return MakeError(absl::StatusCode::kNotFound,
                   absl::StrCat("model \"", asked,
                                "\" is not served; served here: ", absl::StrJoin(served, ", ")),
                   detail);
}

absl::Status TokenOutOfVocab(const std::string& field, int64_t index, int32_t id,
                             int64_t vocab_size) {
  const std::string path = index < 0 ? field : absl::StrCat(field, "[", index, "]");
  return InvalidField(
      "TOKEN_OUT_OF_VOCAB", path,
      absl::StrCat(path, " is ", id, "; token ids of this model are in [0, ", vocab_size, ")"),
      {{"token_id", absl::StrCat(id)}, {"vocab_size", absl::StrCat(vocab_size)}});
}

absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text, const std::string& field,
                                                const ServedModel& model) {
  if (model.tokenizer == nullptr) {
    return Unsupported(field,
                       absl::StrCat("model ", model.name,
                                    " has no tokenizer, so it takes no text; send token_ids"));
  }
  size_t first_bad = 0;
  if (!IsValidUtf8(text, &first_bad)) {
    return InvalidField("INVALID_UTF8", field,
                        absl::StrCat(field, " is not valid UTF-8 at byte ", first_bad));
  }
  return model.tokenizer->Encode(text);
}

absl::StatusOr<std::string> RenderChat(const inference::v1::Chat& chat, const ServedModel& model) {
  if (model.tokenizer == nullptr || !model.has_chat_template) {
    return Unsupported("chat",
                       absl::StrCat("model ", model.name, " has no ",
                                    model.tokenizer == nullptr ? "tokenizer; send token_ids"
                                                               : "chat template; send text"));
  }
  std::vector<ChatTurn> turns;
  for (const auto& message : chat.messages()) turns.push_back({message.role(), message.content()});
  const bool add_prompt = chat.has_add_generation_prompt() ? chat.add_generation_prompt() : true;
  absl::StatusOr<std::string> text = RenderChatMl(turns, chat.enable_thinking(), add_prompt);
  if (text.ok()) return text;
  return InvalidField("CHAT_INVALID", "chat.messages", text.status().message());
}

absl::StatusOr<GenerationSpec> ValidateGenerateRequest(const GenerateRequest& request,
                                                       const ServedModel& model,
                                                       const RequestContext& context,
                                                       const RequestLimits& limits) {
  RETURN_IF_ERROR(CheckModelName(request.model(), model));
  RETURN_IF_ERROR(CheckEnvelope(request, limits));
  const Sampling sampling = WithDefaults(request.sampling(), context.fresh_seed);
  RETURN_IF_ERROR(CheckScalars(sampling, limits));
  RETURN_IF_ERROR(CheckTokenLists(sampling, model.vocab_size, limits));
  RETURN_IF_ERROR(CheckStopping(request.stopping(), model, limits));
  RETURN_IF_ERROR(CheckOutput(request.output(), model, limits));

  GenerationSpec spec;
  FillOptions(request, model, context, &spec);
  std::set<int32_t> ends(spec.stop_token_ids.begin(), spec.stop_token_ids.end());
  ends.insert(spec.eos_token_ids.begin(), spec.eos_token_ids.end());
  const std::vector<int32_t> stop_ids(ends.begin(), ends.end());
  RETURN_IF_ERROR(CheckCandidates(sampling, stop_ids, model.vocab_size));

  spec.effective_sampling = sampling;
  ASSIGN_OR_RETURN(const std::string prompt_field, FillPrompt(request, model, &spec));
  RETURN_IF_ERROR(FitContext(prompt_field, model.max_context, &spec));
  spec.n = spec.effective_sampling.n();
  spec.min_tokens = spec.effective_sampling.min_tokens();
  spec.max_tokens = spec.effective_sampling.max_tokens();
  const int32_t logprobs = request.output().has_logprobs() ? request.output().logprobs() : -1;
  FillSamplingSpec(stop_ids, logprobs, &spec);
  return spec;
}

}  // namespace lockstep
