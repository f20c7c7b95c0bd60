// The host entries of activation quantization and their CPU arm.
#include "kernels/quantize/quantize.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/quantize/quantize_args.h"
#include "kernels/quantize/quantize_launch.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace generic {
void QuantizeRow(const QuantizeRowArgs& args);
}
namespace avx2 {
void QuantizeRow(const QuantizeRowArgs& args);
}
namespace avx512 {
void QuantizeRow(const QuantizeRowArgs& args);
}

namespace {

absl::Status QuantizeCpu(ExecContext* ctx, const QuantizeProblem& p) {
  QuantizeRowArgs row;
  row.x_bf16 = p.x_bf16;
  row.k = p.k;
  row.shard_size = p.shard_size;
  row.group = p.group;
  row.scale_rule = p.scale_rule;
  row.static_scale = p.static_scale;
  auto* quantize = SelectIsa(generic::QuantizeRow, avx2::QuantizeRow, avx512::QuantizeRow);
  const int64_t x_stride = p.x_stride * (p.x_bf16 ? 2 : 4);
  ctx->pool->ParallelFor(p.rows, [&](int64_t t) {
    QuantizeRowArgs args = row;
    args.x = static_cast<const uint8_t*>(p.x) + t * x_stride;
    args.codes = p.codes + t * p.codes_stride;
    args.scales = p.scales + t * p.scales_stride;
    quantize(args);
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status QuantizeCuda(ExecContext* ctx, const QuantizeProblem& p) {
  return ToStatus("quantize", LaunchQuantize(p, ctx->stream));
}
#endif

using QuantizeFn = absl::Status (*)(ExecContext*, const QuantizeProblem&);
constexpr Arm<QuantizeProblem, QuantizeFn> kArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, QuantizeCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, QuantizeCpu},
};

absl::Status CheckOperands(const ExecContext& ctx, const ActGroups& groups, ConstTensorView x,
                           TensorView codes, TensorView scales) {
  constexpr char kOp[] = "quantize";
  RETURN_IF_ERROR(OpCheck(ctx, kOp).Rank("x", x, 2).status());
  const int64_t k = x.shape[1];
  RETURN_IF_ERROR(OpCheck(ctx, kOp)
                      .Tensor("x", x, {DType::kF32, DType::kBF16}, x.shape)
                      .That(groups.shard_size > 0 && groups.group > 0 && k % groups.shard_size == 0,
                            absl::StrCat("groups of ", groups.group, " in shards of ",
                                         groups.shard_size, " do not cut ", k, " columns"))
                      .status());
  return OpCheck(ctx, kOp)
      .Tensor("codes", codes, {DType::kU8}, x.shape)
      .Tensor("scales", scales, {DType::kF32}, {x.rows(), groups.Count(k)})
      .status();
}

absl::Status Quantize(ExecContext* ctx, int scale_rule, float static_scale, const ActGroups& groups,
                      ConstTensorView x, TensorView codes, TensorView scales) {
  RETURN_IF_ERROR(CheckOperands(*ctx, groups, x, codes, scales));
  QuantizeProblem p;
  p.x = x.data;
  p.codes = static_cast<uint8_t*>(codes.data);
  p.scales = static_cast<float*>(scales.data);
  p.rows = x.shape[0];
  p.k = x.shape[1];
  p.x_stride = x.row_stride;
  p.codes_stride = codes.row_stride;
  p.scales_stride = scales.row_stride;
  p.shard_size = groups.shard_size;
  p.group = groups.group;
  p.scale_rule = scale_rule;
  p.static_scale = static_scale;
  p.x_bf16 = x.dtype == DType::kBF16;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("quantize", kArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

}  // namespace

absl::Status QuantizeDynamic(ExecContext* ctx, ConstTensorView x, ActScaleRule rule,
                             const ActGroups& groups, TensorView codes, TensorView scales) {
  return Quantize(ctx, rule == ActScaleRule::kPerToken ? 1 : 2, 0.0f, groups, x, codes, scales);
}

absl::Status QuantizeStatic(ExecContext* ctx, ConstTensorView x, float scale,
                            const ActGroups& groups, TensorView codes, TensorView scales) {
  RETURN_IF_ERROR(
      OpCheck(*ctx, "quantize")
          .That(scale > 0.0f && std::isfinite(scale),
                absl::StrCat("static scale is ", scale, ", a positive number is needed"))
          .status());
  return Quantize(ctx, 0, scale, groups, x, codes, scales);
}

}  // namespace lockstep
