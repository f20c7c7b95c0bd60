// The arithmetic of `lockstep bench serve`.
#include "tools/cli/bench_serve.h"

#include "gtest/gtest.h"

namespace lockstep {
namespace cli {
namespace {

TEST(BenchServeTest, PercentileIsNearestRank) {
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.99), 3);
  EXPECT_EQ(Percentile({7}, 0.0), 7);
}

TEST(BenchServeTest, OneStreamCountsIntervals) {
  const BenchResult r = Summarize(1, {{{0.0, {1.0, 1.5, 2.0}}}});
  EXPECT_EQ(r.requests, 1);
  EXPECT_EQ(r.output_tokens, 2);
  EXPECT_EQ(r.window_seconds, 1.0);
  EXPECT_EQ(r.tokens_per_second, 2.0);
  EXPECT_EQ(r.ttft_p50, 1000.0);
  EXPECT_EQ(r.inter_token_p50, 500.0);
}

TEST(BenchServeTest, WindowIsWhereAllStreamsRun) {
  // The second stream starts at 2 and the first ends at 4: only what lies between counts.
  const BenchResult r =
      Summarize(2, {{{0.0, {1.0, 2.0, 3.0, 4.0}}}, {{0.0, {2.0, 3.0, 4.0, 5.0, 6.0}}}});
  EXPECT_EQ(r.output_tokens, 5);
  EXPECT_EQ(r.window_seconds, 2.0);
  EXPECT_EQ(r.tokens_per_second, 2.5);
}

TEST(BenchServeTest, NothingArrivedIsZero) {
  const BenchResult r = Summarize(1, {{{0.0, {}}}});
  EXPECT_EQ(r.output_tokens, 0);
  EXPECT_EQ(r.tokens_per_second, 0);
}

inference::v1::ServerStatus StatusOf(int64_t steps, int64_t micros) {
  inference::v1::ServerStatus status;
  (*status.mutable_counters())["steps"] = steps;
  (*status.mutable_counters())["step_micros_total"] = micros;
  return status;
}

TEST(BenchServeTest, StepsAreDifferencesOfCounters) {
  BenchResult r;
  SummarizeSteps(StatusOf(10, 5000), StatusOf(14, 13000), 0.012, &r);
  EXPECT_EQ(r.steps, 4);
  EXPECT_DOUBLE_EQ(r.step_ms, 2.0);
  EXPECT_DOUBLE_EQ(r.wall_ms_per_step, 3.0);
  EXPECT_DOUBLE_EQ(r.wall_per_step_ratio, 1.5);
}

TEST(BenchServeTest, NoStepGivesNoTimes) {
  BenchResult r;
  SummarizeSteps(StatusOf(10, 5000), StatusOf(10, 5000), 1.0, &r);
  EXPECT_EQ(r.steps, 0);
  EXPECT_EQ(r.step_ms, 0);
  EXPECT_EQ(r.wall_per_step_ratio, 0);
}

}  // namespace
}  // namespace cli
}  // namespace lockstep
