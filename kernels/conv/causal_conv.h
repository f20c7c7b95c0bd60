// Depthwise causal convolution with silu, in front of the recurrent mixers. The state of a slot is
// the last width - 1 raw inputs.
//   y[t] = round(silu(bias[c] + sum_j w[c, j] x[t - (width - 1) + j]))     per channel, j ascending
// A sequence that starts at position 0 starts from zero inputs, whatever its slot holds. Snapshots
// named by the batch get the raw inputs before their grid point. Width is 2 to 8. A channel of a
// sequence depends on nothing else.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// States of one layer for all slots, and their snapshots.
struct ConvState {
  TensorView conv;      // act [slots, width - 1, C] raw inputs before the next row, oldest first
  TensorView snapshot;  // act [snapshots, width - 1, C]
};

// x, y [T, C] act dtype (F32 or BF16), not one tensor; weight [C, width] and bias [C] F32 or BF16.
// A bias of rank 0 (a default view) is none.
absl::Status CausalConv(ExecContext* ctx, const ForwardBatch& batch, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView bias, const ConvState& state,
                        TensorView y);

}  // namespace lockstep
