// FaultRule: one fault that a test worker injects, as its flag says it: PHASE[:N]=KIND[,MS].
//
//   phases   load, prepare, init, configure, drain: the call (or the load) of that name
//            prefill, decode: a step's forward pass; one with more tokens than sequences is a
//            prefill
//            sampling: after the forward pass of a step that has logits
//            idle: a Health call while no step runs in a configured epoch
//   N        the Nth occurrence in this process, from 1; 1 when absent
//   kinds    kill (SIGKILL), abort (SIGABRT), exit0, exit1, stop (SIGSTOP), stop-resume,MS
//   (SIGSTOP,
//            and SIGCONT after MS), delay,MS: in every phase
//            error (INTERNAL), oom (RESOURCE_EXHAUSTED): what the call, the load or the step ends
//            with
//            nan: one row of the step's logits. In prefill, decode, sampling
//            digest, corrupt-result, duplicate-result, reorder-results, drop-stream: of the step's
//            result. In prefill, decode, sampling
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lockstep {
namespace testing {

enum class FaultPhase {
  kLoad,
  kPrepare,
  kInit,
  kConfigure,
  kPrefill,
  kDecode,
  kSampling,
  kDrain,
  kIdle
};

enum class FaultKind {
  kKill,
  kAbort,
  kExit0,
  kExit1,
  kStop,
  kStopResume,
  kDelay,
  kError,
  kOom,
  kNan,
  kDigest,
  kCorruptResult,
  kDuplicateResult,
  kReorderResults,
  kDropStream,
};

struct FaultRule {
  FaultPhase phase = FaultPhase::kIdle;
  int64_t occurrence = 1;
  FaultKind kind = FaultKind::kKill;
  absl::Duration time;  // of stop-resume and delay
  std::string text;     // as it was given
};

// InvalidArgument says what is wrong with the text.
absl::StatusOr<FaultRule> ParseFaultRule(absl::string_view text);

}  // namespace testing
}  // namespace lockstep
