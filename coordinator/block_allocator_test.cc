// Blocks are free, held or idle, and never lost.
#include "coordinator/block_allocator.h"

#include <set>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(BlockAllocatorTest, GivesEachBlockOnceAndTakesItBack) {
  BlockAllocator blocks(3);
  std::set<int32_t> taken;
  for (int i = 0; i < 3; ++i) taken.insert(blocks.Take());
  EXPECT_EQ(taken, (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(blocks.num_free(), 0);
  EXPECT_EQ(blocks.num_held(), 3);
  blocks.Release(1);
  EXPECT_EQ(blocks.num_free(), 1);
  EXPECT_EQ(blocks.Take(), 1);
}

TEST(BlockAllocatorTest, ASharedBlockIsFreeAfterItsLastHolder) {
  BlockAllocator blocks(1);
  const int32_t block = blocks.Take();
  blocks.Hold(block);
  EXPECT_EQ(blocks.holders(block), 2);
  blocks.Release(block);
  EXPECT_EQ(blocks.num_free(), 0);
  blocks.Release(block);
  EXPECT_EQ(blocks.num_free(), 1);
}

TEST(BlockAllocatorTest, KeptBlocksBecomeIdleOldestFirst) {
  BlockAllocator blocks(3);
  for (int i = 0; i < 3; ++i) blocks.Keep(blocks.Take());
  blocks.Release(2);
  blocks.Release(0);
  blocks.Release(1);
  EXPECT_EQ(blocks.num_free(), 0);
  EXPECT_EQ(blocks.num_idle(), 3);
  EXPECT_EQ(blocks.OldestIdle(), 2);
  blocks.Hold(2);  // used again
  EXPECT_EQ(blocks.num_idle(), 2);
  blocks.Release(2);
  EXPECT_EQ(blocks.OldestIdle(), 0);
  blocks.Discard(0);
  EXPECT_EQ(blocks.num_free(), 1);
  EXPECT_EQ(blocks.OldestIdle(), 1);
}

TEST(BlockAllocatorTest, AHeldBlockThatIsDiscardedBecomesFreeWhenReleased) {
  BlockAllocator blocks(1);
  blocks.Keep(blocks.Take());
  blocks.Discard(0);
  blocks.Release(0);
  EXPECT_EQ(blocks.num_idle(), 0);
  EXPECT_EQ(blocks.num_free(), 1);
}

TEST(BlockAllocatorDeathTest, MisuseEndsTheProcess) {
  BlockAllocator blocks(1);
  EXPECT_DEATH(blocks.Release(0), "block 0");
  EXPECT_DEATH(blocks.Hold(0), "hold of free block");
  EXPECT_DEATH(blocks.Release(7), "block 7 of 1");
  blocks.Take();
  EXPECT_DEATH(blocks.Take(), "no free block");
}

TEST(BlockAllocatorTest, SeesBlocksThatNobodyOwns) {
  BlockAllocator blocks(4);
  const std::vector<int32_t> first = {blocks.Take(), blocks.Take()};
  const std::vector<int32_t> second = {first[0], blocks.Take()};
  blocks.Hold(first[0]);
  EXPECT_EQ(blocks.num_holds(), 4);
  EXPECT_EQ(BlocksWithoutOwner(blocks, {&first, &second}), 0);
  // A table that is gone while its blocks are still held.
  EXPECT_EQ(BlocksWithoutOwner(blocks, {&first}), 1);
  EXPECT_EQ(BlocksWithoutOwner(blocks, {}), 3);
  for (const int32_t block : first) blocks.Release(block);
  for (const int32_t block : second) blocks.Release(block);
  EXPECT_EQ(blocks.num_holds(), 0);
  EXPECT_EQ(BlocksWithoutOwner(blocks, {}), 0);
}

}  // namespace
}  // namespace lockstep
