#include "kernels/norm/rms_norm.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_launch.h"
#include "kernels/norm/rms_norm_rows.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

using RunFn = absl::Status (*)(ExecContext* ctx, const RmsNormProblem& problem);

absl::Status RunCpu(ExecContext* ctx, const RmsNormProblem& p) {
  // Several rows at a time: a row of a small model is less work than handing it out.
  constexpr int64_t kRows = 8;
  const int64_t blocks = (p.rows + kRows - 1) / kRows;
  Workspace::Scope scope(ctx->workspace);
  const TensorView row = ctx->workspace->Take(DType::kF32, {blocks, (p.dim + 15) / 16 * 16});
  if (ctx->dry_run()) return absl::OkStatus();
  auto* run = SelectIsa(generic::RmsNormRows, avx2::RmsNormRows, avx512::RmsNormRows);
  ctx->pool->ParallelFor(blocks, [&](int64_t block) {
    run(p, block * kRows, std::min(p.rows, (block + 1) * kRows), row.row<float>(block));
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status RunCuda(ExecContext* ctx, const RmsNormProblem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  return ToStatus("rms_norm", LaunchRmsNorm(p, ctx->stream));
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
