// Whole rows of logits from the shards of the vocabulary that the ranks computed.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// out[i][c] = gathered[c / L][order[i]][c % L] for c < V: gathered F32 [world, R, L], order one row
// of R for each row of out, out F32 [order, V] with V <= world * L. InvalidArgument for other
// shapes.
absl::Status AssembleLogits(ExecContext* ctx, ConstTensorView gathered,
                            const std::vector<int64_t>& order, TensorView out);

}  // namespace lockstep
