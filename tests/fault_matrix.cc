#include "tests/fault_matrix.h"

#include "absl/strings/str_split.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace testing {
namespace {

// Phases with the kinds that can strike in them, with ranks and policies so that every pair with
// one of these is there; then other sizes of the group.
constexpr FaultRow kRows[] = {
    {MatrixPhase::kLoad, "load=kill", 1, 2, Policy::kSpare, Outcome::kRecovered, "", 20},
    {MatrixPhase::kLoad, "load=stop", 0, 2, Policy::kRestart, Outcome::kRecovered, "", 20},
    {MatrixPhase::kLoad, "load=exit1", 0, 2, Policy::kRestart, Outcome::kRecovered, "", 20},
    {MatrixPhase::kLoad, "load=abort", 1, 2, Policy::kRestart, Outcome::kRecovered, "", 20},
    {MatrixPhase::kLoad, "load=oom", 0, 2, Policy::kRestart, Outcome::kRefused,
     "RESOURCE_EXHAUSTED", 20},
    {MatrixPhase::kInit, "init=kill", 0, 2, Policy::kRestart, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kInit, "init=stop", 1, 2, Policy::kSpare, Outcome::kRecovered, "lease_expired",
     20},
    {MatrixPhase::kInit, "init=exit1", 0, 2, Policy::kRestart, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kInit, "init=abort", 0, 2, Policy::kRestart, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kInit, "init=oom", 0, 2, Policy::kRestart, Outcome::kRefused,
     "RESOURCE_EXHAUSTED", 20},
    {MatrixPhase::kPrefill, "prefill=kill", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kPrefill, "prefill=stop", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "lease_expired", 20},
    {MatrixPhase::kPrefill, "prefill=exit1", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kPrefill, "prefill=abort", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kPrefill, "prefill=delay,300", 1, 2, Policy::kSpare, Outcome::kUnnoticed, "", 20},
    {MatrixPhase::kPrefill, "prefill=oom", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "step_refused", 20},
    {MatrixPhase::kPrefill, "prefill=drop-stream", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "stream_reset", 20},
    {MatrixPhase::kPrefill, "prefill=duplicate-result", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "digest_mismatch", 20},
    {MatrixPhase::kPrefill, "prefill=corrupt-result", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "bad_result", 20},
    {MatrixPhase::kPrefill, "prefill=digest", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "digest_mismatch", 20},
    {MatrixPhase::kPrefill, "prefill=reorder-results", 1, 2, Policy::kRestart, Outcome::kEither, "",
     20},
    {MatrixPhase::kDecode, "decode:8=kill", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kDecode, "decode:8=stop", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "lease_expired", 20},
    {MatrixPhase::kDecode, "decode:8=exit0", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kDecode, "decode:8=abort", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kDecode, "decode:8=delay,300", 0, 2, Policy::kRestart, Outcome::kUnnoticed, "",
     20},
    {MatrixPhase::kDecode, "decode:8=oom", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "step_refused", 20},
    {MatrixPhase::kDecode, "decode:8=drop-stream", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "stream_reset", 20},
    {MatrixPhase::kDecode, "decode:8=duplicate-result", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "digest_mismatch", 20},
    {MatrixPhase::kDecode, "decode:8=corrupt-result", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "bad_result", 20},
    {MatrixPhase::kDecode, "decode:8=digest", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "digest_mismatch", 20},
    {MatrixPhase::kDecode, "decode:8=reorder-results", 0, 2, Policy::kSpare, Outcome::kEither, "",
     20},
    {MatrixPhase::kSampling, "sampling:12=kill", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kSampling, "sampling:12=stop", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "lease_expired", 20},
    {MatrixPhase::kSampling, "sampling:12=exit1", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kSampling, "sampling:12=abort", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kSampling, "sampling:12=delay,300", 1, 2, Policy::kSpare, Outcome::kUnnoticed, "",
     20},
    {MatrixPhase::kSampling, "sampling:12=oom", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "step_refused", 20},
    {MatrixPhase::kSampling, "sampling:12=drop-stream", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "stream_reset", 20},
    {MatrixPhase::kSampling, "sampling:12=duplicate-result", 0, 2, Policy::kRestart,
     Outcome::kRecovered, "digest_mismatch", 20},
    {MatrixPhase::kSampling, "sampling:12=corrupt-result", 1, 2, Policy::kRestart,
     Outcome::kRecovered, "digest_mismatch", 20},
    {MatrixPhase::kSampling, "sampling:12=digest", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "digest_mismatch", 20},
    {MatrixPhase::kSampling, "sampling:12=reorder-results", 0, 2, Policy::kRestart,
     Outcome::kEither, "", 20},
    {MatrixPhase::kIdle, "idle=kill", 1, 2, Policy::kRestart, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kIdle, "idle=stop", 1, 2, Policy::kSpare, Outcome::kRecovered, "lease_expired",
     20},
    {MatrixPhase::kIdle, "idle=exit0", 0, 2, Policy::kSpare, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kIdle, "idle=abort", 0, 2, Policy::kSpare, Outcome::kRecovered, "process_exit",
     20},
    {MatrixPhase::kIdle, "idle=delay,300", 1, 2, Policy::kRestart, Outcome::kUnnoticed, "", 20},
    {MatrixPhase::kDrain, "decode:4=kill", 0, 2, Policy::kRestart, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kDrain, "decode:4=stop", 1, 2, Policy::kRestart, Outcome::kRecovered,
     "lease_expired", 20},
    {MatrixPhase::kDrain, "decode:4=abort", 0, 2, Policy::kSpare, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kRecovery, "decode:8=kill+load=kill", 1, 2, Policy::kSpare, Outcome::kRecovered,
     "", 20},
    {MatrixPhase::kRecovery, "decode:8=drop-stream+init=stop", 0, 2, Policy::kSpare,
     Outcome::kRecovered, "lease_expired", 20},
    {MatrixPhase::kRecovery, "decode:8=kill+configure=exit1", 1, 2, Policy::kRestart,
     Outcome::kRecovered, "process_exit", 20},
    {MatrixPhase::kRecovery, "decode:8=kill+configure=abort", 1, 2, Policy::kSpare,
     Outcome::kRecovered, "process_exit", 20},
    {MatrixPhase::kRecovery, "decode:8=kill+load=delay,300", 0, 2, Policy::kRestart,
     Outcome::kRecovered, "process_exit", 20},
    {MatrixPhase::kRecovery, "decode:8=drop-stream+init=oom", 1, 2, Policy::kRestart,
     Outcome::kRecovered, "join_failed", 20},
    {MatrixPhase::kDecode, "decode:8=kill", 0, 1, Policy::kRestart, Outcome::kRecovered,
     "process_exit", 20},
    {MatrixPhase::kSampling, "sampling:12=digest", 2, 4, Policy::kRestart, Outcome::kRecovered,
     "digest_mismatch", 30},
    {MatrixPhase::kRecovery, "decode:8=kill+init=kill", 3, 4, Policy::kRestart, Outcome::kRecovered,
     "process_exit", 30},
};

}  // namespace

std::vector<FaultRow> FaultMatrix() { return {std::begin(kRows), std::end(kRows)}; }

FaultKind KindOf(const FaultRow& row) {
  const std::vector<std::string> rules = absl::StrSplit(row.rules, '+');
  const auto rule = ParseFaultRule(rules.back());
  CHECK(rule.ok()) << rule.status().message();
  return rule->kind;
}

const char* Name(MatrixPhase phase) {
  switch (phase) {
    case MatrixPhase::kLoad:
      return "load";
    case MatrixPhase::kInit:
      return "init";
    case MatrixPhase::kPrefill:
      return "prefill";
    case MatrixPhase::kDecode:
      return "decode";
    case MatrixPhase::kSampling:
      return "sampling";
    case MatrixPhase::kIdle:
      return "idle";
    case MatrixPhase::kDrain:
      return "drain";
    case MatrixPhase::kRecovery:
      return "recovery";
  }
  return "";
}

const char* Name(Policy policy) { return policy == Policy::kSpare ? "spare" : "restart"; }

}  // namespace testing
}  // namespace lockstep
