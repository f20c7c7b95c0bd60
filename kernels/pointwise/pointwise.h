// Elementwise operations. Each computes in F32 and rounds once, to the dtype of its output.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// residual = round(f32(residual) + delta). residual [T, D] F32 or BF16; delta [T, D] F32.
absl::Status AddResidual(ExecContext* ctx, TensorView residual, ConstTensorView delta);

// out = round(silu(gate) * up) on the F32 sums (numerics N4). gate, up [T, I] F32; out [T, I] F32
// or BF16.
absl::Status SwiGlu(ExecContext* ctx, ConstTensorView gate, ConstTensorView up, TensorView out);

// out = round(relu(x)^2). x [T, I] F32; out [T, I] F32 or BF16. A NaN stays one.
absl::Status Relu2(ExecContext* ctx, ConstTensorView x, TensorView out);

}  // namespace lockstep
