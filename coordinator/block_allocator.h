// BlockAllocator: who holds which KV block. A block is free, held (by one or more block tables), or
// idle: held by nobody, but its content is kept for reuse and given up in least-recently-used
// order. Not thread safe; belongs to the engine's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace lockstep {

class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t num_blocks);

  // Takes a free block with one holder. CHECKs that num_free() > 0.
  int32_t Take();
  // One more holder. The block must be held or idle.
  void Hold(int32_t block);
  // One holder fewer. The last one leaves it idle when its content is kept, else free.
  void Release(int32_t block);

  // Marks the content of a held block as worth keeping.
  void Keep(int32_t block);
  // The content is worth nothing any more. An idle block becomes free.
  void Discard(int32_t block);
  // The idle block that was released first. CHECKs that there is one.
  int32_t OldestIdle() const;

  int32_t holders(int32_t block) const { return blocks_[static_cast<size_t>(block)].holders; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }
  int64_t num_held() const { return num_blocks() - num_free() - num_idle(); }
  // Holders over all blocks.
  int64_t num_holds() const { return num_holds_; }

 private:
  struct Block {
    int32_t holders = 0;
    bool kept = false;
    uint64_t released_at = 0;  // key in idle_
  };
  Block& at(int32_t block);

  std::vector<Block> blocks_;
  std::vector<int32_t> free_;
  std::set<std::pair<uint64_t, int32_t>> idle_;  // (released_at, block)
  uint64_t ticks_ = 0;
  int64_t num_holds_ = 0;
};

// Held blocks that are in none of these block tables: 0 unless something leaks. Cheap while every
// hold has its place in a table.
int64_t BlocksWithoutOwner(const BlockAllocator& blocks,
                           const std::vector<const std::vector<int32_t>*>& tables);

}  // namespace lockstep
