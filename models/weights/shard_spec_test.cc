// Tests of ShardSpec and VirtualShardsOf: every rule of the sharding table as a property over
// sizes.
#include "models/weights/shard_spec.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

// How often the ranks together hold each element; also checks order, disjointness and LocalSize.
std::vector<int> Coverage(const ShardSpec& spec, int world) {
  std::vector<int> times(static_cast<size_t>(spec.full_size()), 0);
  for (int rank = 0; rank < world; ++rank) {
    int64_t end = 0, local = 0;
    for (const Range& slice : spec.Slices(rank, world)) {
      EXPECT_GT(slice.size, 0);
      EXPECT_GE(slice.begin, end);
      end = slice.begin + slice.size;
      local += slice.size;
      EXPECT_LE(end, spec.full_size());
      for (int64_t i = slice.begin; i < end; ++i) ++times[static_cast<size_t>(i)];
    }
    EXPECT_EQ(local, spec.LocalSize(rank, world));
  }
  return times;
}

struct Row {
  const char* what;
  ShardSpec spec;
};

// The rows of the table that split without replication, with 27B-like proportions.
std::vector<Row> ExactRows() {
  return {
      {"q_proj: heads of 2 x 64 rows", ShardSpec::Split(24, 2 * 64)},
      {"k_proj: kv heads", ShardSpec::Split(8, 64)},
      {"mlp gate", ShardSpec::Split(1376, 1)},
      {"in_proj_qkv: q, k, v", ShardSpec::Split({{16, 32}, {16, 32}, {48, 32}})},
      {"in_proj_z", ShardSpec::Split(48, 32)},
      {"A_log", ShardSpec::Split(48, 1)},
      {"mamba in_proj: z, x, B, C, dt",
       ShardSpec::Split({{64, 8}, {64, 8}, {8, 16}, {8, 16}, {64, 1}})},
      {"mamba conv1d: x, B, C", ShardSpec::Split({{64, 8}, {8, 16}, {8, 16}})},
      {"mamba norm", ShardSpec::Split(64, 8)},
      {"embedding", ShardSpec::Vocab(4096)},
      {"ragged vocabulary", ShardSpec::Vocab(320)},
      {"tiny vocabulary", ShardSpec::Vocab(5)},
  };
}

TEST(ShardSpecTest, RanksCoverEveryElementOnce) {
  for (const Row& row : ExactRows()) {
    for (int world : {1, 2, 4, 8}) {
      ASSERT_THAT(row.spec.Validate(world), IsOk()) << row.what;
      EXPECT_THAT(Coverage(row.spec, world), ::testing::Each(1)) << row.what << " / " << world;
    }
  }
}

TEST(ShardSpecTest, ReplicatedUnitsAreHeldByNeighbours) {
  for (int units : {1, 2, 4}) {
    const ShardSpec spec = ShardSpec::Split({{units, 64, true}});
    for (int world : {1, 2, 4, 8}) {
      ASSERT_THAT(spec.Validate(world), IsOk());
      EXPECT_THAT(Coverage(spec, world), ::testing::Each(world > units ? world / units : 1));
    }
  }
  const ShardSpec two = ShardSpec::Split({{2, 64, true}});
  EXPECT_THAT(two.Slices(3, 8), ElementsAre(Range{0, 64}));
  EXPECT_THAT(two.Slices(4, 8), ElementsAre(Range{64, 64}));
  // Mamba with one group: B and C on every rank, x by heads.
  const ShardSpec mamba = ShardSpec::Split({{8, 4}, {1, 16, true}, {1, 16, true}});
  EXPECT_THAT(mamba.Slices(1, 4), ElementsAre(Range{8, 8}, Range{32, 16}, Range{48, 16}));
}

