#include "kernels/rows/rows.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/rows_launch.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

absl::Status OutsideError(const char* op, int32_t row, int64_t rows) {
  return absl::InvalidArgumentError(absl::StrCat(op, ": row ", row, " of ", rows));
}

absl::Status GatherRowsCpu(ExecContext* ctx, const GatherRowsProblem& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    if (p.rows[r] < 0 || p.rows[r] >= p.source_rows) {
      return OutsideError("gather_rows", p.rows[r], p.source_rows);
    }
  }
  const uint8_t* source = static_cast<const uint8_t*>(p.source);
  uint8_t* out = static_cast<uint8_t*>(p.out);
  ctx->pool->ParallelFor(p.num_rows, [&](int64_t r) {
    std::memcpy(out + r * p.out_stride, source + p.rows[r] * p.source_stride,
                static_cast<size_t>(p.row_bytes));
  });
  return absl::OkStatus();
}

template <typename Element>
void FillAll(const FillProblem& p) {
  for (int64_t r = 0; r < p.rows; ++r) {
    std::fill_n(static_cast<Element*>(p.out) + r * p.stride, p.dim, static_cast<Element>(p.bits));
  }
}

absl::Status FillCpu(ExecContext*, const FillProblem& p) {
  p.half ? FillAll<uint16_t>(p) : FillAll<uint32_t>(p);
  return absl::OkStatus();
}

absl::Status JoinColumnsCpu(ExecContext* ctx, const JoinColumnsProblem& p) {
  for (int64_t r = 0; p.order != nullptr && r < p.rows; ++r) {
    if (p.order[r] < 0 || p.order[r] >= p.piece_rows) {
      return OutsideError("assemble_logits", p.order[r], p.piece_rows);
    }
  }
  ctx->pool->ParallelFor(p.rows, [&](int64_t r) {
    const int64_t row = p.order == nullptr ? r : p.order[r];
    const float* from = p.pieces + row * p.piece_columns;
    float* out = p.out + r * p.out_stride;
    for (int64_t c = 0; c < p.columns; c += p.piece_columns, from += p.piece_stride) {
      std::copy_n(from, std::min(p.piece_columns, p.columns - c), out + c);
    }
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status GatherRowsCuda(ExecContext* ctx, const GatherRowsProblem& p) {
  return ToStatus("gather_rows", LaunchGatherRows(p, ctx->stream));
}
absl::Status FillCuda(ExecContext* ctx, const FillProblem& p) {
  return ToStatus("fill", LaunchFill(p, ctx->stream));
}
absl::Status JoinColumnsCuda(ExecContext* ctx, const JoinColumnsProblem& p) {
  return ToStatus(p.order == nullptr ? "join_columns" : "assemble_logits",
                  LaunchJoinColumns(p, ctx->stream));
}
#endif

using GatherRowsFn = absl::Status (*)(ExecContext*, const GatherRowsProblem&);
constexpr Arm<GatherRowsProblem, GatherRowsFn> kGatherRowsArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, GatherRowsCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, GatherRowsCpu},
};

using FillFn = absl::Status (*)(ExecContext*, const FillProblem&);
constexpr Arm<FillProblem, FillFn> kFillArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, FillCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, FillCpu},
};

using JoinColumnsFn = absl::Status (*)(ExecContext*, const JoinColumnsProblem&);
constexpr Arm<JoinColumnsProblem, JoinColumnsFn> kJoinColumnsArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, JoinColumnsCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, JoinColumnsCpu},
};

// The part that JoinColumns and AssembleLogits have in common.
absl::Status Join(ExecContext* ctx, const char* op, ConstTensorView pieces, const int32_t* order,
                  TensorView out) {
  JoinColumnsProblem p;
  p.pieces = static_cast<const float*>(pieces.data);
  p.order = order;
  p.out = static_cast<float*>(out.data);
  p.num_pieces = pieces.shape[0];
  p.piece_rows = pieces.shape[1];
  p.piece_columns = pieces.shape[2];
  p.piece_stride = pieces.row_stride;
  p.rows = out.shape[0];
  p.columns = out.shape[1];
  p.out_stride = out.row_stride;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(op, kJoinColumnsArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

}  // namespace

absl::Status GatherRows(ExecContext* ctx, ConstTensorView source, ConstTensorView rows,
                        TensorView out) {
  constexpr char kOp[] = "gather_rows";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("source", source, 2).Rank("rows", rows, 1).status());
  RETURN_IF_ERROR(OpCheck(*ctx, kOp)
                      .Tensor("source", source, {source.dtype}, source.shape)
                      .Tensor("rows", rows, {DType::kI32}, rows.shape)
                      .Tensor("out", out, {source.dtype}, {rows.shape[0], source.shape[1]})
                      .status());
  GatherRowsProblem p;
  p.source = source.data;
  p.rows = static_cast<const int32_t*>(rows.data);
  p.out = out.data;
  p.source_rows = source.shape[0];
  p.num_rows = out.shape[0];
  p.row_bytes = source.shape[1] * SizeOf(source.dtype);
  p.source_stride = source.row_stride * SizeOf(source.dtype);
  p.out_stride = out.row_stride * SizeOf(out.dtype);
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kGatherRowsArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

absl::Status Fill(ExecContext* ctx, float value, TensorView out) {
  RETURN_IF_ERROR(OpCheck(*ctx, "fill").Rank("out", out, 2).status());
  RETURN_IF_ERROR(
      OpCheck(*ctx, "fill").Tensor("out", out, {DType::kF32, DType::kBF16}, out.shape).status());
  FillProblem p;
  p.out = out.data;
  p.rows = out.shape[0];
  p.dim = out.shape[1];
  p.stride = out.row_stride;
  p.half = out.dtype == DType::kBF16;
  p.bits = p.half ? ToBF16(value).bits : FloatToBits(value);
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("fill", kFillArms, ctx->device, p));
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : arm->run(ctx, p);
}

absl::Status JoinColumns(ExecContext* ctx, ConstTensorView pieces, TensorView out) {
  constexpr char kOp[] = "join_columns";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("pieces", pieces, 3).status());
  RETURN_IF_ERROR(
      OpCheck(*ctx, kOp)
          .Tensor("pieces", pieces, {DType::kF32}, pieces.shape)
          .Tensor("out", out, {DType::kF32}, {pieces.shape[1], pieces.shape[0] * pieces.shape[2]})
          .status());
  return Join(ctx, kOp, pieces, nullptr, out);
}

absl::Status AssembleLogits(ExecContext* ctx, ConstTensorView gathered, ConstTensorView order,
                            TensorView out) {
  constexpr char kOp[] = "assemble_logits";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp)
                      .Rank("gathered", gathered, 3)
                      .Rank("order", order, 1)
                      .Rank("out", out, 2)
                      .status());
  RETURN_IF_ERROR(
      OpCheck(*ctx, kOp)
          .Tensor("gathered", gathered, {DType::kF32}, gathered.shape)
          .Tensor("order", order, {DType::kI32}, order.shape)
          .Tensor("out", out, {DType::kF32}, {order.shape[0], out.shape[1]})
          .That(out.shape[1] <= gathered.shape[0] * gathered.shape[2],
                absl::StrCat("out is ", out.ToString(), ", gathered is ", gathered.ToString()))
          .status());
  return Join(ctx, kOp, gathered, static_cast<const int32_t*>(order.data), out);
}

}  // namespace lockstep
