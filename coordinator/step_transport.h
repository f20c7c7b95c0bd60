// StepTransport: how steps reach the ranks and results come back, and how a broken group becomes
// whole again. The real one is WorkerGroup over gRPC; tests use a fake.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/group/fault.h"
#include "proto/step.pb.h"

namespace lockstep {

struct StepEpoch {
  uint64_t term = 0;
  uint64_t epoch = 0;
};

class StepTransport {
 public:
  virtual ~StepTransport() = default;

  // Sends a step to every rank. Does not wait for results. An error means the group is broken.
  virtual absl::Status Send(const worker::v1::StepRequest& request) = 0;

  // The next agreed result, in step order: rank 0's, after every rank answered with the same
  // digests. Waits until `deadline`: DeadlineExceeded then, and nothing is lost. Any other error
  // means that the group is broken (a rank that refused, disagreed or went away; the message names
  // it). May be called with no step in flight: then it only notices what breaks meanwhile.
  virtual absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) = 0;

  // Makes a Receive or AwaitEpoch that waits return Cancelled soon (a new request arrived). Any
  // thread. A wake-up that nobody waits for is kept for the next one.
  virtual void Wake() = 0;

  // After an error of Send or Receive: waits until steps can run in a new epoch, whose ranks hold
  // nothing but their weights. DeadlineExceeded: not yet. Cancelled: woken up. Any other error is
  // final.
  virtual absl::StatusOr<StepEpoch> AwaitEpoch(absl::Time deadline) {
    (void)deadline;
    return absl::FailedPreconditionError("this transport does not recover");
  }
  // The engine cannot believe a result that the ranks agreed on: breaks the group.
  virtual void Distrust(const absl::Status& status) { (void)status; }
  // What broke the group last.
  virtual Fault last_fault() const { return Fault(); }
  // The requests that were running are where they were before the fault.
  virtual void OnReplayed(int64_t requests, int64_t tokens_recomputed) {
    (void)requests;
    (void)tokens_recomputed;
  }
};

}  // namespace lockstep
