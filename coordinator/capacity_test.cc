// Limits follow from flags and from what the ranks report.
#include "coordinator/capacity.h"

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using worker::v1::LoadModelResult;

std::vector<LoadModelResult> Ranks(int64_t context, int64_t block_bytes, int64_t snapshot_bytes) {
  std::vector<LoadModelResult> results(2);
  for (LoadModelResult& result : results) {
    result.set_max_positions(context);
    result.set_kv_block_bytes(block_bytes);
    result.set_snapshot_bytes(snapshot_bytes);
  }
  results[1].set_kv_block_bytes(block_bytes / 2);
  return results;
}

TEST(CapacityTest, SmallModelGetsFullLengthForEverySequence) {
  ASSERT_OK_AND_ASSIGN(const Capacity c, PlanCapacity({}, Ranks(1000, 1 << 10, 1 << 10)));
  EXPECT_EQ(c.max_context, 1000);
  EXPECT_EQ(c.max_sequence_blocks, 16);
  EXPECT_EQ(c.kv_blocks, 256);
  EXPECT_EQ(c.slots, 16);
  EXPECT_EQ(c.snapshots, 64);
  EXPECT_EQ(c.max_batch_tokens, 512);
  EXPECT_EQ(c.max_logit_rows, 64);
  EXPECT_EQ(c.kv_bytes, 256 << 10);
}

TEST(CapacityTest, BudgetBoundsBlocksContextAndSnapshots) {
  const auto ranks = Ranks(1 << 18, 1 << 20, 64 << 20);
  ASSERT_OK_AND_ASSIGN(const Capacity c, PlanCapacity({}, ranks));
  EXPECT_EQ(c.kv_blocks, 1024);
  EXPECT_EQ(c.max_context, 65536);
  EXPECT_EQ(c.snapshots, 8);
  CapacityRequest request;
  request.kv_cache_mb = 100;
  request.max_model_len = 640;
  ASSERT_OK_AND_ASSIGN(const Capacity small, PlanCapacity(request, ranks));
  EXPECT_EQ(small.kv_blocks, 100);
  EXPECT_EQ(small.max_context, 640);
  request.max_kv_blocks = 7;
  ASSERT_OK_AND_ASSIGN(const Capacity fixed, PlanCapacity(request, ranks));
  EXPECT_EQ(fixed.kv_blocks, 7);
}

TEST(CapacityTest, RefusalsNameTheFlag) {
  const auto ranks = Ranks(4096, 1 << 20, 1);
  const auto refuse = [&](const CapacityRequest& request, const char* part) {
    EXPECT_THAT(PlanCapacity(request, ranks),
                testing::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(part)));
  };
  CapacityRequest request;
  request.max_model_len = 4097;
  refuse(request, "--max-model-len 4097 is more than the model's context of 4096");
  request.max_model_len = 1;
  refuse(request, "--max-model-len 1");
  request = {};
  request.max_num_seqs = 0;
  refuse(request, "--max-num-seqs is 0");
  request = {};
  request.max_num_batched_tokens = 8;
  refuse(request, "less than --max-num-seqs");
  request = {};
  request.max_model_len = 4096;
  request.kv_cache_mb = 10;
  refuse(request, "needs 64 MiB");
}

TEST(CapacityTest, ModelWithoutContextIsRefused) {
  EXPECT_THAT(PlanCapacity({}, Ranks(0, 1, 1)),
              testing::StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("context of 0")));
}

}  // namespace
}  // namespace lockstep
