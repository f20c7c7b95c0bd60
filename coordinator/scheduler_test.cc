// Scheduling decisions, one rule at a time.
#include "coordinator/scheduler.h"

#include <vector>

#include "coordinator/prefix_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A sequence that decodes: one row at `position`, its blocks there.
SchedulerSequence Decoding(int64_t id, int64_t position, int32_t steps_in_flight = 1) {
  SchedulerSequence s;
  s.id = id;
  s.position = position;
  s.end = position + 1;
  s.logits_from = 0;
  s.blocks = BlocksFor(position);
  s.own_blocks = s.blocks;
  s.steps_in_flight = steps_in_flight;
  s.progressed = true;
  return s;
}

// A prompt of `end` tokens, run up to `position`.
SchedulerSequence Prompt(int64_t id, int64_t position, int64_t end) {
  SchedulerSequence s;
  s.id = id;
  s.position = position;
  s.end = end;
  s.logits_from = end - 1;
  s.blocks = BlocksFor(position);
  s.own_blocks = s.blocks;
  return s;
}

SchedulerInput Roomy() {
  SchedulerInput input;
  input.available_blocks = 100;
  input.free_slots = 8;
  input.max_tokens = 128;
  input.max_logit_rows = 16;
  return input;
}

std::vector<int64_t> Ids(const Schedule& schedule) {
  std::vector<int64_t> ids;
  for (const ScheduledRows& rows : schedule.rows) ids.push_back(rows.id);
  return ids;
}

TEST(SchedulerTest, NothingToDoGivesNothing) {
  const Schedule schedule = ScheduleStep(Roomy());
  EXPECT_THAT(schedule.rows, IsEmpty());
  EXPECT_THAT(schedule.preempted, IsEmpty());
}

TEST(SchedulerTest, DecodesComeFirstThenPromptsThenNewOnes) {
  SchedulerInput input = Roomy();
  input.running = {Prompt(1, 64, 200), Decoding(2, 10), Decoding(3, 500)};
  input.waiting = {Prompt(4, 0, 50)};
  input.max_tokens = 148;
  const Schedule schedule = ScheduleStep(input);
  EXPECT_THAT(Ids(schedule), ElementsAre(2, 3, 1, 4));
  EXPECT_EQ(schedule.rows[2].tokens, 136);
  EXPECT_TRUE(schedule.rows[2].sample);
  EXPECT_EQ(schedule.rows[2].num_logits, 1);
  EXPECT_EQ(schedule.rows[3].tokens, 10) << "the rest of the budget";
  EXPECT_FALSE(schedule.rows[3].sample);
  EXPECT_EQ(schedule.rows[3].num_logits, 0);
  EXPECT_THAT(schedule.admitted, ElementsAre(4));
}

TEST(SchedulerTest, ASequenceWithNothingLeftToRunIsLeftAlone) {
  SchedulerInput input = Roomy();
  SchedulerSequence planned = Decoding(1, 10);
  planned.end = planned.position;
  input.running = {planned};
  EXPECT_THAT(ScheduleStep(input).rows, IsEmpty());
}

TEST(SchedulerTest, NobodyPassesTheFirstInTheQueue) {
  SchedulerInput input = Roomy();
  input.available_blocks = 3;
  input.waiting = {Prompt(1, 0, 300), Prompt(2, 0, 10)};
  const Schedule schedule = ScheduleStep(input);
  EXPECT_THAT(schedule.admitted, IsEmpty());
}

TEST(SchedulerTest, AdmitsNoMoreThanThereAreSlots) {
  SchedulerInput input = Roomy();
  input.free_slots = 1;
  input.waiting = {Prompt(1, 0, 10), Prompt(2, 0, 10)};
  EXPECT_THAT(ScheduleStep(input).admitted, ElementsAre(1));
}

TEST(SchedulerTest, BlocksThatRunningPromptsStillNeedAreNotGivenToNewOnes) {
  SchedulerInput input = Roomy();
  input.available_blocks = 5;
  input.running = {Prompt(1, 0, 256)};
  input.waiting = {Prompt(2, 0, 128)};
  EXPECT_THAT(ScheduleStep(input).admitted, IsEmpty()) << "4 are promised, 2 are needed";
  input.available_blocks = 6;
  input.max_tokens = 200;
  EXPECT_THAT(ScheduleStep(input).admitted, IsEmpty()) << "no budget is left";
  input.max_tokens = 300;
  EXPECT_THAT(ScheduleStep(input).admitted, ElementsAre(2));
}

