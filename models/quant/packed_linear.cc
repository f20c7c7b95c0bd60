// PackedLinear: applying it.
#include "models/quant/packed_linear.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gather_rows.h"

namespace lockstep {

PackedLinear::PackedLinear(LinearShard shard, LinearScheme scheme, GemmWeight weight,
                           ActivationPlan activation, std::vector<DeviceBuffer> buffers)
    : ResidentLinear(std::move(shard), std::move(scheme)),
      weight_(std::move(weight)),
      activation_(activation),
      buffers_(std::move(buffers)) {}

absl::Status PackedLinear::Apply(ExecContext* ctx, LinearInput* input, TensorView sum) const {
  if (activation_.scheme == ActivationScheme::kNone) {
    return Gemm(ctx, weight_, input->x(), nullptr, sum);
  }
  ASSIGN_OR_RETURN(const LinearInput::Quantized quantized, QuantizeInput(ctx, input));
  const ConstTensorView scales = quantized.scales;
  return Gemm(ctx, weight_, quantized.codes, &scales, sum);
}

absl::Status PackedLinear::ApplyShards(ExecContext* ctx, LinearInput* input,
                                       TensorView sums) const {
  if (activation_.scheme == ActivationScheme::kNone) {
    return GemmShards(ctx, weight_, input->x(), nullptr, sums);
  }
  ASSIGN_OR_RETURN(const LinearInput::Quantized quantized, QuantizeInput(ctx, input));
  const ConstTensorView scales = quantized.scales;
  return GemmShards(ctx, weight_, quantized.codes, &scales, sums);
}

absl::StatusOr<LinearInput::Quantized> PackedLinear::QuantizeInput(ExecContext* ctx,
                                                                   LinearInput* input) const {
  const ActivationPlan& plan = activation_;
  if (plan.scheme == ActivationScheme::kNone) {
    return absl::FailedPreconditionError(
        absl::StrCat(shard().module, " does not quantize its input: its weight format is ",
                     Name(scheme().weight), " with activations ", Name(plan.scheme)));
  }
  for (const LinearInput::Quantized& q : input->quantized()) {
    if (q.scheme == plan.scheme && q.shard_size == plan.groups.shard_size &&
        q.group == plan.groups.group && q.static_scale == plan.static_scale) {
      return q;
    }
  }
  const ConstTensorView x = input->x();
  if (x.shape.rank() != 2 || x.shape[1] != weight_.k) {
    return absl::InvalidArgumentError(absl::StrCat(shard().module, ": input is ", x.ToString(),
                                                   ", expected [T, ", weight_.k, "]"));
  }
  LinearInput::Quantized q;
  q.scheme = plan.scheme;
  q.shard_size = plan.groups.shard_size;
  q.group = plan.groups.group;
  q.static_scale = plan.static_scale;
  q.codes = ctx->workspace->Take(DType::kU8, x.shape);
  q.scales = ctx->workspace->Take(DType::kF32, {x.rows(), plan.groups.Count(weight_.k)});
  if (plan.scheme == ActivationScheme::kFp8Static) {
    RETURN_IF_ERROR(QuantizeStatic(ctx, x, plan.static_scale, plan.groups, q.codes, q.scales));
  } else {
    const ActScaleRule rule = plan.scheme == ActivationScheme::kFp8PerToken
                                  ? ActScaleRule::kPerToken
                                  : ActScaleRule::kBlock128;
    RETURN_IF_ERROR(QuantizeDynamic(ctx, x, rule, plan.groups, q.codes, q.scales));
  }
  input->quantized().push_back(q);
  return q;
}

absl::Status PackedLinear::GatherRows(ExecContext* ctx, ConstTensorView tokens, int64_t row_begin,
                                      TensorView out) const {
  const absl::Status status = lockstep::GatherRows(ctx, weight_, tokens, row_begin, out);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(shard().module, " (", Name(scheme().weight),
                                                  "): ", status.message()));
}

}  // namespace lockstep
