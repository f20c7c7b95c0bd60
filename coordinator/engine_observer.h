// EngineObserver: what the engine tells of its requests and steps as they happen, for metrics.
// Every call must be cheap and must not call the engine. OnRejected comes from any thread, with the
// engine locked; all others from the engine's thread, for each request in the order OnStarted,
// OnScheduled (if it is scheduled at all), tokens, OnEnd.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lockstep {

enum class RequestEnd { kFinished, kFailed, kCancelled };

class EngineObserver {
 public:
  virtual ~EngineObserver() = default;

  // A request was refused when it was submitted.
  virtual void OnRejected(absl::string_view /*reason*/) {}
  virtual void OnStarted(int64_t /*prompt_tokens*/) {}
  // Its first place in a step; `queued` is the time since it was submitted.
  virtual void OnScheduled(int64_t /*prompt_tokens*/, absl::Duration /*queued*/) {}
  // The first token of an output, with the time since its request was submitted.
  virtual void OnFirstToken(absl::Duration /*since_submitted*/) {}
  // Any other, with the time since the one before.
  virtual void OnNextToken(absl::Duration /*since_last*/) {}
  // `scheduled`: OnScheduled was called. `reason` is "OK" for kFinished.
  virtual void OnEnd(RequestEnd /*how*/, absl::string_view /*reason*/, int64_t /*prompt_tokens*/,
                     bool /*scheduled*/, absl::Duration /*since_submitted*/) {}
  // A step has reported; as rank 0 measured it.
  virtual void OnStep(absl::Duration /*duration*/) {}
};

}  // namespace lockstep
