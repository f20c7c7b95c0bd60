#include "kernels/embedding/embedding.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/embedding/embedding_launch.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

template <typename From, typename To>
void LookupRow(const EmbeddingLookupProblem& p, int64_t t) {
  const int64_t row = p.tokens[t] - p.vocab_begin;
  To* to = static_cast<To*>(p.out) + t * p.out_stride;
  if (row < 0 || row >= p.table_rows) {
    std::fill_n(to, p.dim, FromFloat<To>(0.0f));
    return;
  }
  const From* from = static_cast<const From*>(p.table) + row * p.table_stride;
  for (int64_t i = 0; i < p.dim; ++i) to[i] = FromFloat<To>(ToFloat(from[i]));
}

absl::Status LookupCpu(ExecContext* ctx, const EmbeddingLookupProblem& p) {
  auto* run = p.table_bf16 ? (p.out_bf16 ? LookupRow<BF16, BF16> : LookupRow<BF16, float>)
                           : (p.out_bf16 ? LookupRow<float, BF16> : LookupRow<float, float>);
  ctx->pool->ParallelFor(p.num_tokens, [&](int64_t t) { run(p, t); });
  return absl::OkStatus();
}

absl::Status SelectCpu(ExecContext* ctx, const EmbeddingSelectProblem& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.tokens[t] < 0 || p.tokens[t] >= p.world * p.rows_per_rank) {
      return absl::InvalidArgumentError(
          absl::StrCat("embedding_select: token ", p.tokens[t], " of row ", t, " is outside [0, ",
                       p.world * p.rows_per_rank, "), the vocabulary of ", p.world, " ranks"));
    }
  }
  const uint8_t* gathered = static_cast<const uint8_t*>(p.gathered);
  uint8_t* out = static_cast<uint8_t*>(p.out);
  ctx->pool->ParallelFor(p.num_tokens, [&](int64_t t) {
    const int64_t owner = p.tokens[t] / p.rows_per_rank;
    std::memcpy(out + t * p.out_stride * p.element,
                gathered + (owner * p.rank_stride + t * p.dim) * p.element,
                static_cast<size_t>(p.dim * p.element));
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status LookupCuda(ExecContext* ctx, const EmbeddingLookupProblem& p) {
  return ToStatus("embedding_lookup", LaunchEmbeddingLookup(p, ctx->stream));
}
absl::Status SelectCuda(ExecContext* ctx, const EmbeddingSelectProblem& p) {
  return ToStatus("embedding_select", LaunchEmbeddingSelect(p, ctx->stream));
}
#endif

using LookupFn = absl::Status (*)(ExecContext*, const EmbeddingLookupProblem&);
constexpr Arm<EmbeddingLookupProblem, LookupFn> kLookupArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, LookupCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, LookupCpu},
};

using SelectFn = absl::Status (*)(ExecContext*, const EmbeddingSelectProblem&);
constexpr Arm<EmbeddingSelectProblem, SelectFn> kSelectArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, SelectCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, SelectCpu},
};

}  // namespace

absl::Status EmbeddingLookup(ExecContext* ctx, ConstTensorView tokens, ConstTensorView table,
                             int64_t vocab_begin, TensorView out) {
  RETURN_IF_ERROR(
      OpCheck(*ctx, "embedding_lookup").Rank("table", table, 2).Rank("out", out, 2).status());
  RETURN_IF_ERROR(
      OpCheck(*ctx, "embedding_lookup")
          .Tensor("tokens", tokens, {DType::kI32}, {out.shape[0]})
          .Tensor("table", table, {DType::kF32, DType::kBF16}, table.shape)
          .Tensor("out", out, {DType::kF32, DType::kBF16}, {out.shape[0], table.shape[1]})
          .status());
  EmbeddingLookupProblem p;
  p.tokens = static_cast<const int32_t*>(tokens.data);
  p.table = table.data;
  p.out = out.data;
  p.num_tokens = out.shape[0];
  p.table_rows = table.shape[0];
  p.dim = table.shape[1];
  p.vocab_begin = vocab_begin;
  p.table_stride = table.row_stride;
  p.out_stride = out.row_stride;
  p.table_bf16 = table.dtype == DType::kBF16;
  p.out_bf16 = out.dtype == DType::kBF16;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("embedding_lookup", kLookupArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

absl::Status EmbeddingSelect(ExecContext* ctx, ConstTensorView tokens, ConstTensorView gathered,
                             int64_t rows_per_rank, TensorView out) {
  RETURN_IF_ERROR(OpCheck(*ctx, "embedding_select")
                      .Rank("gathered", gathered, 3)
                      .Rank("out", out, 2)
                      .That(rows_per_rank > 0, absl::StrCat("rows_per_rank is ", rows_per_rank))
                      .status());
  RETURN_IF_ERROR(OpCheck(*ctx, "embedding_select")
                      .Tensor("tokens", tokens, {DType::kI32}, {out.shape[0]})
                      .Tensor("out", out, {DType::kF32, DType::kBF16}, out.shape)
                      .Tensor("gathered", gathered, {out.dtype},
                              {gathered.shape[0], out.shape[0], out.shape[1]})
                      .status());
  EmbeddingSelectProblem p;
  p.tokens = static_cast<const int32_t*>(tokens.data);
  p.gathered = gathered.data;
  p.out = out.data;
  p.num_tokens = out.shape[0];
  p.world = gathered.shape[0];
  p.rows_per_rank = rows_per_rank;
  p.dim = out.shape[1];
  p.rank_stride = gathered.row_stride;
  p.out_stride = out.row_stride;
  p.element = SizeOf(out.dtype);
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("embedding_select", kSelectArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

}  // namespace lockstep
