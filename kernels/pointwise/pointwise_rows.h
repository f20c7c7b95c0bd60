// The vector loops of the CPU arm, one set of functions per instruction set.
#pragma once

#include <cstdint>

#include "kernels/pointwise/pointwise_launch.h"

namespace lockstep {

#define LOCKSTEP_DECLARE_POINTWISE(isa)                                      \
  namespace isa {                                                            \
  /* Rows [begin, end) of the problem. */                                    \
  void SwiGluRows(const SwiGluProblem& problem, int64_t begin, int64_t end); \
  }
LOCKSTEP_DECLARE_POINTWISE(generic)
LOCKSTEP_DECLARE_POINTWISE(avx2)
LOCKSTEP_DECLARE_POINTWISE(avx512)
#undef LOCKSTEP_DECLARE_POINTWISE

}  // namespace lockstep
