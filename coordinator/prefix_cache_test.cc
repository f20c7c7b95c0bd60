// A prefix is reused only when its blocks and a snapshot at its end are there.
#include "coordinator/prefix_cache.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;

std::vector<int32_t> Tokens(int64_t length, int32_t first = 0) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(first + static_cast<int32_t>(i));
  return tokens;
}

// What a sequence does that computes `tokens` and leaves snapshots at `snapshots`.
std::vector<int32_t> Fill(PrefixCache* cache, const std::vector<int32_t>& tokens,
                          const std::vector<int64_t>& snapshots) {
  const auto chain = PrefixCache::Chain(tokens, "");
  std::vector<int32_t> table;
  for (size_t i = 0; i < chain.size(); ++i) {
    table.push_back(cache->AllocateBlock());
    cache->Register(chain, tokens, static_cast<int64_t>(i), table.back());
  }
  for (const int64_t position : snapshots) {
    const int32_t snapshot = cache->BeginSnapshot();
    EXPECT_GE(snapshot, 0);
    cache->CommitSnapshot(snapshot, chain[static_cast<size_t>(position / kBlockPositions - 1)]);
  }
  return table;
}

PrefixCache::Hit Lookup(const PrefixCache& cache, const std::vector<int32_t>& tokens,
                        const std::string& salt = "") {
  const int64_t last =
      (static_cast<int64_t>(tokens.size()) - 1) / kBlockPositions * kBlockPositions;
  return cache.Lookup(PrefixCache::Chain(tokens, salt), tokens, last);
}

TEST(PrefixCacheTest, ChainNamesWholeBlocksAndDependsOnAllBeforeAndTheSalt) {
  const auto chain = PrefixCache::Chain(Tokens(150), "");
  ASSERT_EQ(chain.size(), 2u);
  EXPECT_NE(chain[0], chain[1]);
  std::vector<int32_t> other = Tokens(150);
  other[3] = 7;
  EXPECT_NE(PrefixCache::Chain(other, "")[1], chain[1]);
  EXPECT_NE(PrefixCache::Chain(Tokens(150), "salt")[0], chain[0]);
}

TEST(PrefixCacheTest, AHitNeedsASnapshotAtItsEnd) {
  PrefixCache cache(8, 2);
  const std::vector<int32_t> table = Fill(&cache, Tokens(256), {128});
  const PrefixCache::Hit hit = Lookup(cache, Tokens(300));
  EXPECT_EQ(hit.position, 128);
  EXPECT_THAT(hit.blocks, ElementsAre(table[0], table[1]));
  EXPECT_EQ(hit.idle_blocks, 0) << "still held";
  EXPECT_EQ(Lookup(cache, Tokens(128)).position, 0) << "the last token is never reused";
  EXPECT_EQ(Lookup(cache, Tokens(129)).position, 128);
  EXPECT_EQ(Lookup(cache, Tokens(300), "salt").position, 0);
  cache.ReleaseBlocks(table);
  EXPECT_EQ(Lookup(cache, Tokens(300)).idle_blocks, 2);
  EXPECT_EQ(cache.available(), 8);
}

TEST(PrefixCacheTest, LongPrefixesAreGivenUpBeforeShortOnes) {
  PrefixCache cache(4, 4);
  cache.ReleaseBlocks(Fill(&cache, Tokens(256), {64, 128, 192, 256}));
  EXPECT_EQ(cache.snapshots_used(), 4);
  cache.AllocateBlock();
  EXPECT_EQ(Lookup(cache, Tokens(300)).position, 192);
  EXPECT_EQ(cache.snapshots_used(), 3) << "the snapshot goes with its block";
  cache.AllocateBlock();
  EXPECT_EQ(Lookup(cache, Tokens(300)).position, 128);
}

