// Detokenizes one output, holding back what may become a stop string or a whole character.
#include "coordinator/output_stream.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "models/tokenizer/tokenizer.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

OutputStream::StopMatcher::StopMatcher(std::string stop_string)
    : stop(std::move(stop_string)), border(stop.size() + 1, 0) {
  CHECK(!stop.empty()) << "an empty stop string";
  int32_t length = 0;
  for (size_t i = 1; i < stop.size(); ++i) {
    while (length > 0 && stop[i] != stop[length]) {
      length = border[length];
    }
    length += stop[i] == stop[length] ? 1 : 0;
    border[i + 1] = length;
  }
}

bool OutputStream::StopMatcher::Advance(char byte) {
  while (matched > 0 && byte != stop[matched]) {
    matched = border[matched];
  }
  matched += byte == stop[matched] ? 1 : 0;
  if (matched < static_cast<int32_t>(stop.size())) {
    return false;
  }
  matched = border[matched];
  return true;
}

OutputStream::OutputStream(const Tokenizer* tokenizer, OutputStreamOptions options)
    : tokenizer_(tokenizer), options_(std::move(options)) {
  CHECK(tokenizer_ != nullptr || options_.stop_strings.empty())
      << "stop strings without a tokenizer";
  CHECK(options_.max_tokens >= 1) << "max_tokens is " << options_.max_tokens;
  for (const std::string& stop : options_.stop_strings) {
    matchers_.emplace_back(stop);
  }
}

const OutputStream::StopMatcher* OutputStream::Append(absl::string_view bytes, bool may_stop) {
  for (const char byte : bytes) {
    held_.push_back(byte);
    const StopMatcher* found = nullptr;
    for (StopMatcher& matcher : matchers_) {
      const bool complete = matcher.Advance(byte);
      if (complete && (found == nullptr || matcher.stop.size() > found->stop.size())) {
        found = &matcher;
      }
    }
    if (found != nullptr && may_stop) {
      return found;
    }
  }
  return nullptr;
}

int64_t OutputStream::BytesToHold() const {
  int64_t hold = static_cast<int64_t>(held_.size() - CompleteUtf8Prefix(held_));
  for (const StopMatcher& matcher : matchers_) {
    hold = std::max<int64_t>(hold, matcher.matched);
  }
  return hold;
}

void OutputStream::Release(int64_t count, Step* step) {
  step->raw_bytes = held_.substr(0, static_cast<size_t>(count));
  step->text = ToValidUtf8(step->raw_bytes);
  held_.erase(0, static_cast<size_t>(count));
}

void OutputStream::Finish(inference::v1::FinishReason reason, Step* step) {
  finished_ = true;
  step->finished = true;
  step->reason = reason;
  Release(static_cast<int64_t>(held_.size()), step);
}

OutputStream::Step OutputStream::Push(int32_t id) {
  CHECK(!finished_) << "token " << id << " after the end of the output";
  ++num_tokens_;
  Step step;
  const bool may_stop = num_tokens_ > options_.min_tokens;
  const bool is_eos = may_stop && Contains(options_.eos_token_ids, id);
  const bool is_stop_id = is_eos || (may_stop && Contains(options_.stop_token_ids, id));
  step.token_visible = !is_stop_id || options_.include_stop_in_output;
  absl::string_view bytes;
  if (tokenizer_ != nullptr && step.token_visible) {
    bytes = tokenizer_->TokenBytes(id, /*skip_special=*/true);
  }
  if (is_stop_id) {
    step.stop_token_id = id;
    Append(bytes, /*may_stop=*/false);
    Finish(is_eos ? inference::v1::EOS : inference::v1::STOP_TOKEN, &step);
    return step;
  }
  if (const StopMatcher* found = Append(bytes, may_stop)) {
    step.stop_text = found->stop;
    if (!options_.include_stop_in_output) {
      held_.resize(held_.size() - found->stop.size());
    }
    Finish(inference::v1::STOP_TEXT, &step);
    return step;
  }
  if (num_tokens_ >= options_.max_tokens) {
    Finish(options_.max_tokens_is_context ? inference::v1::CONTEXT_FULL : inference::v1::MAX_TOKENS,
           &step);
    return step;
  }
  Release(static_cast<int64_t>(held_.size()) - BytesToHold(), &step);
  return step;
}

}  // namespace lockstep
