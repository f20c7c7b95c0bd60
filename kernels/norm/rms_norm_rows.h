// The vector loops of the CPU arm, one set of functions per instruction set.
#pragma once

#include <cstdint>

#include "kernels/norm/rms_norm_launch.h"

namespace lockstep {

#define LOCKSTEP_DECLARE_RMS_NORM(isa)                                                     \
  namespace isa {                                                                          \
  /* Rows [begin, end) of the problem; `row` holds dim floats, rounded up to 16. */        \
  void RmsNormRows(const RmsNormProblem& problem, int64_t begin, int64_t end, float* row); \
  }
LOCKSTEP_DECLARE_RMS_NORM(generic)
LOCKSTEP_DECLARE_RMS_NORM(avx2)
LOCKSTEP_DECLARE_RMS_NORM(avx512)
#undef LOCKSTEP_DECLARE_RMS_NORM

}  // namespace lockstep
