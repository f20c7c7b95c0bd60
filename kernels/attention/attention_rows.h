// The vector loops of the attention's CPU arm, one set of functions per instruction set. Plain
// structs of pointers; the host entries check them.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_launch.h"

namespace lockstep {

#define LOCKSTEP_DECLARE_ATTENTION(isa)                                            \
  namespace isa {                                                                  \
  /* The query heads of one kv head in one row, which belongs to one sequence. */  \
  void AttentionUnit(const AttentionProblem& problem, int64_t sequence, int64_t t, \
                     int64_t kv_head);                                             \
  }
LOCKSTEP_DECLARE_ATTENTION(generic)
LOCKSTEP_DECLARE_ATTENTION(avx2)
LOCKSTEP_DECLARE_ATTENTION(avx512)
#undef LOCKSTEP_DECLARE_ATTENTION

}  // namespace lockstep
