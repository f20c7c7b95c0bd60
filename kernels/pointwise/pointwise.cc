#include "kernels/pointwise/pointwise.h"

#include <algorithm>

#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/pointwise/pointwise_launch.h"
#include "kernels/pointwise/pointwise_rows.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

// Rows of one unit of parallel work.
constexpr int64_t kRows = 8;

template <typename Act>
void AddRow(const AddResidualProblem& p, int64_t r) {
  Act* residual = static_cast<Act*>(p.residual) + r * p.residual_stride;
  const float* delta = p.delta + r * p.delta_stride;
  for (int64_t i = 0; i < p.dim; ++i) {
    residual[i] = FromFloat<Act>(ToFloat(residual[i]) + delta[i]);
  }
}

absl::Status AddResidualCpu(ExecContext* ctx, const AddResidualProblem& p) {
  ctx->pool->ParallelFor((p.rows + kRows - 1) / kRows, [&](int64_t block) {
    const int64_t end = std::min(p.rows, (block + 1) * kRows);
    for (int64_t r = block * kRows; r < end; ++r) p.bf16 ? AddRow<BF16>(p, r) : AddRow<float>(p, r);
  });
  return absl::OkStatus();
}

template <typename Act>
void Relu2Row(const Relu2Problem& p, int64_t r) {
  const float* x = p.x + r * p.x_stride;
  Act* out = static_cast<Act*>(p.out) + r * p.out_stride;
  for (int64_t i = 0; i < p.dim; ++i) {
    const float positive = x[i] < 0.0f ? 0.0f : x[i];
    out[i] = FromFloat<Act>(positive * positive);
  }
}

absl::Status Relu2Cpu(ExecContext* ctx, const Relu2Problem& p) {
  ctx->pool->ParallelFor((p.rows + kRows - 1) / kRows, [&](int64_t block) {
    const int64_t end = std::min(p.rows, (block + 1) * kRows);
    for (int64_t r = block * kRows; r < end; ++r) {
      p.bf16 ? Relu2Row<BF16>(p, r) : Relu2Row<float>(p, r);
    }
  });
  return absl::OkStatus();
}

absl::Status SwiGluCpu(ExecContext* ctx, const SwiGluProblem& p) {
  auto* run = SelectIsa(generic::SwiGluRows, avx2::SwiGluRows, avx512::SwiGluRows);
  ctx->pool->ParallelFor((p.rows + kRows - 1) / kRows, [&](int64_t block) {
    run(p, block * kRows, std::min(p.rows, (block + 1) * kRows));
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status AddResidualCuda(ExecContext* ctx, const AddResidualProblem& p) {
  return ToStatus("add_residual", LaunchAddResidual(p, ctx->stream));
}
absl::Status SwiGluCuda(ExecContext* ctx, const SwiGluProblem& p) {
  return ToStatus("swiglu", LaunchSwiGlu(p, ctx->stream));
}
#endif

using AddFn = absl::Status (*)(ExecContext*, const AddResidualProblem&);
constexpr Arm<AddResidualProblem, AddFn> kAddArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, AddResidualCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, AddResidualCpu},
};

using SwiGluFn = absl::Status (*)(ExecContext*, const SwiGluProblem&);
constexpr Arm<SwiGluProblem, SwiGluFn> kSwiGluArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, SwiGluCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, SwiGluCpu},
};

using Relu2Fn = absl::Status (*)(ExecContext*, const Relu2Problem&);
constexpr Arm<Relu2Problem, Relu2Fn> kRelu2Arms[] = {
    {"cpu", DeviceType::kCpu, nullptr, Relu2Cpu},
};

}  // namespace

absl::Status AddResidual(ExecContext* ctx, TensorView residual, ConstTensorView delta) {
  RETURN_IF_ERROR(OpCheck(*ctx, "add_residual").Rank("residual", residual, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, "add_residual")
                      .Tensor("residual", residual, {DType::kF32, DType::kBF16}, residual.shape)
                      .Tensor("delta", delta, {DType::kF32}, residual.shape)
                      .status());
  AddResidualProblem p;
  p.residual = residual.data;
  p.delta = static_cast<const float*>(delta.data);
  p.rows = residual.shape[0];
  p.dim = residual.shape[1];
  p.residual_stride = residual.row_stride;
  p.delta_stride = delta.row_stride;
  p.bf16 = residual.dtype == DType::kBF16;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("add_residual", kAddArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

absl::Status SwiGlu(ExecContext* ctx, ConstTensorView gate, ConstTensorView up, TensorView out) {
  RETURN_IF_ERROR(OpCheck(*ctx, "swiglu").Rank("gate", gate, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, "swiglu")
                      .Tensor("gate", gate, {DType::kF32}, gate.shape)
                      .Tensor("up", up, {DType::kF32}, gate.shape)
                      .Tensor("out", out, {DType::kF32, DType::kBF16}, gate.shape)
                      .status());
  SwiGluProblem p;
  p.gate = static_cast<const float*>(gate.data);
  p.up = static_cast<const float*>(up.data);
  p.out = out.data;
  p.rows = gate.shape[0];
  p.dim = gate.shape[1];
  p.gate_stride = gate.row_stride;
  p.up_stride = up.row_stride;
  p.out_stride = out.row_stride;
  p.bf16 = out.dtype == DType::kBF16;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("swiglu", kSwiGluArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

absl::Status Relu2(ExecContext* ctx, ConstTensorView x, TensorView out) {
  RETURN_IF_ERROR(OpCheck(*ctx, "relu2").Rank("x", x, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, "relu2")
                      .Tensor("x", x, {DType::kF32}, x.shape)
                      .Tensor("out", out, {DType::kF32, DType::kBF16}, x.shape)
                      .status());
  Relu2Problem p;
  p.x = static_cast<const float*>(x.data);
  p.out = out.data;
  p.rows = x.shape[0];
  p.dim = x.shape[1];
  p.x_stride = x.row_stride;
  p.out_stride = out.row_stride;
  p.bf16 = out.dtype == DType::kBF16;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("relu2", kRelu2Arms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

}  // namespace lockstep
