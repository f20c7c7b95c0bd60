// BatchRows: what recurrent ops read of a ForwardBatch, as plain pointers, for sources built once
// per instruction set. Valid as long as the batch; CPU memory.
#pragma once

#include <cstdint>

namespace lockstep {

struct ForwardBatch;

// See ForwardBatch for the fields.
struct BatchRows {
  const int32_t* row_offsets = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* start_positions = nullptr;
  const int32_t* snapshot_sequence = nullptr;
  const int32_t* snapshot_position = nullptr;
  const int32_t* snapshot_slot = nullptr;
  int64_t num_snapshots = 0;
};

BatchRows BatchRowsOf(const ForwardBatch& batch);

}  // namespace lockstep
