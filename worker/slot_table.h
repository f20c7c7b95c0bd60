// SlotTable: what a rank knows of every sequence slot, and the check of a plan against it. The
// truth is the coordinator's; this is the copy that makes a wrong plan an error instead of a wrong
// result.
//
// Errors are InvalidArgument (numbers that no plan may hold) or FailedPrecondition (numbers that
// contradict earlier steps), with the slot, what was found and what was expected. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sampling/sampling.h"
#include "proto/step.pb.h"

namespace lockstep {

// What Configure sets. All counts are positive, but for snapshots, which may be 0.
struct BatchLimits {
  int64_t kv_blocks = 0;
  int64_t slots = 0;
  int64_t snapshots = 0;
  int64_t max_tokens = 0;           // T of a step
  int64_t max_sequences = 0;        // B of a step
  int64_t max_logit_rows = 0;       // R of a step
  int64_t max_sequence_blocks = 0;  // blocks of one sequence
  int64_t vocab_size = 0;
  bool stateful =
      false;  // the model has recurrent state: a start inside a sequence needs a snapshot

  bool operator==(const BatchLimits& o) const;
  int64_t max_snapshots_taken() const;  // S of a step
  absl::Status Validate() const;
};

// One entry of a checked plan.
struct PlannedSequence {
  int32_t slot = 0;
  uint64_t generation = 0;
  int64_t start = 0;  // absolute position of the first token
  int64_t num_tokens = 0;
  bool begin = false;
  int32_t restore_snapshot = -1;
  bool feedback = false;  // its one token is the one sampled last for the slot
  int64_t num_logits = 0;
  bool sample = false;
  bool return_logits = false;
};

struct PlannedStep {
  std::vector<PlannedSequence> sequences;
  int64_t num_tokens = 0;
  int64_t num_logits = 0;
  int64_t num_snapshots = 0;
  int64_t table_columns = 1;  // blocks of the longest sequence
};

class SlotTable {
 public:
  explicit SlotTable(const BatchLimits& limits);

  // Checks the whole plan and makes it the new truth. After an error the table is of no use any
  // more.
  absl::StatusOr<PlannedStep> Admit(uint64_t step_id, const worker::v1::StepPlan& plan);

  const BatchLimits& limits() const { return limits_; }
  const std::vector<int32_t>& blocks(int32_t slot) const { return at(slot).blocks; }
  const SamplingParams& params(int32_t slot) const { return at(slot).params; }
  // Step `step_id` samples for the slot: later steps may take its token.
  void Samples(int32_t slot, uint64_t step_id) { at(slot).sampled_in_step = step_id; }

 private:
  struct Slot {
    bool active = false;
    uint64_t generation = 0;  // highest seen
    int64_t position = 0;     // of the next token
    std::vector<int32_t> blocks;
    SamplingParams params;
    uint64_t sampled_in_step = 0;
    uint64_t named_in_step = 0;
  };

  const Slot& at(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }
  Slot& at(int32_t slot) { return slots_[static_cast<size_t>(slot)]; }
  absl::Status Releases(uint64_t step_id, const worker::v1::StepPlan& plan);
  void Release(Slot* slot);
  absl::StatusOr<PlannedSequence> Entry(uint64_t step_id, const worker::v1::SequenceEntry& entry);
  absl::Status Begin(const worker::v1::SequenceEntry& entry, Slot* slot);
  absl::Status Continue(const worker::v1::SequenceEntry& entry, const Slot& slot) const;
  absl::Status Tokens(uint64_t step_id, const worker::v1::SequenceEntry& entry,
                      const Slot& slot) const;
  absl::Status AppendBlocks(const worker::v1::SequenceEntry& entry,
                            const google::protobuf::RepeatedField<int32_t>& blocks, Slot* slot);
  absl::Status CheckWrites(const PlannedSequence& sequence, const Slot& slot) const;
  absl::Status Snapshots(uint64_t step_id, const worker::v1::SequenceEntry& entry, int64_t end);

  const BatchLimits limits_;
  std::vector<Slot> slots_;
  std::vector<int32_t> block_users_;                // slots whose table names the block
  std::vector<int64_t> snapshot_position_;          // -1: never taken
  std::vector<uint64_t> snapshot_taken_in_;         // step
  std::vector<std::pair<int32_t, int64_t>> taken_;  // by the step being admitted
};

// The parameters of a sampling spec. InvalidArgument names the field, its value and the legal ones.
absl::StatusOr<SamplingParams> ParseSampling(const worker::v1::SamplingSpec& spec,
                                             int64_t vocab_size);

}  // namespace lockstep
