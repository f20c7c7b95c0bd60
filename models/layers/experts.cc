#include "models/layers/experts.h"

#include "kernels/base/status_macros.h"
#include "kernels/rows/rows.h"

namespace lockstep {

absl::Status ForEachExpert(
    ExecContext* ctx, const ExpertPlan& plan, ConstTensorView x, TensorView routed,
    const std::function<absl::Status(size_t, ConstTensorView, TensorView)>& run) {
  const int64_t width = routed.shape[2];
  TensorView sorted = ctx->workspace->Take(x.dtype, {routed.shape[1], width});
  RETURN_IF_ERROR(GatherRows(ctx, x, plan.tokens, sorted));
  for (int64_t e = 0; e < plan.num_experts(); ++e) {
    // Sizing the workspace, an expert has a row of every token: it cannot have more.
    int64_t begin = 0, end = x.rows();
    if (!ctx->dry_run()) {
      begin = plan.offsets.row<int32_t>(e)[0];
      end = plan.offsets.row<int32_t>(e + 1)[0];
    }
    if (begin == end) continue;
    TensorView sums = routed;
    sums.data = static_cast<float*>(routed.data) + begin * width;
    sums.shape = {routed.shape[0], end - begin, width};
    Workspace::Scope scope(ctx->workspace);
    RETURN_IF_ERROR(run(static_cast<size_t>(e), sorted.Rows(begin, end - begin), sums));
  }
  return absl::OkStatus();
}

}  // namespace lockstep
