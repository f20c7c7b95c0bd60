// What operators ask of a running engine, and refusal by deadline.
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace testing {
namespace {

TEST(EngineOperatorTest, ListsRequestsWithoutTheirText) {
  EngineOptions options = SmallEngine();
  options.slots = 2;
  EngineFixture fixture(options);
  EXPECT_THAT(*fixture.engine.ListRequests(), ::testing::IsEmpty());
  fixture.transport.Pause();
  GenerationSpec both = MakeSpec("both", MakePrompt(40, 1), 20);
  both.n = 2;
  both.priority = 1;
  both.deadline = absl::Now() + absl::Hours(1);
  auto running = fixture.Submit(both);
  fixture.transport.Allow(3);
  ASSERT_TRUE(running->WaitTokens(1) && running->WaitTokens(1, 1));
  auto queued = fixture.Submit(MakeSpec("queued", MakePrompt(7, 2), 5));

  const auto list = fixture.engine.ListRequests();
  ASSERT_OK(list);
  ASSERT_EQ(list->size(), 2u);
  EXPECT_EQ((*list)[0].request_id, "both");
  EXPECT_TRUE((*list)[0].scheduled);
  EXPECT_EQ((*list)[0].prompt_tokens, 40);
  EXPECT_GE((*list)[0].generated_tokens, 2);
  EXPECT_EQ((*list)[0].outputs, 2);
  EXPECT_EQ((*list)[0].priority, 1);
  EXPECT_EQ((*list)[0].deadline, both.deadline);
  EXPECT_EQ((*list)[1].request_id, "queued");
  EXPECT_FALSE((*list)[1].scheduled);
  EXPECT_GE((*list)[1].age, absl::ZeroDuration());
  EXPECT_EQ((*list)[1].generated_tokens, 0);
  fixture.transport.Resume();
  ASSERT_TRUE(running->WaitDone() && queued->WaitDone());
  ASSERT_TRUE(fixture.WaitIdle());
  EXPECT_THAT(*fixture.engine.ListRequests(), ::testing::IsEmpty());
  fixture.engine.Stop(absl::CancelledError("over"));
  EXPECT_TRUE(absl::IsCancelled(fixture.engine.ListRequests().status()));
}

TEST(EngineOperatorTest, TheCacheIsResetUnderLoad) {
  EngineFixture fixture(SmallEngine());
  const GenerationSpec first = MakeSpec("first", MakePrompt(200, 1), 3);
  ASSERT_TRUE(fixture.Submit(first)->WaitDone());
  ASSERT_TRUE(fixture.WaitIdle());
  EXPECT_GT(fixture.engine.stats().kv_blocks_cached, 0);
  const int64_t cached = fixture.engine.stats().kv_blocks_cached;
  const auto freed = fixture.engine.ResetPrefixCache();
  ASSERT_OK(freed);
  EXPECT_EQ(*freed, cached);
  GenerationSpec again = first;
  again.request_id = "again";
  auto sink = fixture.Submit(again);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(fixture.engine.stats().counters["tokens_cached"], 0);
  EXPECT_EQ(Difference(*sink, again), "");
  // While sequences run and steps are in flight, too.
  std::vector<GenerationSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 60; ++i) {
    specs.push_back(MakeSpec(absl::StrCat(i), MakePrompt(150, static_cast<uint64_t>(i) % 3), 10));
    sinks.push_back(fixture.Submit(specs.back()));
    if (i % 3 == 0) {
      sinks.back()->WaitTokens(1);
      ASSERT_OK(fixture.engine.ResetPrefixCache());
    }
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    EXPECT_EQ(Difference(*sinks[i], specs[i]), "") << i;
  }
  ASSERT_TRUE(fixture.WaitIdle());
  EXPECT_EQ(Leaks(fixture.engine), "");
  EXPECT_EQ(fixture.engine.stats().kv_blocks_pinned_without_owner, 0);
}

TEST(EngineOperatorTest, TheLoopTicksWhileNothingRuns) {
  EngineFixture fixture(SmallEngine());
  ASSERT_OK(fixture.engine.ListRequests());
  const absl::Time before = fixture.engine.LastTick();
  EXPECT_LT(absl::Now() - before, absl::Seconds(30));
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (fixture.engine.LastTick() == before && absl::Now() < patience) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_GT(fixture.engine.LastTick(), before);
}

TEST(EngineOperatorTest, WhatWouldBeTooLateIsRefusedAtOnce) {
  EngineOptions options = SmallEngine();
  options.slots = 1;
  auto now = std::make_shared<std::atomic<int64_t>>(1000);
  options.clock = [now] { return absl::FromUnixMillis(*now); };
  EngineFixture fixture(options);
  fixture.transport.Pause();
  auto running = fixture.Submit(MakeSpec("running", MakePrompt(10, 1), 5));
  while (fixture.engine.stats().requests_running == 0) absl::SleepFor(absl::Milliseconds(1));
  auto queued = fixture.Submit(MakeSpec("queued", MakePrompt(10, 1), 5));
  *now += 5000;
  GenerationSpec late = MakeSpec("late", MakePrompt(10, 1), 5);
  late.queue_deadline = absl::FromUnixMillis(*now) + absl::Seconds(1);
  const absl::Status status = fixture.engine.Submit(late, std::make_shared<RecordingSink>());
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(ReasonOf(status), "DEADLINE_UNMEETABLE");
  // Its id is free again, and with enough time it is taken.
  late.queue_deadline = absl::FromUnixMillis(*now) + absl::Minutes(1);
  auto patient = fixture.Submit(late);
  fixture.transport.Resume();
  ASSERT_TRUE(running->WaitDone() && queued->WaitDone() && patient->WaitDone());
  EXPECT_OK(patient->status());
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
