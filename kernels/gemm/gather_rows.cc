// The host entry of GatherRows and its CPU arm.
#include "kernels/gemm/gather_rows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"

namespace lockstep {
namespace {

// Row `row` of the packed weight, which is one of `weight.n`.
template <typename W, typename Out>
void CopyRow(const GemmWeight& weight, int64_t row, Out* out) {
  const int64_t group = row / kGroupRows;
  const int64_t rows_in_group = std::min<int64_t>(kGroupRows, weight.n - group * kGroupRows);
  const W* p =
      static_cast<const W*>(weight.codes) + group * kGroupRows * weight.k + row % kGroupRows;
  for (int64_t k = 0; k < weight.k; ++k) out[k] = FromFloat<Out>(ToFloat(p[k * rows_in_group]));
}

template <typename W, typename Out>
void GatherCpu(ExecContext* ctx, const GemmWeight& weight, ConstTensorView tokens,
               int64_t row_begin, TensorView out) {
  const int32_t* ids = tokens.row<int32_t>(0);
  ctx->pool->ParallelFor(out.rows(), [&](int64_t t) {
    const int64_t row = ids[t] - row_begin;
    Out* to = out.row<Out>(t);
    if (row >= 0 && row < weight.n) {
      CopyRow<W, Out>(weight, row, to);
    } else {
      std::fill(to, to + weight.k, FromFloat<Out>(0.0f));
    }
  });
}

}  // namespace

absl::Status GatherRows(ExecContext* ctx, const GemmWeight& weight, ConstTensorView tokens,
                        int64_t row_begin, TensorView out) {
  if (weight.format != WeightFormat::kF32 && weight.format != WeightFormat::kBF16) {
    return absl::FailedPreconditionError("GatherRows: the weight is quantized");
  }
  if (tokens.dtype != DType::kI32 || tokens.shape.rank() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("GatherRows: tokens are ", tokens.ToString(), ", expected I32 [T]"));
  }
  if (out.shape != Shape{tokens.rows(), weight.k} ||
      (out.dtype != DType::kF32 && out.dtype != DType::kBF16)) {
    return absl::InvalidArgumentError(absl::StrCat("GatherRows: out is ", out.ToString(),
                                                   ", expected [", tokens.rows(), ", ", weight.k,
                                                   "] of F32 or BF16"));
  }
  if (weight.device != DeviceType::kCpu) {
    return absl::UnimplementedError("GatherRows: this build has no arm for the weight's device");
  }
  ctx->counters->op_launches.fetch_add(1, std::memory_order_relaxed);
  if (ctx->dry_run()) return absl::OkStatus();
  const bool bf16 = weight.format == WeightFormat::kBF16;
  if (out.dtype == DType::kF32) {
    if (bf16) {
      GatherCpu<BF16, float>(ctx, weight, tokens, row_begin, out);
    } else {
      GatherCpu<float, float>(ctx, weight, tokens, row_begin, out);
    }
  } else if (bf16) {
    GatherCpu<BF16, BF16>(ctx, weight, tokens, row_begin, out);
  } else {
    GatherCpu<float, BF16>(ctx, weight, tokens, row_begin, out);
  }
  return absl::OkStatus();
}

}  // namespace lockstep
