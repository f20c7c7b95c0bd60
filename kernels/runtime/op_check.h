// OpCheck: the checks at the host entry of an op. The first failed one wins; its status names the
// op, what was asked and what was found.
//
//   RETURN_IF_ERROR(OpCheck(*ctx, "rms_norm")
//                       .Rank("x", x, 2)
//                       .Tensor("x", x, {DType::kF32, DType::kBF16}, {rows, dim})
//                       .status());
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

class OpCheck {
 public:
  OpCheck(const ExecContext& ctx, absl::string_view op) : ctx_(ctx), op_(op) {}

  // `view` has this rank, so that its dimensions may be asked for.
  OpCheck& Rank(absl::string_view name, const ConstTensorView& view, int rank);
  // One of the dtypes, this shape, contiguous rows inside a row, on the context's device.
  OpCheck& Tensor(absl::string_view name, const ConstTensorView& view,
                  std::initializer_list<DType> dtypes, Shape shape);
  // InvalidArgument "<op>: <message>" when `condition` is false.
  OpCheck& That(bool condition, absl::string_view message);
  // The views of a step that ops with caches read.
  OpCheck& Batch(const ForwardBatch& batch);

  // Hands the status out; the object is spent.
  absl::Status status() { return std::move(status_); }

 private:
  void Fail(absl::string_view message);

  const ExecContext& ctx_;
  absl::string_view op_;
  absl::Status status_;
};

// Counts one call of an op.
inline void CountLaunch(ExecContext* ctx) {
  if (ctx->counters != nullptr) {
    ctx->counters->op_launches.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace lockstep
