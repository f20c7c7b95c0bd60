// BatchBuilder: turns a checked plan into a ForwardBatch over one contiguous buffer, the only bytes
// that go to the device for a step. One thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/counters.h"
#include "kernels/runtime/device_buffer.h"
#include "proto/step.pb.h"
#include "worker/slot_table.h"

namespace lockstep {

class BatchBuilder {
 public:
  // Allocates for the largest batch. ResourceExhausted.
  static absl::StatusOr<BatchBuilder> Create(DeviceType device, const BatchLimits& limits);

  // The batch of `plan`, whose check gave `step`. Valid until the next Build. Counts the bytes as
  // Traffic::kPlanToDevice.
  ForwardBatch Build(const worker::v1::StepPlan& plan, const PlannedStep& step,
                     const SlotTable& slots, Counters* counters);

  // The largest batch, shapes only (null data): for sizing the workspace.
  static ForwardBatch Largest(const BatchLimits& limits);

 private:
  DeviceBuffer buffer_;
};

}  // namespace lockstep
