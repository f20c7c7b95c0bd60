// Requests as journal records, and back: see convert.h.
#include "coordinator/journal/convert.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using journal::v1::Accept;

constexpr int32_t kMostOutputs = 1024;  // far above what the API takes

int64_t ToMicros(absl::Time time) {
  return time == absl::InfiniteFuture() ? 0 : absl::ToUnixMicros(time);
}

absl::Time FromMicros(int64_t micros) {
  return micros == 0 ? absl::InfiniteFuture() : absl::FromUnixMicros(micros);
}

absl::Status Unfit(uint64_t ordinal, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("a record of request ", ordinal, " ", what));
}

GenerationSpec FromAccept(const Accept& accept) {
  GenerationSpec spec;
  spec.request_id = accept.request_id();
  spec.body_digest = accept.body_digest();
  spec.prompt_ids.assign(accept.prompt_ids().begin(), accept.prompt_ids().end());
  spec.prompt_text = accept.prompt_text();
  spec.sampling = accept.sampling();
  spec.effective_sampling = accept.accepted().effective_sampling();
  spec.n = accept.n();
  spec.min_tokens = accept.min_tokens();
  spec.max_tokens = accept.max_tokens();
  spec.max_tokens_is_context = accept.max_tokens_is_context();
  spec.stop_strings.assign(accept.stop_strings().begin(), accept.stop_strings().end());
  spec.stop_token_ids.assign(accept.stop_token_ids().begin(), accept.stop_token_ids().end());
  spec.eos_token_ids.assign(accept.eos_token_ids().begin(), accept.eos_token_ids().end());
  spec.include_stop_in_output = accept.include_stop_in_output();
  spec.detokenize = accept.detokenize();
  spec.return_token_ids = accept.return_token_ids();
  spec.echo = accept.echo();
  spec.detachable = accept.detachable();
  spec.priority = accept.priority();
  spec.cache_salt = accept.cache_salt();
  spec.cache_bypass = accept.cache_bypass();
  spec.queue_deadline = FromMicros(accept.queue_deadline());
  spec.deadline = FromMicros(accept.deadline());
  return spec;
}

}  // namespace

Accept ToAccept(uint64_t ordinal, const GenerationSpec& spec,
                const inference::v1::Accepted& accepted, absl::Time submitted) {
  Accept accept;
  accept.set_ordinal(ordinal);
  accept.set_request_id(spec.request_id);
  accept.set_body_digest(spec.body_digest);
  accept.mutable_prompt_ids()->Add(spec.prompt_ids.begin(), spec.prompt_ids.end());
  accept.set_prompt_text(spec.prompt_text);
  *accept.mutable_sampling() = spec.sampling;
  *accept.mutable_accepted() = accepted;
  accept.set_n(spec.n);
  accept.set_min_tokens(spec.min_tokens);
  accept.set_max_tokens(spec.max_tokens);
  accept.set_max_tokens_is_context(spec.max_tokens_is_context);
  for (const std::string& stop : spec.stop_strings) accept.add_stop_strings(stop);
  accept.mutable_stop_token_ids()->Add(spec.stop_token_ids.begin(), spec.stop_token_ids.end());
  accept.mutable_eos_token_ids()->Add(spec.eos_token_ids.begin(), spec.eos_token_ids.end());
  accept.set_include_stop_in_output(spec.include_stop_in_output);
  accept.set_detokenize(spec.detokenize);
  accept.set_return_token_ids(spec.return_token_ids);
  accept.set_echo(spec.echo);
  accept.set_detachable(spec.detachable);
  accept.set_priority(spec.priority);
  accept.set_cache_salt(spec.cache_salt);
  accept.set_cache_bypass(spec.cache_bypass);
  accept.set_queue_deadline(ToMicros(spec.queue_deadline));
  accept.set_deadline(ToMicros(spec.deadline));
  accept.set_submitted(absl::ToUnixMicros(submitted));
  return accept;
}

journal::v1::End ToEnd(uint64_t ordinal, const absl::Status& status, absl::Time now) {
  journal::v1::End end;
  end.set_ordinal(ordinal);
  end.set_code(static_cast<int32_t>(status.code()));
  end.set_message(std::string(status.message()));
  end.set_details(DetailsOf(status));
  end.set_time(absl::ToUnixMicros(now));
  return end;
}

