// ForwardBatch: one step, as the ops and the models see it. Views of the step's one upload;
// borrowed for the step. Rows are tokens, packed sequence after sequence; a decoding sequence has
// one row, a prefilling one has a chunk of them. Nothing here says which of the two a sequence is:
// no op may behave differently for them.
#pragma once

#include <cstdint>

#include "kernels/base/tensor_view.h"

namespace lockstep {

// Positions per KV block, and the absolute grid of recurrent states and prefix-cache hits. A
// contract constant (numerics N5, N6): changing it changes results.
constexpr int64_t kGrid = 64;

struct ForwardBatch {
  int64_t num_tokens = 0;     // T >= 1
  int64_t num_sequences = 0;  // B >= 1
  int64_t num_logits = 0;     // R: rows whose logits are wanted, may be 0

  ConstTensorView tokens;     // I32 [T] token ids
  ConstTensorView positions;  // I32 [T] absolute positions
  ConstTensorView
      row_offsets;        // I32 [B + 1] sequence b has rows [row_offsets[b], row_offsets[b+1])
  ConstTensorView slots;  // I32 [B] state slot of each sequence
  ConstTensorView start_positions;  // I32 [B] absolute position of the first row
  ConstTensorView block_table;      // I32 [B, max_blocks] KV block of each 64 positions; unused: -1
  ConstTensorView logit_rows;       // I32 [R] ascending rows of T

  // State snapshots to take in this step: when sequence `sequence` crosses the grid point
  // `position` (a multiple of kGrid in (start, start + rows]), its state there goes to snapshot
  // slot `snapshot`.
  ConstTensorView snapshot_sequence;  // I32 [S]
  ConstTensorView snapshot_position;  // I32 [S]
  ConstTensorView snapshot_slot;      // I32 [S]
  int64_t num_snapshots = 0;          // S
};

}  // namespace lockstep
