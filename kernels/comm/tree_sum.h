// TreeSum: the sum over ranks in tree order, the one implementation that every transport uses:
//   out[i] = ((p0[i] + p1[i]) + (p2[i] + p3[i])) + ((p4[i] + p5[i]) + (p6[i] + p7[i]))
// in F32, one addition per inner node (numerics N2). Pure function; thread safe.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/runtime/thread_pool.h"

namespace lockstep {

// `parts`: pointers to `n` floats each; their number is a power of two. `out` may be one of them.
// `pool` may be null; it changes speed only.
void TreeSum(ThreadPool* pool, const std::vector<const float*>& parts, int64_t n, float* out);

}  // namespace lockstep
