#include "worker/step_sampler.h"

#include "worker/host_sampler.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<StepSampler>> MakeStepSampler(DeviceStream* stream,
                                                             const BatchLimits& limits, Counters*) {
  if (stream->device() == DeviceType::kCpu) return MakeHostSampler(limits);
  return absl::UnimplementedError("sampling: no arm of this build runs on cuda");
}

}  // namespace lockstep
