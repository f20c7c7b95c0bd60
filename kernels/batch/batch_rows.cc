#include "kernels/batch/batch_rows.h"

#include "kernels/batch/forward_batch.h"

namespace lockstep {

BatchRows BatchRowsOf(const ForwardBatch& batch) {
  BatchRows rows;
  rows.row_offsets = batch.row_offsets.row<int32_t>(0);
  rows.slots = batch.slots.row<int32_t>(0);
  rows.start_positions = batch.start_positions.row<int32_t>(0);
  rows.num_snapshots = batch.num_snapshots;
  if (batch.num_snapshots > 0) {
    rows.snapshot_sequence = batch.snapshot_sequence.row<int32_t>(0);
    rows.snapshot_position = batch.snapshot_position.row<int32_t>(0);
    rows.snapshot_slot = batch.snapshot_slot.row<int32_t>(0);
  }
  return rows;
}

}  // namespace lockstep
