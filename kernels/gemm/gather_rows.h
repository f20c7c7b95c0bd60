// GatherRows: rows of an unquantized packed weight, for a head that also serves as the embedding.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/gemm.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// out[t] = row (tokens[t] - row_begin) of the weight where 0 <= that < weight.n, zeros elsewhere.
// weight F32 or BF16 (FailedPrecondition otherwise); tokens I32 [T]; out [T, k] F32 or BF16
// (rounded once when narrower than the weight).
absl::Status GatherRows(ExecContext* ctx, const GemmWeight& weight, ConstTensorView tokens,
                        int64_t row_begin, TensorView out);

}  // namespace lockstep
