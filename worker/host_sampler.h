// The StepSampler of CPU ranks: everything happens in Launch.
#pragma once

#include <memory>

#include "worker/step_sampler.h"

namespace lockstep {

std::unique_ptr<StepSampler> MakeHostSampler(const BatchLimits& limits);

}  // namespace lockstep
