// Launcher of GatherRows on CUDA. Pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

struct GatherRowsProblem {
  const void* codes = nullptr;  // BF16 fragments (pack_fragments.h)
  int64_t n = 0;
  int64_t k = 0;
  const int32_t* tokens = nullptr;
  int64_t row_begin = 0;
  int64_t num_tokens = 0;
  void* out = nullptr;
  bool out_bf16 = false;
  int64_t out_stride = 0;
};

LaunchStatus LaunchGatherRows(const GatherRowsProblem& problem, void* stream);

}  // namespace lockstep
