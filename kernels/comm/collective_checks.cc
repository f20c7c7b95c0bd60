#include "kernels/comm/collective_checks.h"

#include "absl/strings/str_cat.h"

namespace lockstep {

absl::Status CheckAllReduce(const TensorView& data) {
  if (data.dtype == DType::kF32 && data.contiguous()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("all_reduce: data must be contiguous F32, it is ",
                                                 data.contiguous() ? "" : "strided ",
                                                 data.ToString()));
}

absl::Status CheckAllGather(const ConstTensorView& local, const TensorView& out, int size) {
  if (local.dtype == out.dtype && local.contiguous() && out.contiguous() &&
      out.shape.num_elements() == size * local.shape.num_elements()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("all_gather: out must be a contiguous [", size,
                                                 ", local...] of contiguous local ",
                                                 local.ToString(), ", it is ", out.ToString()));
}

}  // namespace lockstep
