// Where a row of a ForwardBatch belongs, on the device.
#pragma once

#include <cstdint>

namespace lockstep {

// The sequence of row t: the last one whose first row is not past t.
__device__ inline int SequenceOfRow(const int32_t* row_offsets, int num_sequences, int t) {
  int low = 0, high = num_sequences;  // row_offsets[low] <= t < row_offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_offsets[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace lockstep
