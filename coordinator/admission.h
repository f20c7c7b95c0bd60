// Admission: whether a request may join the queue. Bounds the queue by requests and by prompt
// tokens, and refuses at once what would only wait until it is too late: how fast the queue has
// moved lately tells how long a newcomer would wait.
//
// The estimate: over the last kWindow, prompt tokens that left the queue for the batch per second
// in which somebody was waiting. With that rate the queue of now takes tokens / rate. When nothing
// has left although somebody waited, a newcomer waits at least as long again. Nothing is estimated
// from less than kLeastEvidence of waiting, so an idle server takes everything. Time is given by
// the caller, nothing else enters. Not thread safe.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace lockstep {

class Admission {
 public:
  static constexpr absl::Duration kWindow = absl::Seconds(10);
  static constexpr absl::Duration kLeastEvidence = absl::Milliseconds(500);

  Admission(int64_t max_requests, int64_t max_tokens)
      : max_requests_(max_requests), max_tokens_(max_tokens) {}

  // OK when a request with this many prompt tokens may be queued now. RESOURCE_EXHAUSTED
  // QUEUE_FULL, or DEADLINE_UNMEETABLE when the predicted wait ends after `deadline`, with a
  // RetryInfo. An empty queue takes any number of tokens.
  absl::Status Check(int64_t prompt_tokens, absl::Time deadline, absl::Time now) const;

  // A request has joined the queue.
  void OnQueued(int64_t prompt_tokens, absl::Time now);
  // It has left the queue for the batch.
  void OnScheduled(int64_t prompt_tokens, absl::Time now);
  // It has left the queue for good (cancelled, too late, failed).
  void OnRemoved(int64_t prompt_tokens, absl::Time now);

  int64_t requests() const { return requests_; }
  int64_t tokens() const { return tokens_; }
  // How long a newcomer would wait.
  absl::Duration PredictedWait(absl::Time now) const;

 private:
  static constexpr absl::Duration kSpan = absl::Milliseconds(100);

  // What happened between two times: how long somebody was waiting, and how many prompt tokens left
  // the queue for the batch. Begins within kSpan are joined, which bounds how many spans there are.
  struct Span {
    absl::Time begin;
    absl::Time end;
    absl::Duration waited;
    int64_t tokens = 0;
  };
  void Leave(int64_t prompt_tokens, int64_t scheduled_tokens, absl::Time now);

  const int64_t max_requests_;
  const int64_t max_tokens_;
  int64_t requests_ = 0;
  int64_t tokens_ = 0;
  std::deque<Span> spans_;    // oldest first
  absl::Time waiting_since_;  // while requests_ > 0: what no span has yet
};

}  // namespace lockstep
