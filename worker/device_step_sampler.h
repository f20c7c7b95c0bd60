// The StepSampler of CUDA ranks, over DeviceSampler: logits and sampled ids stay on the device;
// ids, digests and the logprobs that were asked for come to the host.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/step_sampler.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<StepSampler>> MakeDeviceStepSampler(DeviceStream* stream,
                                                                   const BatchLimits& limits,
                                                                   Counters* counters);

}  // namespace lockstep
