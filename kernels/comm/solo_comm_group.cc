#include "kernels/comm/solo_comm_group.h"

#include "kernels/base/status_macros.h"
#include "kernels/comm/collective_checks.h"
#include "kernels/runtime/pinned_buffer.h"

namespace lockstep {

absl::Status SoloCommGroup::Begin(ExecContext* ctx) {
  std::lock_guard<std::mutex> lock(mu_);
  if (error_.ok() && !ctx->dry_run()) {
    ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
  }
  return error_;
}

absl::Status SoloCommGroup::AllReduce(ExecContext* ctx, TensorView data) {
  RETURN_IF_ERROR(CheckAllReduce(data));
  return Begin(ctx);
}

absl::Status SoloCommGroup::AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) {
  RETURN_IF_ERROR(CheckAllGather(local, out, 1));
  RETURN_IF_ERROR(Begin(ctx));
  if (ctx->dry_run()) return absl::OkStatus();
  return CopyAsync(ctx->device, out.data, local.data, local.bytes(), ctx->stream);
}

absl::Status SoloCommGroup::Barrier(ExecContext* ctx) { return Begin(ctx); }

void SoloCommGroup::Abort(absl::string_view reason) {
  std::lock_guard<std::mutex> lock(mu_);
  if (error_.ok()) error_ = absl::AbortedError(reason);
}

}  // namespace lockstep
