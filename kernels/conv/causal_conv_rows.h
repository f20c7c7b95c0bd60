// The vector loop of the causal convolution's CPU arm, one function per instruction set. Plain
// structs of pointers; the host entry checks them.
#pragma once

#include <cstdint>

#include "kernels/conv/causal_conv_launch.h"

namespace lockstep {

constexpr int64_t kConvChannels = 64;  // channels of one unit of work

#define LOCKSTEP_DECLARE_CAUSAL_CONV(isa)                                                      \
  namespace isa {                                                                              \
  /* All rows of one sequence, channels [begin, begin + count) with count <= kConvChannels. */ \
  void ConvUnit(const ConvProblem& problem, int64_t sequence, int64_t begin, int64_t count);   \
  }
LOCKSTEP_DECLARE_CAUSAL_CONV(generic)
LOCKSTEP_DECLARE_CAUSAL_CONV(avx2)
LOCKSTEP_DECLARE_CAUSAL_CONV(avx512)
#undef LOCKSTEP_DECLARE_CAUSAL_CONV

}  // namespace lockstep
