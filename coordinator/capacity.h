// Capacity planning: from what operators ask for and what the ranks report to the limits of the
// engine and of the workers. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/worker.pb.h"

namespace lockstep {

// 0 means: choose.
struct CapacityRequest {
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 16;
  int64_t max_num_batched_tokens = 512;
  int64_t kv_cache_mb = 0;    // per rank
  int64_t max_kv_blocks = 0;  // wins over kv_cache_mb
  int64_t max_snapshots = 64;
};

struct Capacity {
  int64_t max_context = 0;  // prompt plus output
  int64_t kv_blocks = 0;    // of kBlockPositions positions
  int64_t slots = 0;
  int64_t snapshots = 0;
  int64_t max_batch_tokens = 0;
  int64_t max_logit_rows = 0;
  int64_t max_sequence_blocks = 0;
  int64_t kv_bytes = 0;  // of the rank with the most
};

// What can be said of a request without a model: INVALID_ARGUMENT names the flag, its value and
// what is possible.
absl::Status ValidateCapacityRequest(const CapacityRequest& request);

// `results` of all ranks, not empty. Defaults: the model's own context; blocks for every sequence
// at full length, bounded by 1 GiB of keys and values per rank (the context shrinks when not even
// one sequence fits); snapshots bounded by 512 MiB. INVALID_ARGUMENT names the flag that cannot be
// met.
absl::StatusOr<Capacity> PlanCapacity(const CapacityRequest& request,
                                      const std::vector<worker::v1::LoadModelResult>& results);

}  // namespace lockstep
