// BatchBuilder: the ForwardBatch of a test's step, from a list of chunks. Owns the uploads; lives
// as long as the batch is used.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace testing {

// Rows [start, start + rows) of one sequence.
struct Chunk {
  int32_t slot = 0;
  int32_t start = 0;
  int32_t rows = 0;
  std::vector<int32_t> blocks;  // of the sequence's block table, for tests with a KV cache
};

struct Snapshot {
  int32_t sequence = 0;  // index into the chunks
  int32_t position = 0;
  int32_t slot = 0;
};

class BatchBuilder {
 public:
  explicit BatchBuilder(const std::vector<Chunk>& chunks,
                        const std::vector<Snapshot>& snapshots = {}) {
    std::vector<int32_t> positions, offsets = {0}, slots, starts, table;
    size_t max_blocks = 1;
    for (const Chunk& c : chunks) max_blocks = std::max(max_blocks, c.blocks.size());
    for (const Chunk& c : chunks) {
      for (int32_t i = 0; i < c.rows; ++i) positions.push_back(c.start + i);
      offsets.push_back(offsets.back() + c.rows);
      slots.push_back(c.slot);
      starts.push_back(c.start);
      table.insert(table.end(), c.blocks.begin(), c.blocks.end());
      table.insert(table.end(), max_blocks - c.blocks.size(), -1);
    }
    const int64_t num_sequences = static_cast<int64_t>(chunks.size());
    batch_.num_tokens = static_cast<int64_t>(positions.size());
    batch_.num_sequences = num_sequences;
    batch_.positions = Upload({batch_.num_tokens}, positions);
    batch_.row_offsets = Upload({num_sequences + 1}, offsets);
    batch_.slots = Upload({num_sequences}, slots);
    batch_.start_positions = Upload({num_sequences}, starts);
    batch_.block_table = Upload({num_sequences, static_cast<int64_t>(max_blocks)}, table);
    batch_.num_snapshots = static_cast<int64_t>(snapshots.size());
    std::vector<int32_t> sequence, position, slot;
    for (const Snapshot& s : snapshots) {
      sequence.push_back(s.sequence);
      position.push_back(s.position);
      slot.push_back(s.slot);
    }
    batch_.snapshot_sequence = Upload({batch_.num_snapshots}, sequence);
    batch_.snapshot_position = Upload({batch_.num_snapshots}, position);
    batch_.snapshot_slot = Upload({batch_.num_snapshots}, slot);
  }

  const ForwardBatch& batch() const { return batch_; }

  // Takes over what `other` has uploaded, which has the same shapes. The views stay.
  void Overwrite(const BatchBuilder& other) {
    for (size_t i = 0; i < uploads_.size(); ++i) uploads_[i].SetBytes(other.uploads_[i].GetBytes());
  }

 private:
  ConstTensorView Upload(Shape shape, const std::vector<int32_t>& values) {
    uploads_.emplace_back(shape, values);
    return uploads_.back().view();
  }

  std::vector<ArmTensor> uploads_;
  ForwardBatch batch_;
};

}  // namespace testing
}  // namespace lockstep
