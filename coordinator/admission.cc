// Admission: see admission.h.
#include "coordinator/admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

absl::Status Refusal(absl::string_view reason, absl::string_view message,
                     absl::Duration retry_after) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  detail.retry_after = retry_after;
  return MakeError(absl::StatusCode::kResourceExhausted, message, detail);
}

// For people: milliseconds are enough.
std::string Rounded(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
}

}  // namespace

absl::Duration Admission::PredictedWait(absl::Time now) const {
  if (requests_ == 0) return absl::ZeroDuration();
  const absl::Time from = now - kWindow;
  absl::Duration waited = now - std::max(waiting_since_, from);
  int64_t left = 0;
  for (const Span& span : spans_) {
    if (span.end <= from) continue;
    waited += std::min(span.waited, span.end - from);
    left += span.tokens;
  }
  if (waited < kLeastEvidence) return absl::ZeroDuration();
  if (left == 0) return waited;
  return waited * (static_cast<double>(tokens_) / static_cast<double>(left));
}

absl::Status Admission::Check(int64_t prompt_tokens, absl::Time deadline, absl::Time now) const {
  if (requests_ >= max_requests_ || (requests_ > 0 && tokens_ + prompt_tokens > max_tokens_)) {
    return Refusal("QUEUE_FULL",
                   absl::StrCat(requests_, " requests with ", tokens_,
                                " prompt tokens are waiting; the limits are ", max_requests_,
                                " and ", max_tokens_, ": retry later"),
                   std::max(absl::Seconds(1), PredictedWait(now) / 2));
  }
  const absl::Duration wait = PredictedWait(now);
  if (wait == absl::ZeroDuration() || now + wait <= deadline) return absl::OkStatus();
  return Refusal("DEADLINE_UNMEETABLE",
                 absl::StrCat(requests_, " requests with ", tokens_,
                              " prompt tokens are waiting, which takes about ", Rounded(wait),
                              "; the deadline or the queue timeout of this one is in ",
                              Rounded(deadline - now), ": retry later, or give it more time"),
                 std::max(absl::Milliseconds(100), now + wait - deadline));
}

void Admission::OnQueued(int64_t prompt_tokens, absl::Time now) {
  if (requests_ == 0) waiting_since_ = now;
  ++requests_;
  tokens_ += prompt_tokens;
}

void Admission::OnScheduled(int64_t prompt_tokens, absl::Time now) {
  Leave(prompt_tokens, prompt_tokens, now);
}

void Admission::OnRemoved(int64_t prompt_tokens, absl::Time now) { Leave(prompt_tokens, 0, now); }

void Admission::Leave(int64_t prompt_tokens, int64_t scheduled_tokens, absl::Time now) {
  CHECK(requests_ > 0 && tokens_ >= prompt_tokens) << requests_ << " requests, " << tokens_;
  if (spans_.empty() || waiting_since_ >= spans_.back().begin + kSpan) {
    spans_.push_back({waiting_since_, waiting_since_, absl::ZeroDuration(), 0});
  }
  Span& span = spans_.back();
  span.waited += now - waiting_since_;
  span.end = now;
  span.tokens += scheduled_tokens;
  waiting_since_ = now;
  while (spans_.front().end <= now - kWindow) spans_.pop_front();
  --requests_;
  tokens_ -= prompt_tokens;
}

}  // namespace lockstep
