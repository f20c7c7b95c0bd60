#include "worker/step_sampler.h"

#include "worker/device_step_sampler.h"
#include "worker/host_sampler.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<StepSampler>> MakeStepSampler(DeviceStream* stream,
                                                             const BatchLimits& limits,
                                                             Counters* counters) {
  if (stream->device() == DeviceType::kCpu) return MakeHostSampler(limits);
  return MakeDeviceStepSampler(stream, limits, counters);
}

}  // namespace lockstep
