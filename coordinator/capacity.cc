// Capacity planning: see capacity.h.
#include "coordinator/capacity.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/prefix_cache.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using worker::v1::LoadModelResult;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kDefaultKvBytes = 1024 * kMiB;
constexpr int64_t kSnapshotBytes = 512 * kMiB;
// Rows of logits that a step may give: at least one per sequence, some more for replays.
constexpr int64_t kLogitRows = 64;

template <typename Get>
int64_t Largest(const std::vector<LoadModelResult>& results, const Get& get) {
  int64_t largest = 0;
  for (const LoadModelResult& result : results) largest = std::max(largest, get(result));
  return largest;
}

absl::Status CheckFlag(const char* flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " is ", value, "; it must be in [", low, ", ", high, "]"));
}

}  // namespace

absl::Status ValidateCapacityRequest(const CapacityRequest& request) {
  constexpr int64_t kMost = int64_t{1} << 30;
  RETURN_IF_ERROR(CheckFlag("--max-model-len", request.max_model_len, 0, kMost));
  RETURN_IF_ERROR(CheckFlag("--max-num-seqs", request.max_num_seqs, 1, 4096));
  RETURN_IF_ERROR(
      CheckFlag("--max-num-batched-tokens", request.max_num_batched_tokens, 1, int64_t{1} << 17));
  RETURN_IF_ERROR(CheckFlag("--kv-cache-mb", request.kv_cache_mb, 0, kMost));
  RETURN_IF_ERROR(CheckFlag("--max-kv-blocks", request.max_kv_blocks, 0, kMost));
  RETURN_IF_ERROR(CheckFlag("--max-snapshots", request.max_snapshots, 0, kMost));
  if (request.max_model_len == 1) {
    return absl::InvalidArgumentError("--max-model-len 1 leaves no room for a prompt and a token");
  }
  if (request.max_num_batched_tokens < request.max_num_seqs) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max-num-batched-tokens ", request.max_num_batched_tokens,
                     " is less than --max-num-seqs ", request.max_num_seqs,
                     ": a step could not advance every sequence"));
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckRequest(const CapacityRequest& request, int64_t model_context) {
  RETURN_IF_ERROR(ValidateCapacityRequest(request));
  if (request.max_model_len > model_context) {
    return absl::InvalidArgumentError(absl::StrCat("--max-model-len ", request.max_model_len,
                                                   " is more than the model's context of ",
                                                   model_context, " tokens"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Capacity> PlanCapacity(const CapacityRequest& request,
                                      const std::vector<LoadModelResult>& results) {
  CHECK(!results.empty());
  const int64_t model_context = results[0].max_positions();
  if (model_context < 2) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the workers report a context of ", model_context, " tokens for this checkpoint"));
  }
  RETURN_IF_ERROR(CheckRequest(request, model_context));
  const int64_t block_bytes =
      std::max<int64_t>(1, Largest(results, [](const auto& r) { return r.kv_block_bytes(); }));
  const int64_t snapshot_bytes =
      std::max<int64_t>(1, Largest(results, [](const auto& r) { return r.snapshot_bytes(); }));

  Capacity capacity;
  capacity.slots = request.max_num_seqs;
  capacity.max_batch_tokens = request.max_num_batched_tokens;
  capacity.max_logit_rows = std::max(request.max_num_seqs, kLogitRows);
  capacity.max_context = request.max_model_len > 0 ? request.max_model_len : model_context;
  const int64_t budget = request.kv_cache_mb > 0 ? request.kv_cache_mb * kMiB : kDefaultKvBytes;
  const int64_t affordable = budget / block_bytes;
  const int64_t wanted = capacity.slots * BlocksFor(capacity.max_context);
  capacity.kv_blocks =
      request.max_kv_blocks > 0 ? request.max_kv_blocks : std::min(wanted, affordable);
  if (request.max_kv_blocks == 0 && affordable < BlocksFor(capacity.max_context)) {
    if (request.max_model_len > 0 || affordable == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a context of ", capacity.max_context, " tokens needs ",
                       (BlocksFor(capacity.max_context) * block_bytes + kMiB - 1) / kMiB,
                       " MiB of key-value cache per rank, more than ", budget / kMiB,
                       " MiB; raise --kv-cache-mb or lower --max-model-len"));
    }
    capacity.max_context = affordable * kBlockPositions;
  }
  capacity.max_sequence_blocks = BlocksFor(capacity.max_context);
  capacity.snapshots = std::min(request.max_snapshots, kSnapshotBytes / snapshot_bytes);
  capacity.kv_bytes = capacity.kv_blocks * block_bytes;
  return capacity;
}

}  // namespace lockstep
