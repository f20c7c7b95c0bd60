// Embedding rows under a vocabulary split. Rows are selected from their owner, never summed
// (numerics N4): summing would turn -0 into +0.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// out[t] = f32-exact copy of table[tokens[t] - vocab_begin] in out's dtype where this rank owns the
// token, zeros elsewhere. tokens I32 [T]; table [rows, H] BF16 or F32; out [T, H] F32 or BF16.
absl::Status EmbeddingLookup(ExecContext* ctx, ConstTensorView tokens, ConstTensorView table,
                             int64_t vocab_begin, TensorView out);

// out[t] = gathered[owner of tokens[t]][t], where rank r owns tokens
// [r * rows_per_rank, (r + 1) * rows_per_rank). gathered [world, T, H]; out [T, H], one dtype. A
// token of no rank: the CPU arm refuses it, the CUDA arm, which no host waits for, makes its row
// NaN.
absl::Status EmbeddingSelect(ExecContext* ctx, ConstTensorView tokens, ConstTensorView gathered,
                             int64_t rows_per_rank, TensorView out);

}  // namespace lockstep
