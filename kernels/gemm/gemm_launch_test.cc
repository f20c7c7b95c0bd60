// Tests of the choice of tiles.
#include "kernels/gemm/gemm_launch.h"

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(ChooseGemmTileTest, FitsEveryShape) {
  for (const WeightFormat format :
       {WeightFormat::kNvfp4, WeightFormat::kFp8, WeightFormat::kBF16}) {
    for (int64_t n : {4, 20, 5120, 34816, 248320}) {
      for (int64_t leaf_steps : {1, 3, 17, 80, 136, 320, 1088}) {
        for (int leaves : {1, 2, 4, 8}) {
          for (int64_t m : {1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 200, 8192}) {
            const GemmTile tile = ChooseGemmTile({format, n, m, leaves, leaf_steps});
            const auto text = [&] {
              return ::testing::Message() << n << " " << leaf_steps << " " << leaves << " " << m;
            };
            EXPECT_TRUE(tile.token_blocks == 1 || tile.token_blocks == 2 || tile.token_blocks == 4)
                << text();
            EXPECT_TRUE(tile.token_blocks == 4 || tile.token_blocks * 8 >= m) << text();
            EXPECT_TRUE(tile.warps == 4 || tile.warps == 8) << text();
            EXPECT_GE(tile.groups, 1) << text();
            EXPECT_TRUE(tile.stages >= 2 && tile.stages <= 4) << text();
            EXPECT_TRUE(tile.phase_steps == leaf_steps || tile.phase_steps % 16 == 0) << text();
            // A CTA of an H200 can have 227 KiB.
            EXPECT_LE(GemmSharedBytes(tile, m), 227 << 10) << text();
          }
        }
      }
    }
  }
}

// The shapes of a 27B model have the tiles that were the fastest ones when measured.
TEST(ChooseGemmTileTest, MeasuredShapes) {
  struct Row {
    int64_t n, leaves, leaf_steps, m;
    int warps, groups, stages;
  };
  const Row rows[] = {
      {34816, 4, 80, 1, 8, 3, 3}, {34816, 4, 80, 8, 8, 3, 2}, {34816, 4, 80, 16, 8, 3, 2},
      {5120, 8, 136, 1, 8, 1, 3}, {5120, 8, 136, 8, 8, 1, 2}, {5120, 8, 136, 16, 8, 1, 2},
      {5120, 8, 48, 1, 8, 1, 3},  {17408, 4, 80, 1, 8, 1, 3}, {17408, 4, 80, 16, 4, 3, 2},
  };
  for (const Row& r : rows) {
    const GemmTile tile =
        ChooseGemmTile({WeightFormat::kNvfp4, r.n, r.m, static_cast<int>(r.leaves), r.leaf_steps});
    EXPECT_EQ(tile.warps, r.warps) << r.n << " " << r.m;
    EXPECT_EQ(tile.groups, r.groups) << r.n << " " << r.m;
    EXPECT_EQ(tile.stages, r.stages) << r.n << " " << r.m;
    EXPECT_EQ(tile.phase_steps, r.leaf_steps) << r.n << " " << r.m;
  }
}

TEST(ChooseGemmKernelTest, FollowsTheTokens) {
  const auto choose = [](int64_t n, int64_t m) {
    return ChooseGemmKernel({WeightFormat::kNvfp4, n, m, 4, 80});
  };
  EXPECT_EQ(choose(34816, 1), GemmKernel::kFewTokens);
  EXPECT_EQ(choose(34816, 16), GemmKernel::kFewTokens);
  EXPECT_EQ(choose(34816, 17), GemmKernel::kSomeTokens);
  EXPECT_EQ(choose(34816, 64), GemmKernel::kSomeTokens);
  EXPECT_EQ(choose(34816, 8192), GemmKernel::kManyTokens);
  // Too few tiles to fill the device: the leaves do.
  EXPECT_EQ(choose(5120, 128), GemmKernel::kSomeTokens);
}

}  // namespace
}  // namespace lockstep
