// Progress of the ranks adds up to one line.
#include "coordinator/load_progress.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using worker::v1::LoadModelProgress;

LoadModelProgress Bytes(int64_t done, int64_t total) {
  LoadModelProgress progress;
  progress.set_bytes_done(done);
  progress.set_bytes_total(total);
  progress.set_current("shard-2");
  return progress;
}

TEST(LoadProgressTest, AddsUpRanksAndNamesTheSlowest) {
  LoadProgress progress(2);
  EXPECT_EQ(progress.Line(), "waiting for the workers");
  const absl::Time start = absl::FromUnixSeconds(100);
  EXPECT_FALSE(progress.Update(0, Bytes(1000000000, 1000000000), start));
  EXPECT_FALSE(progress.Update(1, Bytes(500000000, 1000000000), start + absl::Seconds(4)));
  EXPECT_EQ(progress.Fraction(), 0.75);
  EXPECT_EQ(progress.FractionOf(1), 0.5);
  EXPECT_THAT(progress.Line(), HasSubstr("75% of 2.000 GB"));
  EXPECT_THAT(progress.Line(), HasSubstr("rank 1 is at 50%, reading shard-2"));
  EXPECT_TRUE(progress.Update(1, Bytes(600000000, 1000000000), start + absl::Seconds(5)));
  EXPECT_FALSE(progress.Update(1, Bytes(700000000, 1000000000), start + absl::Seconds(6)));
  EXPECT_FALSE(progress.Update(1, LoadModelProgress(), start + absl::Seconds(7)));
  EXPECT_EQ(progress.Fraction(), 1.0);
  EXPECT_FALSE(progress.Update(7, Bytes(1, 1), start));
}

}  // namespace
}  // namespace lockstep
