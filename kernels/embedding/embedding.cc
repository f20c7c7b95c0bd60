#include "kernels/embedding/embedding.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

struct LookupProblem {
  ConstTensorView tokens;
  ConstTensorView table;
  int64_t vocab_begin;
  TensorView out;
};

template <typename From, typename To>
void ConvertRow(const From* from, To* to, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) to[i] = FromFloat<To>(ToFloat(from[i]));
}

absl::Status LookupCpu(ExecContext* ctx, const LookupProblem& p) {
  const int32_t* tokens = p.tokens.row<int32_t>(0);
  const int64_t rows = p.table.shape[0], dim = p.table.shape[1];
  ctx->pool->ParallelFor(p.out.shape[0], [&](int64_t t) {
    const int64_t row = tokens[t] - p.vocab_begin;
    const bool from_bf16 = p.table.dtype == DType::kBF16, to_bf16 = p.out.dtype == DType::kBF16;
    if (row < 0 || row >= rows) {
      std::memset(static_cast<uint8_t*>(p.out.data) + t * p.out.row_stride * SizeOf(p.out.dtype), 0,
                  static_cast<size_t>(dim * SizeOf(p.out.dtype)));
    } else if (from_bf16) {
      to_bf16 ? ConvertRow(p.table.row<BF16>(row), p.out.row<BF16>(t), dim)
              : ConvertRow(p.table.row<BF16>(row), p.out.row<float>(t), dim);
    } else {
      to_bf16 ? ConvertRow(p.table.row<float>(row), p.out.row<BF16>(t), dim)
              : ConvertRow(p.table.row<float>(row), p.out.row<float>(t), dim);
    }
  });
  return absl::OkStatus();
}

using LookupFn = absl::Status (*)(ExecContext*, const LookupProblem&);
constexpr Arm<LookupProblem, LookupFn> kLookupArms[] = {
    {"cpu", DeviceType::kCpu, nullptr, LookupCpu},
};

struct SelectProblem {
  ConstTensorView tokens;
  ConstTensorView gathered;
  int64_t rows_per_rank;
  TensorView out;
};

absl::Status SelectCpu(ExecContext* ctx, const SelectProblem& p) {
  const int32_t* tokens = p.tokens.row<int32_t>(0);
  const int64_t world = p.gathered.shape[0], num_tokens = p.out.shape[0];
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (tokens[t] < 0 || tokens[t] >= world * p.rows_per_rank) {
      return absl::InvalidArgumentError(
          absl::StrCat("embedding_select: token ", tokens[t], " of row ", t, " is outside [0, ",
                       world * p.rows_per_rank, "), the vocabulary of ", world, " ranks"));
    }
  }
  const int64_t element = SizeOf(p.out.dtype), bytes = p.out.shape[1] * element;
  const uint8_t* gathered = static_cast<const uint8_t*>(p.gathered.data);
  uint8_t* out = static_cast<uint8_t*>(p.out.data);
  ctx->pool->ParallelFor(num_tokens, [&](int64_t t) {
    const int64_t owner = tokens[t] / p.rows_per_rank;
    const uint8_t* from = gathered + owner * p.gathered.row_stride * element + t * bytes;
    std::memcpy(out + t * p.out.row_stride * element, from, static_cast<size_t>(bytes));
  });
  return absl::OkStatus();
}

using SelectFn = absl::Status (*)(ExecContext*, const SelectProblem&);
constexpr Arm<SelectProblem, SelectFn> kSelectArms[] = {
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
  const LookupProblem p{tokens, table, vocab_begin, out};
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
  const SelectProblem p{tokens, gathered, rows_per_rank, out};
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("embedding_select", kSelectArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

}  // namespace lockstep
