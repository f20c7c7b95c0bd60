// A copy in device memory by a kernel: the bandwidth that benchmarks measure themselves against.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

// `bytes` is a multiple of 16.
LaunchStatus LaunchDeviceCopy(void* to, const void* from, int64_t bytes, void* stream);

}  // namespace lockstep
