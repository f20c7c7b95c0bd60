// Soak: requests arrive at random times at a `lockstep serve` while its workers are killed, and
// every answer is compared with the undisturbed one.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lockstep {
namespace testing {

struct SoakOptions {
  std::string model;  // a directory
  int tp = 2;
  absl::Duration time = absl::Seconds(25);  // that the requests arrive in
  int requests = 60;
  absl::Duration kill_every = absl::Seconds(4);
  uint64_t seed = 1;  // of the arrivals and of the choice of workers
};

struct SoakResult {
  double seconds = 0;
  int64_t requests = 0;
  int64_t tokens = 0;
  int64_t kills = 0;
  int64_t recoveries = 0;
  int64_t recovered_streams = 0;  // that a recovery interrupted
  int64_t refused = 0;            // never accepted: RESOURCE_EXHAUSTED before any event
  int64_t lost = 0;               // ended with an error, or without an end
  int64_t duplicated = 0;         // the numbering has a gap or a repetition
  int64_t different = 0;          // other ids or another digest than undisturbed
  int64_t digest_mismatches = 0;
  int64_t kv_blocks_held = 0;  // at the end
  int64_t slots_held = 0;
  // Resident memory at the end, and how it grew in the second half of the run: the line of least
  // squares. Of the workers the largest counts.
  double server_mib = 0, server_mib_per_minute = 0;
  double worker_mib = 0, worker_mib_per_minute = 0;
  // Medians over the recoveries, in milliseconds: from the last sign of life to the detection,
  // until all ranks had aborted, until all had their weights, until steps could run, until every
  // interrupted request had its next token; and their sum.
  double detect_ms = 0, abort_ms = 0, replace_ms = 0, join_ms = 0, replay_ms = 0, recovery_ms = 0;
  std::string first_failure;  // of a request

  std::string Json() const;
};

absl::StatusOr<SoakResult> Soak(const SoakOptions& options);

}  // namespace testing
}  // namespace lockstep
