// StepDriver: runs single steps over a StepTransport, one at a time: numbers them, chains the batch
// digests, and hands out slots' blocks. For evaluation and tests; the engine has its own loop.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/step_transport.h"
#include "proto/step.pb.h"

namespace lockstep {

class StepDriver {
 public:
  StepDriver(StepTransport* transport, const StepEpoch& epoch)
      : transport_(transport), epoch_(epoch) {}

  // The next request for `plan`; advances the numbering.
  worker::v1::StepRequest Number(const worker::v1::StepPlan& plan);
  // Sends the plan as the next step and waits for its result.
  absl::StatusOr<worker::v1::StepResult> Run(const worker::v1::StepPlan& plan);

  // One sequence in slot 0, from position 0, alone on the device. `rows` asks for the logits of the
  // last `rows` tokens (all F32 rows, vocabulary order, and their digests).
  struct Rows {
    std::vector<std::vector<float>> logits;
    std::vector<uint64_t> digests;
    int32_t sampled_id = -1;  // greedy
  };
  absl::StatusOr<Rows> Begin(const std::vector<int32_t>& tokens, int32_t rows);
  absl::StatusOr<Rows> Continue(const std::vector<int32_t>& tokens, int32_t rows);

 private:
  absl::StatusOr<Rows> RunEntry(worker::v1::SequenceEntry entry);

  StepTransport* transport_;
  const StepEpoch epoch_;
  uint64_t step_id_ = 0;
  uint64_t digest_ = 0;
  uint64_t generation_ = 0;
  int64_t position_ = 0;
  int32_t blocks_ = 0;
};

}  // namespace lockstep
