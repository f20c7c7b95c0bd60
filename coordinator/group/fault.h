// What broke a group of ranks, and the record of how it was made whole again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lockstep {

enum class FaultCause {
  kProcessExit,     // a local worker process ended
  kLeaseExpired,    // no beat was answered for the length of the lease
  kStreamReset,     // a step stream broke or was ended by the rank
  kStepRefused,     // a rank refused or failed a step
  kStepOverdue,     // a step took far longer than the recent ones
  kDigestMismatch,  // ranks disagree on a step
  kBadResult,       // ranks agree on a result that does not answer the step
  kDeviceLost,      // a rank's device is unusable until its process is restarted
  kJoinFailed,      // an epoch could not be formed
  kOperator,        // a rank was replaced on request
};

// "process_exit", ...: the label of metrics and records.
absl::string_view Name(FaultCause cause);
// True when a request in the steps that did not report may have brought it about.
bool BlamesRequests(FaultCause cause);

struct Fault {
  FaultCause cause = FaultCause::kStreamReset;
  std::vector<int> ranks;  // at fault, as far as known
  std::string message;     // names rank, phase and what was found
  // The process ended by its own doing (a signal of its own making, an exit code), rather than from
  // outside or for reasons unknown.
  bool own_crash = false;
};

struct FaultRecord {
  Fault fault;
  uint64_t term = 0;
  uint64_t epoch_before = 0;
  uint64_t epoch_after = 0;  // 0: not recovered (yet)
  absl::Time detected = absl::InfinitePast();
  absl::Duration silence;  // from the last sign of life of the rank at fault to the detection
  absl::Duration abort;    // until every rank had aborted or was given up
  absl::Duration replace;  // until every rank had its weights
  absl::Duration join;     // until steps could run again
  absl::Duration replay;   // until the last replayed request had its next token
  std::vector<int> replaced_ranks;
  int64_t requests_replayed = 0;
  int64_t tokens_recomputed = 0;
  std::string outcome;  // "recovering", "replaying", then "recovered", "exhausted", "interrupted"
                        // by the next fault
};

}  // namespace lockstep
