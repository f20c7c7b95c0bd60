// StepTransport: how steps reach the ranks and results come back. The real one is WorkerGroup over
// gRPC; tests use a fake.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/step.pb.h"

namespace lockstep {

class StepTransport {
 public:
  virtual ~StepTransport() = default;

  // Sends a step to every rank. Does not wait for results. An error means the group is broken.
  virtual absl::Status Send(const worker::v1::StepRequest& request) = 0;

  // The next agreed result, in step order: rank 0's, after every rank answered with the same
  // digests. Waits until `deadline`: DeadlineExceeded then, and nothing is lost. Any other error
  // means that the group is broken (a rank that refused, disagreed or went away; the message names
  // it).
  virtual absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) = 0;

  // Makes a Receive that waits return Cancelled soon (a new request arrived). Any thread. A wake-up
  // that nobody waits for is kept for the next Receive.
  virtual void Wake() = 0;
};

}  // namespace lockstep
