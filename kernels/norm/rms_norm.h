// Root-mean-square normalization over the last dimension.
//   y = round(x * rsqrt(mean(x^2) + eps) * (weight_offset + w))       one rounding, to y's dtype
// The mean is one fixed reduction per row width (numerics N4): it depends on D alone.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

struct RmsNormParams {
  float eps = 1e-6f;
  float weight_offset = 0.0f;  // 1 for zero-centred weights (Qwen3.5), 0 for plain ones
};

// x [T, D] F32 or BF16; weight [D] F32 or BF16; y [T, D] of x's dtype (may be x itself).
absl::Status RmsNorm(ExecContext* ctx, ConstTensorView x, ConstTensorView weight,
                     const RmsNormParams& params, TensorView y);

// residual = round(f32(residual) + delta), then y = RmsNorm(residual) of the rounded value.
// residual, y [T, D] F32 or BF16 (one dtype); delta [T, D] F32.
absl::Status AddRmsNorm(ExecContext* ctx, TensorView residual, ConstTensorView delta,
                        ConstTensorView weight, const RmsNormParams& params, TensorView y);

}  // namespace lockstep
