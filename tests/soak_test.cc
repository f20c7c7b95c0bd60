// A short soak: nothing is lost, repeated or different while workers are killed.
#include "tests/soak.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

TEST(Soak, NothingIsLostWhileWorkersAreKilled) {
  SoakOptions options;
  options.model = TestModel("qwen3_5-trained-ct-nvfp4-fp8");
  ASSERT_OK_AND_ASSIGN(const SoakResult result, Soak(options));
  SCOPED_TRACE(result.Json());
  RecordProperty("result", result.Json());
  EXPECT_EQ(result.requests, options.requests);
  EXPECT_LT(result.refused, options.requests / 2);
  EXPECT_EQ(result.lost, 0);
  EXPECT_EQ(result.duplicated, 0);
  EXPECT_EQ(result.different, 0);
  EXPECT_EQ(result.digest_mismatches, 0);
  EXPECT_EQ(result.kv_blocks_held, 0);
  EXPECT_EQ(result.slots_held, 0);
  EXPECT_GE(result.kills, 4);
  EXPECT_GE(result.recoveries, result.kills / 2);
  EXPECT_GT(result.recovered_streams, 0);
  EXPECT_LT(result.server_mib, 400);
  EXPECT_LT(result.worker_mib, 400);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
