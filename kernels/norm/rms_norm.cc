#include "kernels/norm/rms_norm.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_launch.h"
#include "kernels/norm/rms_norm_row.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

using RunFn = absl::Status (*)(ExecContext* ctx, const RmsNormProblem& problem);

template <typename Act, typename Weight>
void NormRow(const RmsNormProblem& p, int64_t r, float* row) {
  if (p.delta != nullptr) {
    Act* residual = static_cast<Act*>(p.residual) + r * p.x_stride;
    const float* delta = p.delta + r * p.delta_stride;
    for (int64_t i = 0; i < p.dim; ++i) {
      residual[i] = FromFloat<Act>(ToFloat(residual[i]) + delta[i]);
      row[i] = ToFloat(residual[i]);
    }
  } else {
    const Act* x = static_cast<const Act*>(p.x) + r * p.x_stride;
    for (int64_t i = 0; i < p.dim; ++i) row[i] = ToFloat(x[i]);
  }
  const float scale = RmsScale(row, p.dim, p.eps);
  const Weight* weight = static_cast<const Weight*>(p.weight);
  Act* y = static_cast<Act*>(p.y) + r * p.y_stride;
  for (int64_t i = 0; i < p.dim; ++i) {
    y[i] = FromFloat<Act>(row[i] * scale * (p.weight_offset + ToFloat(weight[i])));
  }
}

absl::Status RunCpu(ExecContext* ctx, const RmsNormProblem& p) {
  Workspace::Scope scope(ctx->workspace);
  const TensorView rows = ctx->workspace->Take(DType::kF32, {p.rows, p.dim});
  if (ctx->dry_run()) return absl::OkStatus();
  auto* run = p.bf16 ? (p.weight_bf16 ? NormRow<BF16, BF16> : NormRow<BF16, float>)
                     : (p.weight_bf16 ? NormRow<float, BF16> : NormRow<float, float>);
  // Several rows at a time: a row of a small model is less work than handing it out.
  constexpr int64_t kRows = 8;
  ctx->pool->ParallelFor((p.rows + kRows - 1) / kRows, [&](int64_t block) {
    const int64_t end = std::min(p.rows, (block + 1) * kRows);
    for (int64_t r = block * kRows; r < end; ++r) run(p, r, rows.row<float>(r));
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status RunCuda(ExecContext* ctx, const RmsNormProblem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  const LaunchStatus status = LaunchRmsNorm(p, ctx->stream);
  if (status == LaunchStatus::kOk) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("rms_norm: the launch failed with cuda error ", static_cast<int>(status)));
}
#endif

constexpr Arm<RmsNormProblem, RunFn> kArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, RunCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, RunCpu},
};

absl::Status Run(ExecContext* ctx, const char* op, const RmsNormProblem& problem) {
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(op, kArms, ctx->device, problem));
  CountLaunch(ctx);
  return arm->run(ctx, problem);
}

void SetWeightAndOutput(ConstTensorView weight, const RmsNormParams& params, TensorView y,
                        RmsNormProblem* problem) {
  problem->weight = weight.data;
  problem->weight_bf16 = weight.dtype == DType::kBF16;
  problem->y = y.data;
  problem->y_stride = y.row_stride;
  problem->rows = y.shape[0];
  problem->dim = y.shape[1];
  problem->bf16 = y.dtype == DType::kBF16;
  problem->eps = params.eps;
  problem->weight_offset = params.weight_offset;
}

}  // namespace

absl::Status RmsNorm(ExecContext* ctx, ConstTensorView x, ConstTensorView weight,
                     const RmsNormParams& params, TensorView y) {
  RETURN_IF_ERROR(OpCheck(*ctx, "rms_norm").Rank("x", x, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, "rms_norm")
                      .Tensor("x", x, {DType::kF32, DType::kBF16}, x.shape)
                      .Tensor("weight", weight, {DType::kF32, DType::kBF16}, {x.shape[1]})
                      .Tensor("y", y, {x.dtype}, x.shape)
                      .status());
  RmsNormProblem problem;
  SetWeightAndOutput(weight, params, y, &problem);
  problem.x = x.data;
  problem.x_stride = x.row_stride;
  return Run(ctx, "rms_norm", problem);
}

absl::Status AddRmsNorm(ExecContext* ctx, TensorView residual, ConstTensorView delta,
                        ConstTensorView weight, const RmsNormParams& params, TensorView y) {
  RETURN_IF_ERROR(OpCheck(*ctx, "add_rms_norm").Rank("residual", residual, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, "add_rms_norm")
                      .Tensor("residual", residual, {DType::kF32, DType::kBF16}, residual.shape)
                      .Tensor("delta", delta, {DType::kF32}, residual.shape)
                      .Tensor("weight", weight, {DType::kF32, DType::kBF16}, {residual.shape[1]})
                      .Tensor("y", y, {residual.dtype}, residual.shape)
                      .That(y.data != residual.data || ctx->dry_run(),
                            "y and residual are one tensor, two are needed")
                      .status());
  RmsNormProblem problem;
  SetWeightAndOutput(weight, params, y, &problem);
  problem.residual = residual.data;
  problem.x_stride = residual.row_stride;
  problem.delta = static_cast<const float*>(delta.data);
  problem.delta_stride = delta.row_stride;
  return Run(ctx, "add_rms_norm", problem);
}

}  // namespace lockstep
