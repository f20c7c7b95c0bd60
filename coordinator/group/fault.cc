#include "coordinator/group/fault.h"

namespace lockstep {

absl::string_view Name(FaultCause cause) {
  switch (cause) {
    case FaultCause::kProcessExit:
      return "process_exit";
    case FaultCause::kLeaseExpired:
      return "lease_expired";
    case FaultCause::kStreamReset:
      return "stream_reset";
    case FaultCause::kStepRefused:
      return "step_refused";
    case FaultCause::kStepOverdue:
      return "step_overdue";
    case FaultCause::kDigestMismatch:
      return "digest_mismatch";
    case FaultCause::kBadResult:
      return "bad_result";
    case FaultCause::kDeviceLost:
      return "device_lost";
    case FaultCause::kJoinFailed:
      return "join_failed";
    case FaultCause::kOperator:
      return "operator";
  }
  return "unknown";
}

bool BlamesRequests(FaultCause cause) {
  switch (cause) {
    case FaultCause::kProcessExit:
    case FaultCause::kLeaseExpired:
    case FaultCause::kStreamReset:
    case FaultCause::kStepRefused:
    case FaultCause::kStepOverdue:
    case FaultCause::kDeviceLost:
      return true;
    case FaultCause::kDigestMismatch:
    case FaultCause::kBadResult:
    case FaultCause::kJoinFailed:
    case FaultCause::kOperator:
      return false;
  }
  return false;
}

}  // namespace lockstep
