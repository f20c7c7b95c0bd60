// The host entry of GatherRows, its CPU arm and the call of its CUDA arm.
#include "kernels/gemm/gather_rows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gather_rows_launch.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

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

struct Problem {
  const GemmWeight& weight;
  ConstTensorView tokens;
  int64_t row_begin;
  TensorView out;
};

absl::Status RunCpu(ExecContext* ctx, const Problem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  const bool bf16 = p.weight.format == WeightFormat::kBF16;
  if (p.out.dtype == DType::kF32) {
    if (bf16) {
      GatherCpu<BF16, float>(ctx, p.weight, p.tokens, p.row_begin, p.out);
    } else {
      GatherCpu<float, float>(ctx, p.weight, p.tokens, p.row_begin, p.out);
    }
  } else if (bf16) {
    GatherCpu<BF16, BF16>(ctx, p.weight, p.tokens, p.row_begin, p.out);
  } else {
    GatherCpu<float, BF16>(ctx, p.weight, p.tokens, p.row_begin, p.out);
  }
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
const char* CannotRunCuda(const Problem& p) {
  if (p.weight.format != WeightFormat::kBF16) return "the weight is F32; BF16 is needed";
  if (p.weight.k % 16 != 0) return "K is not a multiple of 16";
  return nullptr;
}

absl::Status RunCuda(ExecContext* ctx, const Problem& problem) {
  if (ctx->dry_run()) return absl::OkStatus();
  GatherRowsProblem p;
  p.codes = problem.weight.codes;
  p.n = problem.weight.n;
  p.k = problem.weight.k;
  p.tokens = static_cast<const int32_t*>(problem.tokens.data);
  p.row_begin = problem.row_begin;
  p.num_tokens = problem.tokens.shape[0];
  p.out = problem.out.data;
  p.out_bf16 = problem.out.dtype == DType::kBF16;
  p.out_stride = problem.out.row_stride;
  return ToStatus("GatherRows", LaunchGatherRows(p, ctx->stream));
}
#endif

using RunFn = absl::Status (*)(ExecContext* ctx, const Problem& problem);
constexpr Arm<Problem, RunFn> kArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, CannotRunCuda, RunCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, RunCpu},
};

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
  const Problem problem = {weight, tokens, row_begin, out};
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("GatherRows", kArms, weight.device, problem));
  CountLaunch(ctx);
  return arm->run(ctx, problem);
}

}  // namespace lockstep
