// The loop over the experts of a step, whatever an expert is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/moe/moe.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// Rows that a mixture of experts computes at a time: bounds the workspace, in which every row has
// top_k outputs per virtual shard.
constexpr int64_t kMoeRows = 64;

// Calls run(expert, its rows of x, their places in `routed`) for every expert that has rows. x
// [T, D]; routed F32 [local virtual shards, T * top_k, D] in the order of the plan.
absl::Status ForEachExpert(
    ExecContext* ctx, const ExpertPlan& plan, ConstTensorView x, TensorView routed,
    const std::function<absl::Status(size_t, ConstTensorView, TensorView)>& run);

}  // namespace lockstep
