// PrefixCache: the KV blocks and recurrent-state snapshots of one model replica, and which of them
// hold the prefix of which token sequence.
//
// A prefix is named by a hash chain over its 64-token blocks, begun with the salt. A prefix can be
// reused when all its blocks are known and a snapshot was taken at its end. Content is offered only
// after the step that wrote it has reported: the caller calls Register and CommitSnapshot then.
// Not thread safe; belongs to the engine's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/block_allocator.h"

namespace lockstep {

// Positions per KV block and the grid of recurrent states (numerics N5, N6): a contract constant,
// the same as kGrid of kernels/batch.
constexpr int64_t kBlockPositions = 64;

// Blocks that hold positions [0, end).
constexpr int64_t BlocksFor(int64_t end) { return (end + kBlockPositions - 1) / kBlockPositions; }

class PrefixCache {
 public:
  PrefixCache(int64_t num_blocks, int64_t num_snapshots);

  // ---- blocks ----
  // Free blocks, and idle ones that can be given up.
  int64_t available() const { return blocks_.num_free() + blocks_.num_idle(); }
  // A block with one holder; gives up the longest idle one when none is free. CHECKs available() >
  // 0.
  int32_t AllocateBlock();
  // Releases a whole block table, last block first, so that longer prefixes are given up before the
  // shorter ones that they begin with.
  void ReleaseBlocks(const std::vector<int32_t>& table);
  const BlockAllocator& blocks() const { return blocks_; }

  // ---- prefixes ----
  // Element i names the first (i + 1) * 64 tokens. Only whole blocks count.
  static std::vector<uint64_t> Chain(const std::vector<int32_t>& tokens, const std::string& salt);

  struct Hit {
    int64_t position = 0;  // 0: nothing is reusable
    std::vector<int32_t> blocks;
    int32_t snapshot = -1;
    int64_t idle_blocks = 0;  // of `blocks`: they stop being available when acquired
  };
  // The longest reusable prefix of `tokens` that ends at or before max_position.
  Hit Lookup(const std::vector<uint64_t>& chain, const std::vector<int32_t>& tokens,
             int64_t max_position) const;
  // Holds the blocks of a hit and pins its snapshot until UnpinSnapshot.
  void Acquire(const Hit& hit);

  // `block`, held by the caller, holds block `index` of `tokens`. Nothing when that is known
  // already.
  void Register(const std::vector<uint64_t>& chain, const std::vector<int32_t>& tokens,
                int64_t index, int32_t block);
  // The content of these blocks is not to be reused (it is suspect).
  void ForgetBlocks(const std::vector<int32_t>& table);
  // No prefix is known any more. Blocks and snapshots that are in use are freed by their last user.
  void ForgetAll();
  bool Knows(uint64_t name) const { return entries_.count(name) != 0; }

  // ---- snapshots ----
  bool HasSnapshot(uint64_t name) const;
  // A snapshot slot to write; gives up the least recently used one. -1 when all are in use by
  // steps.
  int32_t BeginSnapshot();
  // The step that wrote it has reported: it is the state at the end of prefix `name`. Freed when
  // that prefix is not known or has one.
  void CommitSnapshot(int32_t snapshot, uint64_t name);
  // The step failed or will not be believed.
  void AbandonSnapshot(int32_t snapshot);
  // The step that read it has reported.
  void UnpinSnapshot(int32_t snapshot);

  int64_t num_snapshots() const { return static_cast<int64_t>(snapshots_.size()); }
  int64_t snapshots_used() const {
    return num_snapshots() - static_cast<int64_t>(free_snapshots_.size());
  }
  // Snapshots that a step writes or reads now.
  int64_t snapshots_pinned() const;

 private:
  struct Entry {
    int32_t block = -1;
    int32_t snapshot = -1;
    uint64_t parent = 0;          // name of the prefix without this block; the salt's for the first
    std::vector<int32_t> tokens;  // of this block, compared against collisions of the hash
  };
  struct Snapshot {
    bool attached = false;
    bool writing = false;
    int32_t readers = 0;
    uint64_t name = 0;
    uint64_t used_at = 0;  // key in lru_ while attached and unread
  };
  const Entry* Find(const std::vector<uint64_t>& chain, const std::vector<int32_t>& tokens,
                    int64_t index) const;
  void Forget(uint64_t name);
  void DetachSnapshot(Entry* entry);
  Snapshot& snapshot(int32_t id);

  BlockAllocator blocks_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::unordered_map<int32_t, uint64_t> name_of_block_;
  std::vector<Snapshot> snapshots_;
  std::vector<int32_t> free_snapshots_;
  std::set<std::pair<uint64_t, int32_t>> lru_;  // (used_at, snapshot): those that may be given up
  uint64_t ticks_ = 0;
};

}  // namespace lockstep
