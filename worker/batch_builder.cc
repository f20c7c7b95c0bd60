#include "worker/batch_builder.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

// Lays the views of a batch out one after the other from `base` (null: shapes only). Returns the
// number of 32-bit words.
int64_t Layout(DeviceType device, int32_t* base, const PlannedStep& step, int64_t num_sequences,
               ForwardBatch* batch) {
  int64_t used = 0;
  const auto take = [&](Shape shape) {
    ConstTensorView view(base == nullptr ? nullptr : base + used, DType::kI32, shape, device);
    used += shape.num_elements();
    return view;
  };
  batch->num_tokens = step.num_tokens;
  batch->num_sequences = num_sequences;
  batch->num_logits = step.num_logits;
  batch->num_snapshots = step.num_snapshots;
  batch->tokens = take({step.num_tokens});
  batch->positions = take({step.num_tokens});
  batch->row_offsets = take({num_sequences + 1});
  batch->slots = take({num_sequences});
  batch->start_positions = take({num_sequences});
  batch->block_table = take({num_sequences, step.table_columns});
  batch->logit_rows = take({step.num_logits});
  batch->snapshot_sequence = take({step.num_snapshots});
  batch->snapshot_position = take({step.num_snapshots});
  batch->snapshot_slot = take({step.num_snapshots});
  return used;
}

PlannedStep LargestStep(const BatchLimits& limits) {
  PlannedStep step;
  step.num_tokens = limits.max_tokens;
  step.num_logits = std::min(limits.max_logit_rows, limits.max_tokens);
  step.num_snapshots = limits.max_snapshots_taken();
  step.table_columns = limits.max_sequence_blocks;
  return step;
}

int32_t* Words(const ConstTensorView& view) {
  return static_cast<int32_t*>(const_cast<void*>(view.data));
}

}  // namespace

absl::StatusOr<BatchBuilder> BatchBuilder::Create(DeviceType device, const BatchLimits& limits) {
  BatchBuilder builder;
  ForwardBatch batch;
  const int64_t words = Layout(device, nullptr, LargestStep(limits), limits.max_sequences, &batch);
  ASSIGN_OR_RETURN(builder.buffer_, DeviceBuffer::Allocate(device, words * 4));
  for (PinnedBuffer& staging : builder.staging_) {
    ASSIGN_OR_RETURN(staging, PinnedBuffer::Allocate(device, words * 4));
  }
  return builder;
}

ForwardBatch BatchBuilder::Largest(DeviceType device, const BatchLimits& limits) {
  ForwardBatch batch;
  Layout(device, nullptr, LargestStep(limits), std::min(limits.max_sequences, limits.max_tokens),
         &batch);
  return batch;
}

absl::StatusOr<ForwardBatch> BatchBuilder::Build(DeviceStream* stream,
                                                 const worker::v1::StepPlan& plan,
                                                 const PlannedStep& step, const SlotTable& slots,
                                                 int ticket, Counters* counters) {
  const int64_t num_sequences = static_cast<int64_t>(step.sequences.size());
  PinnedBuffer& staging = staging_[ticket];
  ForwardBatch batch;  // on the host
  const int64_t words =
      Layout(DeviceType::kCpu, static_cast<int32_t*>(staging.data()), step, num_sequences, &batch);
  CHECK_LE(words * 4, staging.bytes());
  int32_t* tokens = Words(batch.tokens);
  int32_t* positions = Words(batch.positions);
  int32_t* logit_rows = Words(batch.logit_rows);
  int64_t row = 0;
  int64_t snapshot = 0;
  Words(batch.row_offsets)[0] = 0;
  for (size_t b = 0; b < step.sequences.size(); ++b) {
    const PlannedSequence& sequence = step.sequences[b];
    const worker::v1::SequenceEntry& entry = plan.sequences(static_cast<int>(b));
    for (int64_t i = 0; i < sequence.num_tokens; ++i) {
      tokens[row + i] = sequence.feedback ? -1 : entry.token_ids(static_cast<int>(i));
      positions[row + i] = static_cast<int32_t>(sequence.start + i);
    }
    row += sequence.num_tokens;
    for (int64_t i = sequence.num_logits; i > 0; --i) *logit_rows++ = static_cast<int32_t>(row - i);
    Words(batch.row_offsets)[b + 1] = static_cast<int32_t>(row);
    Words(batch.slots)[b] = sequence.slot;
    Words(batch.start_positions)[b] = static_cast<int32_t>(sequence.start);
    int32_t* table = Words(batch.block_table) + static_cast<int64_t>(b) * step.table_columns;
    std::fill_n(table, step.table_columns, -1);
    const std::vector<int32_t>& blocks = slots.blocks(sequence.slot);
    std::copy(blocks.begin(), blocks.end(), table);
    for (const worker::v1::Snapshot& taken : entry.snapshots()) {
      Words(batch.snapshot_sequence)[snapshot] = static_cast<int32_t>(b);
      Words(batch.snapshot_position)[snapshot] = static_cast<int32_t>(taken.position());
      Words(batch.snapshot_slot)[snapshot++] = taken.snapshot_slot();
    }
  }
  counters->Add(Traffic::kPlanToDevice, words * 4);
  RETURN_IF_ERROR(stream->CopyToDevice(buffer_.data(), staging.data(), words * 4));
  ForwardBatch on_device;
  Layout(stream->device(), static_cast<int32_t*>(buffer_.data()), step, num_sequences, &on_device);
  return on_device;
}

}  // namespace lockstep
