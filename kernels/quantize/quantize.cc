// The host entries of activation quantization and their CPU arm.
#include "kernels/quantize/quantize.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

// One call: either a rule or a static scale.
struct Request {
  bool is_static = false;
  float static_scale = 0.0f;
  ActScaleRule rule = ActScaleRule::kPerToken;
  ActGroups groups;
};

float DynamicScale(ActScaleRule rule, float amax) {
  return rule == ActScaleRule::kPerToken ? std::max(amax / 448.0f, 1.0f / (448.0f * 512.0f))
                                         : std::max(amax, 1e-10f) / 448.0f;
}

template <typename T>
void QuantizeRow(const Request& request, const T* x, int64_t k, uint8_t* codes, float* scales) {
  for (int64_t shard = 0; shard < k; shard += request.groups.shard_size) {
    const int64_t shard_end = shard + request.groups.shard_size;
    for (int64_t begin = shard; begin < shard_end; begin += request.groups.group) {
      const int64_t end = std::min(begin + request.groups.group, shard_end);
      float scale = request.static_scale;
      if (!request.is_static) {
        float amax = 0.0f;
        for (int64_t i = begin; i < end; ++i) amax = std::max(amax, std::fabs(ToFloat(x[i])));
        scale = DynamicScale(request.rule, amax);
      }
      for (int64_t i = begin; i < end; ++i) codes[i] = FloatToE4M3(ToFloat(x[i]) / scale);
      *scales++ = scale;
    }
  }
}

absl::Status QuantizeCpu(ExecContext* ctx, const Request& request, ConstTensorView x,
                         TensorView codes, TensorView scales) {
  const int64_t k = x.shape[1];
  ctx->pool->ParallelFor(x.rows(), [&](int64_t t) {
    if (x.dtype == DType::kF32) {
      QuantizeRow(request, x.row<float>(t), k, codes.row<uint8_t>(t), scales.row<float>(t));
    } else {
      QuantizeRow(request, x.row<BF16>(t), k, codes.row<uint8_t>(t), scales.row<float>(t));
    }
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