TEST(PrefixCacheTest, SnapshotsAreGivenUpLeastRecentlyUsedFirstUnlessPinned) {
  PrefixCache cache(8, 2);
  Fill(&cache, Tokens(256), {64, 128});
  const PrefixCache::Hit old = Lookup(cache, Tokens(65));
  ASSERT_EQ(old.position, 64);
  cache.Acquire(old);
  const int32_t third = cache.BeginSnapshot();
  EXPECT_NE(third, old.snapshot);
  EXPECT_EQ(Lookup(cache, Tokens(129)).position, 64) << "that of 128 was given up";
  EXPECT_EQ(cache.BeginSnapshot(), -1) << "one is read, the other written";
  EXPECT_EQ(cache.snapshots_pinned(), 2);
  cache.UnpinSnapshot(old.snapshot);
  cache.AbandonSnapshot(third);
  EXPECT_EQ(cache.snapshots_pinned(), 0);
  EXPECT_EQ(cache.snapshots_used(), 1);
}

TEST(PrefixCacheTest, ASecondCopyIsNotKept) {
  PrefixCache cache(4, 2);
  const std::vector<int32_t> first = Fill(&cache, Tokens(64), {64});
  const std::vector<int32_t> second = Fill(&cache, Tokens(64), {64});
  EXPECT_EQ(cache.snapshots_used(), 1);
  EXPECT_THAT(Lookup(cache, Tokens(65)).blocks, ElementsAre(first[0]));
  cache.ReleaseBlocks(second);
  EXPECT_EQ(cache.blocks().num_free(), 3);
  cache.ReleaseBlocks(first);
  EXPECT_EQ(cache.blocks().num_idle(), 1);
}

TEST(PrefixCacheTest, ASnapshotOfAnUnknownPrefixIsFreed) {
  PrefixCache cache(4, 1);
  cache.CommitSnapshot(cache.BeginSnapshot(), 12345);
  EXPECT_EQ(cache.snapshots_used(), 0);
  EXPECT_FALSE(cache.HasSnapshot(12345));
}

TEST(PrefixCacheTest, ForgottenBlocksAreNotFoundAndTheirSnapshotOutlivesItsReader) {
  PrefixCache cache(4, 1);
  const std::vector<int32_t> table = Fill(&cache, Tokens(128), {128});
  const PrefixCache::Hit hit = Lookup(cache, Tokens(129));
  cache.Acquire(hit);
  cache.ForgetBlocks(table);
  EXPECT_EQ(Lookup(cache, Tokens(129)).position, 0);
  EXPECT_EQ(cache.snapshots_used(), 1) << "a step still reads it";
  cache.UnpinSnapshot(hit.snapshot);
  EXPECT_EQ(cache.snapshots_used(), 0);
  cache.ReleaseBlocks(table);
  cache.ReleaseBlocks(hit.blocks);
  EXPECT_EQ(cache.blocks().num_free(), 4);
}

TEST(PrefixCacheTest, AfterForgetAllNothingIsKnownAndNothingIsLost) {
  PrefixCache cache(6, 3);
  const std::vector<int32_t> held = Fill(&cache, Tokens(128), {64, 128});
  cache.ReleaseBlocks(Fill(&cache, Tokens(192, 5), {192}));
  const PrefixCache::Hit hit = Lookup(cache, Tokens(129));
  cache.Acquire(hit);
  EXPECT_EQ(cache.blocks().num_idle(), 3);
  cache.ForgetAll();
  EXPECT_EQ(Lookup(cache, Tokens(129)).position, 0);
  EXPECT_EQ(cache.blocks().num_idle(), 0);
  EXPECT_EQ(cache.blocks().num_held(), 2) << "still in use";
  EXPECT_EQ(cache.snapshots_used(), 1) << "a step still reads it";
  cache.UnpinSnapshot(hit.snapshot);
  cache.ReleaseBlocks(held);
  cache.ReleaseBlocks(hit.blocks);
  EXPECT_EQ(cache.blocks().num_free(), 6);
  EXPECT_EQ(cache.snapshots_used(), 0);
}

}  // namespace
}  // namespace lockstep
