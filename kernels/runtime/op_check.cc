#include "kernels/runtime/op_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/runtime/arm_table.h"

namespace lockstep {

void OpCheck::Fail(absl::string_view message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(op_, ": ", message));
}

OpCheck& OpCheck::Rank(absl::string_view name, const ConstTensorView& view, int rank) {
  if (status_.ok() && view.shape.rank() != rank) {
    Fail(absl::StrCat(name, " is ", view.ToString(), ", rank ", rank, " is needed"));
  }
  return *this;
}

OpCheck& OpCheck::Tensor(absl::string_view name, const ConstTensorView& view,
                         std::initializer_list<DType> dtypes, Shape shape) {
  if (!status_.ok()) return *this;
  if (view.shape != shape) {
    Fail(absl::StrCat(name, " is ", view.ToString(), ", shape ", shape.ToString(), " is needed"));
  } else if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    std::string names;
    for (DType d : dtypes) absl::StrAppend(&names, names.empty() ? "" : " or ", Name(d));
    Fail(absl::StrCat(name, " is ", view.ToString(), ", dtype ", names, " is needed"));
  } else if (view.device != ctx_.device) {
    Fail(absl::StrCat(name, " is on ", lockstep::Name(view.device), ", the op runs on ",
                      lockstep::Name(ctx_.device)));
  }
  return *this;
}

OpCheck& OpCheck::That(bool condition, absl::string_view message) {
  if (!condition) Fail(message);
  return *this;
}

OpCheck& OpCheck::Batch(const ForwardBatch& batch) {
  That(batch.num_tokens >= 1 && batch.num_sequences >= 1,
       absl::StrCat("the batch has ", batch.num_tokens, " tokens of ", batch.num_sequences,
                    " sequences, at least 1 of each is needed"));
  Tensor("positions", batch.positions, {DType::kI32}, {batch.num_tokens});
  Tensor("row_offsets", batch.row_offsets, {DType::kI32}, {batch.num_sequences + 1});
  Tensor("slots", batch.slots, {DType::kI32}, {batch.num_sequences});
  Tensor("start_positions", batch.start_positions, {DType::kI32}, {batch.num_sequences});
  if (batch.num_snapshots > 0) {
    Tensor("snapshot_sequence", batch.snapshot_sequence, {DType::kI32}, {batch.num_snapshots});
    Tensor("snapshot_position", batch.snapshot_position, {DType::kI32}, {batch.num_snapshots});
    Tensor("snapshot_slot", batch.snapshot_slot, {DType::kI32}, {batch.num_snapshots});
  }
  return *this;
}

}  // namespace lockstep
