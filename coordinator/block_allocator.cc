#include "coordinator/block_allocator.h"

#include "kernels/base/check.h"

namespace lockstep {

BlockAllocator::BlockAllocator(int64_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
  free_.reserve(blocks_.size());
  for (int64_t i = num_blocks; i > 0; --i) free_.push_back(static_cast<int32_t>(i - 1));
}

BlockAllocator::Block& BlockAllocator::at(int32_t block) {
  CHECK(block >= 0 && block < num_blocks()) << "block " << block << " of " << num_blocks();
  return blocks_[static_cast<size_t>(block)];
}

int32_t BlockAllocator::Take() {
  CHECK(!free_.empty()) << "no free block";
  const int32_t block = free_.back();
  free_.pop_back();
  at(block).holders = 1;
  ++num_holds_;
  return block;
}

void BlockAllocator::Hold(int32_t block) {
  Block& b = at(block);
  if (b.holders == 0) {
    CHECK_EQ(idle_.erase({b.released_at, block}), 1u) << "hold of free block " << block;
  }
  ++b.holders;
  ++num_holds_;
}

void BlockAllocator::Release(int32_t block) {
  Block& b = at(block);
  CHECK_GT(b.holders, 0) << "block " << block;
  --num_holds_;
  if (--b.holders > 0) return;
  if (b.kept) {
    b.released_at = ++ticks_;
    idle_.insert({b.released_at, block});
  } else {
    free_.push_back(block);
  }
}

void BlockAllocator::Keep(int32_t block) {
  CHECK_GT(at(block).holders, 0) << "keep of block " << block << " that nobody holds";
  at(block).kept = true;
}

void BlockAllocator::Discard(int32_t block) {
  Block& b = at(block);
  CHECK(b.kept) << "discard of block " << block << " whose content is not kept";
  b.kept = false;
  if (b.holders == 0) {
    CHECK_EQ(idle_.erase({b.released_at, block}), 1u);
    free_.push_back(block);
  }
}

int32_t BlockAllocator::OldestIdle() const {
  CHECK(!idle_.empty()) << "no idle block";
  return idle_.begin()->second;
}

int64_t BlocksWithoutOwner(const BlockAllocator& blocks,
                           const std::vector<const std::vector<int32_t>*>& tables) {
  int64_t places = 0;
  for (const std::vector<int32_t>* table : tables) places += static_cast<int64_t>(table->size());
  if (blocks.num_holds() == places) return 0;
  std::set<int32_t> owned;
  for (const std::vector<int32_t>* table : tables) owned.insert(table->begin(), table->end());
  return blocks.num_held() - static_cast<int64_t>(owned.size());
}

}  // namespace lockstep
