// BatchBuilder: turns a checked plan into a ForwardBatch over one contiguous buffer: one copy to
// the device per step. One thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/counters.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/pinned_buffer.h"
#include "proto/step.pb.h"
#include "worker/slot_table.h"

namespace lockstep {

class BatchBuilder {
 public:
  // Batches that may be queued on the stream at once.
  static constexpr int kTickets = 2;

  // Allocates for the largest batch. ResourceExhausted.
  static absl::StatusOr<BatchBuilder> Create(DeviceType device, const BatchLimits& limits);

  // Queues the copy of the batch of `plan`, whose check gave `step`. The views are the device's and
  // hold until the next Build on the same stream. A token that an earlier step samples is -1. The
  // copy of the Build before last (of the same ticket) must have ended. Counts the bytes as
  // Traffic::kPlanToDevice.
  absl::StatusOr<ForwardBatch> Build(DeviceStream* stream, const worker::v1::StepPlan& plan,
                                     const PlannedStep& step, const SlotTable& slots, int ticket,
                                     Counters* counters);

  // The largest batch, shapes only (null data): for sizing the workspace.
  static ForwardBatch Largest(DeviceType device, const BatchLimits& limits);

 private:
  DeviceBuffer buffer_;
  PinnedBuffer staging_[kTickets];
};

}  // namespace lockstep
