// The host entries of activation quantization and their CPU arm.
#include "kernels/quantize/quantize.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/quantize/quantize_args.h"
#include "kernels/runtime/cpu_isa.h"

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

// One call: either a rule or a static scale.
struct Request {
  bool is_static = false;
  float static_scale = 0.0f;
  ActScaleRule rule = ActScaleRule::kPerToken;
  ActGroups groups;
};

using RowFn = void (*)(const QuantizeRowArgs&);

RowFn RowOf(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return generic::QuantizeRow;
    case CpuIsa::kAvx2:
      return avx2::QuantizeRow;
    case CpuIsa::kAvx512:
      return avx512::QuantizeRow;
  }
  return generic::QuantizeRow;
}

absl::Status QuantizeCpu(ExecContext* ctx, const Request& request, ConstTensorView x,
                         TensorView codes, TensorView scales) {
  QuantizeRowArgs row;
  row.x_bf16 = x.dtype == DType::kBF16;
  row.k = x.shape[1];
  row.shard_size = request.groups.shard_size;
  row.group = request.groups.group;
  row.scale_rule = request.is_static ? 0 : request.rule == ActScaleRule::kPerToken ? 1 : 2;
  row.static_scale = request.static_scale;
  const RowFn quantize = RowOf(GetCpuIsa());
  ctx->pool->ParallelFor(x.rows(), [&](int64_t t) {
    QuantizeRowArgs args = row;
    args.x = x.Rows(t, 1).data;
    args.codes = codes.row<uint8_t>(t);
    args.scales = scales.row<float>(t);
    quantize(args);
  });
  return absl::OkStatus();
}

struct Arm {
  DeviceType device;
  absl::Status (*run)(ExecContext*, const Request&, ConstTensorView, TensorView, TensorView);
};
constexpr Arm kArms[] = {
    {DeviceType::kCpu, QuantizeCpu},
};

absl::Status CheckOperands(const ActGroups& groups, ConstTensorView x, TensorView codes,
                           TensorView scales) {
  if (x.shape.rank() != 2 || (x.dtype != DType::kF32 && x.dtype != DType::kBF16)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Quantize: x is ", x.ToString(), ", expected [T, K] of F32 or BF16"));
  }
  const int64_t k = x.shape[1];
  if (groups.shard_size <= 0 || groups.group <= 0 || k % groups.shard_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("Quantize: groups of ", groups.group,
                                                   " in shards of ", groups.shard_size,
                                                   " do not cut ", k, " columns"));
  }
  if (codes.dtype != DType::kU8 || codes.shape != x.shape) {
    return absl::InvalidArgumentError(absl::StrCat("Quantize: codes are ", codes.ToString(),
                                                   ", expected U8", x.shape.ToString()));
  }
  const Shape expected{x.rows(), groups.Count(k)};
  if (scales.dtype != DType::kF32 || scales.shape != expected) {
    return absl::InvalidArgumentError(absl::StrCat("Quantize: scales are ", scales.ToString(),
                                                   ", expected F32", expected.ToString()));
  }
  return absl::OkStatus();
}

absl::Status Quantize(ExecContext* ctx, const Request& request, ConstTensorView x, TensorView codes,
                      TensorView scales) {
  RETURN_IF_ERROR(CheckOperands(request.groups, x, codes, scales));
  ctx->counters->op_launches.fetch_add(1, std::memory_order_relaxed);
  if (ctx->dry_run()) return absl::OkStatus();
  for (const Arm& arm : kArms) {
    if (arm.device == x.device) return arm.run(ctx, request, x, codes, scales);
  }
  return absl::UnimplementedError("Quantize: this build has no arm for the device of x");
}

}  // namespace

absl::Status QuantizeDynamic(ExecContext* ctx, ConstTensorView x, ActScaleRule rule,
                             const ActGroups& groups, TensorView codes, TensorView scales) {
  Request request;
  request.rule = rule;
  request.groups = groups;
  return Quantize(ctx, request, x, codes, scales);
}

absl::Status QuantizeStatic(ExecContext* ctx, ConstTensorView x, float scale,
                            const ActGroups& groups, TensorView codes, TensorView scales) {
  if (!(scale > 0.0f) || !std::isfinite(scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Quantize: static scale is ", scale, ", expected a positive number"));
  }
  Request request;
  request.is_static = true;
  request.static_scale = scale;
  request.groups = groups;
  return Quantize(ctx, request, x, codes, scales);
}

}  // namespace lockstep