TEST(ShardSpecTest, ReplicatedHoldsAll) {
  const ShardSpec spec = ShardSpec::Replicated(10);
  EXPECT_TRUE(spec.replicated());
  EXPECT_FALSE(ShardSpec::Split(2, 5).replicated());
  EXPECT_THAT(spec.Validate(8), IsOk());
  EXPECT_THAT(Coverage(spec, 8), ::testing::Each(8));
}

TEST(ShardSpecTest, SegmentsAreCutSeparately) {
  const ShardSpec qkv = ShardSpec::Split({{4, 32}, {4, 32}, {8, 32}});
  EXPECT_EQ(qkv.full_size(), 512);
  EXPECT_THAT(qkv.Slices(1, 2), ElementsAre(Range{64, 64}, Range{192, 64}, Range{384, 128}));
  EXPECT_EQ(qkv.LocalSize(1, 2), 256);
}

TEST(ShardSpecTest, VocabularyIsPaddedTo128) {
  EXPECT_EQ(ShardSpec::VocabRowsPerRank(320, 1), 384);
  EXPECT_EQ(ShardSpec::VocabRowsPerRank(320, 2), 192);
  EXPECT_EQ(ShardSpec::VocabRowsPerRank(248320, 8), 31040);
  const ShardSpec spec = ShardSpec::Vocab(320);
  EXPECT_THAT(spec.Slices(0, 2), ElementsAre(Range{0, 192}));
  EXPECT_THAT(spec.Slices(1, 2), ElementsAre(Range{192, 128}));
  EXPECT_THAT(spec.Slices(6, 8), ElementsAre(Range{288, 32}));
  EXPECT_THAT(spec.Slices(7, 8), ElementsAre());
  EXPECT_EQ(spec.LocalSize(7, 8), 0);
}

TEST(ShardSpecTest, ValidateSaysWhatCannotBeCut) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(ShardSpec::Split({{8, 1}, {6, 3}}).Validate(4),
              StatusIs(kInvalid, HasSubstr("segment 1: 6 units of 3 cannot be split 4 ways")));
  EXPECT_THAT(ShardSpec::Split({{2, 64, false}}).Validate(4), StatusIs(kInvalid));
  EXPECT_THAT(ShardSpec::Split({{3, 64, true}}).Validate(8),
              StatusIs(kInvalid, HasSubstr("3 does not divide the number of ranks")));
  EXPECT_THAT(ShardSpec::Split({{6, 64, true}}).Validate(4), StatusIs(kInvalid));
  EXPECT_THAT(ShardSpec::Vocab(320).Validate(3), StatusIs(kInvalid, HasSubstr("power of two")));
  EXPECT_THAT(ShardSpec::Split(8, 1).Validate(0), StatusIs(kInvalid, HasSubstr("0 ranks")));
}

TEST(VirtualShardsTest, LargestPowerOfTwoWithWholeGroupsOf16) {
  const struct {
    int64_t k, count, size;
  } kRows[] = {
      {768, 8, 96}, {352, 2, 176}, {1856, 4, 464}, {17408, 8, 2176}, {6144, 8, 768}, {512, 8, 64},
      {384, 8, 48}, {128, 8, 16},  {64, 4, 16},    {32, 2, 16},      {16, 1, 16},    {48, 1, 48},
      {17, 1, 17},  {1, 1, 1},     {256, 8, 32},   {3584, 8, 448},
  };
  for (const auto& row : kRows) {
    EXPECT_EQ(VirtualShardsOf(row.k).count, row.count) << row.k;
    EXPECT_EQ(VirtualShardsOf(row.k).size, row.size) << row.k;
  }
  for (int64_t k = 1; k < 5000; ++k) {
    const VirtualShards v = VirtualShardsOf(k);
    ASSERT_EQ(v.count * v.size, k);
    ASSERT_TRUE(v.count == 1 || v.size % 16 == 0) << k;
    ASSERT_TRUE(v.count == 8 || k % (2 * v.count * 16) != 0) << k;
  }
}

}  // namespace
}  // namespace lockstep
