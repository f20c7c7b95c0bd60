#include "kernels/rows/rows.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"

namespace lockstep {

absl::Status GatherRows(ExecContext* ctx, ConstTensorView source, ConstTensorView rows,
                        TensorView out) {
  ctx->counters->op_launches++;
  if (source.shape.rank() != 2 || out.shape.rank() != 2 || rows.dtype != DType::kI32 ||
      rows.shape.rank() != 1 || source.dtype != out.dtype || out.shape[1] != source.shape[1] ||
      out.shape[0] != rows.shape[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat("gather_rows: source ", source.ToString(), ", rows ", rows.ToString(),
                     ", out ", out.ToString(), "; expected [T, D], I32[R], [R, D]"));
  }
  if (ctx->dry_run()) return absl::OkStatus();
  const int64_t bytes = source.shape[1] * SizeOf(source.dtype);
  const int32_t* index = rows.row<int32_t>(0);
  for (int64_t r = 0; r < rows.shape[0]; ++r) {
    if (index[r] < 0 || index[r] >= source.shape[0]) {
      return absl::InvalidArgumentError(
          absl::StrCat("gather_rows: row ", index[r], " of ", source.shape[0]));
    }
    std::memcpy(out.Rows(r, 1).data, source.Rows(index[r], 1).data, static_cast<size_t>(bytes));
  }
  return absl::OkStatus();
}

absl::Status Fill(ExecContext* ctx, float value, TensorView out) {
  ctx->counters->op_launches++;
  const bool bf16 = out.dtype == DType::kBF16;
  if ((!bf16 && out.dtype != DType::kF32) || out.shape.rank() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("fill: out is ", out.ToString(), ", expected F32[R, D] or BF16[R, D]"));
  }
  if (ctx->dry_run()) return absl::OkStatus();
  for (int64_t r = 0; r < out.shape[0]; ++r) {
    if (bf16) {
      std::fill_n(out.row<BF16>(r), out.shape[1], ToBF16(value));
    } else {
      std::fill_n(out.row<float>(r), out.shape[1], value);
    }
  }
  return absl::OkStatus();
}

absl::Status JoinColumns(ExecContext* ctx, ConstTensorView pieces, TensorView out) {
  ctx->counters->op_launches++;
  if (pieces.shape.rank() != 3 || out.shape.rank() != 2 || pieces.dtype != DType::kF32 ||
      out.dtype != DType::kF32 || out.shape[0] != pieces.shape[1] ||
      out.shape[1] != pieces.shape[0] * pieces.shape[2]) {
    return absl::InvalidArgumentError(absl::StrCat("join_columns: pieces ", pieces.ToString(),
                                                   ", out ", out.ToString(),
                                                   "; expected F32[W, R, C] and F32[R, W * C]"));
  }
  if (ctx->dry_run()) return absl::OkStatus();
  const int64_t rows = pieces.shape[1], columns = pieces.shape[2];
  const float* source = pieces.row<float>(0);
  for (int64_t w = 0; w < pieces.shape[0]; ++w) {
    for (int64_t r = 0; r < rows; ++r, source += columns) {
      std::copy_n(source, columns, out.row<float>(r) + w * columns);
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