TEST(SchedulerTest, IdleBlocksOfAHitAreNotCountedTwice) {
  SchedulerInput input = Roomy();
  SchedulerSequence waiting = Prompt(1, 128, 192);
  waiting.idle_blocks = 2;
  input.waiting = {waiting};
  input.available_blocks = 2;
  EXPECT_THAT(ScheduleStep(input).admitted, IsEmpty());
  input.available_blocks = 3;
  EXPECT_THAT(ScheduleStep(input).admitted, ElementsAre(1));
}

TEST(SchedulerTest, WhenBlocksRunOutTheYoungestIdleOneIsPreempted) {
  SchedulerInput input = Roomy();
  input.available_blocks = 0;
  input.running = {Decoding(1, 64), Decoding(2, 70, 0), Decoding(3, 70, 0), Decoding(4, 70, 1)};
  input.waiting = {Prompt(5, 0, 10)};
  const Schedule schedule = ScheduleStep(input);
  EXPECT_THAT(schedule.preempted, ElementsAre(3));
  EXPECT_THAT(Ids(schedule), ElementsAre(1, 2, 4));
  EXPECT_THAT(schedule.admitted, IsEmpty()) << "not in a step that preempts";
}

TEST(SchedulerTest, WithEveryoneInFlightTheYoungestIsLeftOutToBecomeIdle) {
  SchedulerInput input = Roomy();
  input.available_blocks = 0;
  input.running = {Decoding(1, 64), Decoding(2, 70), Decoding(3, 70)};
  const Schedule schedule = ScheduleStep(input);
  EXPECT_THAT(schedule.preempted, IsEmpty());
  EXPECT_THAT(Ids(schedule), ElementsAre(2)) << "1 has no block, 3 is to become idle";
}

TEST(SchedulerTest, TheOldestIsNeverPreempted) {
  SchedulerInput input = Roomy();
  input.available_blocks = 0;
  input.running = {Decoding(1, 70, 0), Decoding(2, 64, 0)};
  const Schedule schedule = ScheduleStep(input);
  EXPECT_THAT(schedule.preempted, ElementsAre(2)) << "the youngest gives way itself";
  EXPECT_THAT(Ids(schedule), ElementsAre(1));
}

TEST(SchedulerTest, AChunkShrinksToTheBlocksThatAreLeft) {
  SchedulerInput input = Roomy();
  input.available_blocks = 1;
  input.running = {Prompt(1, 0, 100)};
  const Schedule schedule = ScheduleStep(input);
  ASSERT_EQ(schedule.rows.size(), 1u);
  EXPECT_EQ(schedule.rows[0].tokens, 64);
}

TEST(SchedulerTest, AReplayIsCutByTheLogitRows) {
  SchedulerInput input = Roomy();
  input.max_logit_rows = 10;
  SchedulerSequence replay = Prompt(2, 0, 100);
  replay.logits_from = 49;
  input.running = {Decoding(1, 10), replay};
  const Schedule schedule = ScheduleStep(input);
  ASSERT_EQ(schedule.rows.size(), 2u);
  EXPECT_EQ(schedule.rows[1].tokens, 58);
  EXPECT_EQ(schedule.rows[1].num_logits, 9);
  EXPECT_FALSE(schedule.rows[1].sample);
}

TEST(SchedulerTest, TheInjectedPolicyChoosesChunksOfPromptsOnly) {
  SchedulerInput input = Roomy();
  input.running = {Decoding(1, 10), Prompt(2, 64, 200)};
  input.chunk_policy = [](int64_t position, int64_t remaining, int64_t budget) {
    EXPECT_EQ(position, 64);
    EXPECT_EQ(remaining, 136);
    EXPECT_EQ(budget, 127);
    return int64_t{3};
  };
  const Schedule schedule = ScheduleStep(input);
  ASSERT_EQ(schedule.rows.size(), 2u);
  EXPECT_EQ(schedule.rows[1].tokens, 3);
}

TEST(SchedulerTest, AForcedPreemptionWaitsUntilItsVictimIsIdle) {
  SchedulerInput input = Roomy();
  input.force_preemption = true;
  SchedulerSequence fresh = Decoding(2, 10, 0);
  fresh.progressed = false;
  input.running = {Decoding(1, 10, 1), fresh};
  Schedule schedule = ScheduleStep(input);
  EXPECT_FALSE(schedule.forced);
  EXPECT_THAT(Ids(schedule), ElementsAre(2)) << "1 is left out";
  input.running[0].steps_in_flight = 0;
  schedule = ScheduleStep(input);
  EXPECT_TRUE(schedule.forced);
  EXPECT_THAT(schedule.preempted, ElementsAre(1));
}

}  // namespace
}  // namespace lockstep
