// The caches of one layer, as ops see them: the paged KV cache and per-sequence recurrent states.
#pragma once

#include <cstdint>

#include "kernels/base/tensor_view.h"

namespace lockstep {

// Keys and values of one layer on one rank: [num_blocks, num_kv_heads, kGrid, head_dim], F32 or
// BF16 (the rank's heads only). Position p of a sequence is row p % kGrid of block block_table[p /
// kGrid].
struct KvCacheView {
  TensorView keys;
  TensorView values;
};

}  // namespace lockstep
