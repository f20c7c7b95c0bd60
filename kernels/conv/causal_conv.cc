#include "kernels/conv/causal_conv.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/batch/batch_rows.h"
#include "kernels/conv/causal_conv_rows.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

absl::Status ConvCpu(ExecContext* ctx, const ConvProblem& p) {
  auto* run = SelectIsa(generic::ConvUnit, avx2::ConvUnit, avx512::ConvUnit);
  const int64_t blocks = (p.channels + kConvChannels - 1) / kConvChannels;
  ctx->pool->ParallelFor(p.num_sequences * blocks, [&](int64_t unit) {
    const int64_t begin = unit % blocks * kConvChannels;
    run(p, unit / blocks, begin, std::min(kConvChannels, p.channels - begin));
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status ConvCuda(ExecContext* ctx, const ConvProblem& p) {
  return ToStatus("causal_conv", LaunchCausalConv(p, ctx->stream));
}
#endif

using RunFn = absl::Status (*)(ExecContext*, const ConvProblem&);
constexpr Arm<ConvProblem, RunFn> kArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, ConvCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, ConvCpu},
};

}  // namespace

absl::Status CausalConv(ExecContext* ctx, const ForwardBatch& batch, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView bias, const ConvState& state,
                        TensorView y) {
  constexpr char kOp[] = "causal_conv";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp)
                      .Rank("conv", state.conv, 3)
                      .Rank("weight", weight, 2)
                      .Batch(batch)
                      .status());
  const int64_t channels = weight.shape[0], width = weight.shape[1];
  const bool has_bias = bias.shape.rank() != 0;
  OpCheck check(*ctx, kOp);
  check
      .That(width >= 2 && width <= kMaxConvWidth,
            absl::StrCat("the width is ", width, "; 2 to ", kMaxConvWidth, " is needed"))
      .Tensor("x", x, {DType::kF32, DType::kBF16}, {batch.num_tokens, channels})
      .Tensor("weight", weight, {DType::kF32, DType::kBF16}, {channels, width})
      .Tensor("y", y, {x.dtype}, {batch.num_tokens, channels})
      .Tensor("conv", state.conv, {x.dtype}, {state.conv.shape[0], width - 1, channels})
      .That(y.data != x.data || ctx->dry_run(), "x and y are one tensor, two are needed");
  if (has_bias) check.Tensor("bias", bias, {DType::kF32, DType::kBF16}, {channels});
  if (batch.num_snapshots > 0) {
    check.Rank("snapshot", state.snapshot, 3);
    if (state.snapshot.shape.rank() == 3) {
      check.Tensor("snapshot", state.snapshot, {x.dtype},
                   {state.snapshot.shape[0], width - 1, channels});
    }
  }
  RETURN_IF_ERROR(check.status());
  ConvProblem p;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kArms, ctx->device, p));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  p.batch = BatchRowsOf(batch);
  p.num_sequences = batch.num_sequences;
  p.num_tokens = batch.num_tokens;
  p.bf16 = x.dtype == DType::kBF16;
  p.weight_bf16 = weight.dtype == DType::kBF16;
  p.x = x.data;
  p.x_stride = x.row_stride;
  p.weight = weight.data;
  if (has_bias) {
    p.bias = bias.data;
    p.bias_bf16 = bias.dtype == DType::kBF16;
  }
  p.y = y.data;
  p.y_stride = y.row_stride;
  p.conv = state.conv.data;
  p.conv_snapshot = state.snapshot.data;
  p.channels = channels;
  p.width = width;
  return arm->run(ctx, p);
}

}  // namespace lockstep
