// The argument checks that every CommGroup makes at the entry of a collective. InvalidArgument
// names the collective, what was given and what was expected. Thread safe.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

// F32, contiguous.
absl::Status CheckAllReduce(const TensorView& data);
// Both contiguous, one dtype, out holds `size` times the elements of local.
absl::Status CheckAllGather(const ConstTensorView& local, const TensorView& out, int size);

}  // namespace lockstep
