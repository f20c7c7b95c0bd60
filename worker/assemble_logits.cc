#include "worker/assemble_logits.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep {

absl::Status AssembleLogits(ExecContext* ctx, ConstTensorView gathered,
                            const std::vector<int64_t>& order, TensorView out) {
  const bool shapes_fit = gathered.dtype == DType::kF32 && gathered.shape.rank() == 3 &&
                          gathered.contiguous() && out.dtype == DType::kF32 &&
                          out.shape.rank() == 2 && out.contiguous() &&
                          out.shape[1] <= gathered.shape[0] * gathered.shape[2];
  if (!shapes_fit || (!ctx->dry_run() && out.shape[0] != static_cast<int64_t>(order.size()))) {
    return absl::InvalidArgumentError(absl::StrCat("assemble_logits: gathered is ",
                                                   gathered.ToString(), ", out is ", out.ToString(),
                                                   " for ", order.size(), " rows"));
  }
  if (ctx->dry_run()) return absl::OkStatus();
  ctx->counters->op_launches.fetch_add(1, std::memory_order_relaxed);
  const int64_t rows = gathered.shape[1];
  const int64_t local = gathered.shape[2];
  const int64_t vocab = out.shape[1];
  ctx->pool->ParallelFor(out.shape[0], [&](int64_t i) {
    float* to = out.row<float>(i);
    for (int64_t c = 0; c < vocab; c += local) {
      const float* from = static_cast<const float*>(gathered.data) +
                          (c / local * rows + order[static_cast<size_t>(i)]) * local;
      std::memcpy(to + c, from, static_cast<size_t>(std::min(local, vocab - c)) * sizeof(float));
    }
  });
  return absl::OkStatus();
}

}  // namespace lockstep
