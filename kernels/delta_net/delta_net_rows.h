// The vector loops of the gated delta net's CPU arm, one set of functions per instruction set.
// Plain structs of pointers; the host entries check them.
#pragma once

#include <cstdint>

#include "kernels/delta_net/delta_net_launch.h"

namespace lockstep {

#define LOCKSTEP_DECLARE_DELTA_NET(isa)                                                \
  namespace isa {                                                                      \
  /* All rows of one sequence for one key head and its value heads. */                 \
  void DeltaNetUnit(const DeltaNetProblem& problem, int64_t sequence, int64_t k_head); \
  }
LOCKSTEP_DECLARE_DELTA_NET(generic)
LOCKSTEP_DECLARE_DELTA_NET(avx2)
LOCKSTEP_DECLARE_DELTA_NET(avx512)
#undef LOCKSTEP_DECLARE_DELTA_NET

}  // namespace lockstep