absl::Status RequestCollector::TakeAccept(const Accept& accept) {
  const uint64_t ordinal = accept.ordinal();
  const auto& stops = accept.stop_strings();
  if (accept.n() < 1 || accept.n() > kMostOutputs || accept.prompt_ids().empty() ||
      accept.max_tokens() < 1 || std::find(stops.begin(), stops.end(), "") != stops.end()) {
    return Unfit(ordinal, "asks for what no request may");
  }
  if (ordinal == std::numeric_limits<uint64_t>::max()) return Unfit(ordinal, "has no number");
  RestoredRequest request;
  request.spec = FromAccept(accept);
  request.submitted = absl::FromUnixMicros(accept.submitted());
  request.accepted = accept.accepted();
  request.outputs.resize(static_cast<size_t>(accept.n()));
  if (!requests_.emplace(ordinal, std::move(request)).second) {
    return Unfit(ordinal, "accepts it once more");
  }
  next_ordinal_ = std::max(next_ordinal_, ordinal + 1);
  const auto [place, fresh] = by_id_.emplace(accept.request_id(), ordinal);
  if (!fresh) {
    requests_.erase(place->second);
    end_times_.erase(place->second);
    place->second = ordinal;
  }
  return absl::OkStatus();
}

RestoredRequest::Output* RequestCollector::FindOutput(uint64_t ordinal, int32_t output) {
  const auto found = requests_.find(ordinal);
  if (found == requests_.end()) return nullptr;
  auto& outputs = found->second.outputs;
  if (output < 0 || static_cast<size_t>(output) >= outputs.size()) return nullptr;
  return &outputs[static_cast<size_t>(output)];
}

absl::Status RequestCollector::TakeToken(const journal::v1::Token& token) {
  RestoredRequest::Output* output = FindOutput(token.ordinal(), token.output());
  if (output == nullptr) return Unfit(token.ordinal(), "has a token of no output");
  RestoredRequest& request = requests_.at(token.ordinal());
  if (output->finished.has_value() || request.end.has_value() ||
      output->ids.size() >= static_cast<size_t>(request.spec.max_tokens)) {
    return Unfit(token.ordinal(), "has a token after its end");
  }
  output->ids.push_back(token.id());
  output->digests.push_back(token.digest());
  output->logprobs.emplace_back(token.logprobs().begin(), token.logprobs().end());
  return absl::OkStatus();
}

absl::Status RequestCollector::Take(const journal::v1::Record& record) {
  switch (record.record_case()) {
    case journal::v1::Record::kHeader:
      model_digest_ = record.header().model_digest();
      next_ordinal_ = std::max(next_ordinal_, record.header().next_ordinal());
      return absl::OkStatus();
    case journal::v1::Record::kAccept:
      return TakeAccept(record.accept());
    case journal::v1::Record::kTokens:
      for (const journal::v1::Token& token : record.tokens().tokens()) {
        // Of a request whose id was used again.
        if (requests_.count(token.ordinal()) == 0 && token.ordinal() < next_ordinal_) continue;
        RETURN_IF_ERROR(TakeToken(token));
      }
      return absl::OkStatus();
    case journal::v1::Record::kOutputEnd: {
      const auto& end = record.output_end();
      if (requests_.count(end.ordinal()) == 0 && end.ordinal() < next_ordinal_) {
        return absl::OkStatus();
      }
      RestoredRequest::Output* output = FindOutput(end.ordinal(), end.output());
      if (output == nullptr || output->finished.has_value()) {
        return Unfit(end.ordinal(), "ends an output that does not run");
      }
      output->finished = end.finished();
      return absl::OkStatus();
    }
    case journal::v1::Record::kEnd: {
      const auto found = requests_.find(record.end().ordinal());
      if (found == requests_.end()) return absl::OkStatus();
      found->second.end = FromDetails(static_cast<absl::StatusCode>(record.end().code()),
                                      record.end().message(), record.end().details());
      end_times_[record.end().ordinal()] = absl::FromUnixMicros(record.end().time());
      return absl::OkStatus();
    }
    case journal::v1::Record::RECORD_NOT_SET:
      break;
  }
  return absl::DataLossError("a record is of a kind that this version does not know");
}

}  // namespace lockstep
