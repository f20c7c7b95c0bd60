#include "worker/slot_table.h"

#include <functional>

#include "kernels/base/check.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;
using worker::v1::SequenceEntry;
using worker::v1::StepPlan;

BatchLimits Limits() {
  BatchLimits limits;
  limits.kv_blocks = 8;
  limits.slots = 3;
  limits.snapshots = 2;
  limits.max_tokens = 200;
  limits.max_sequences = 2;
  limits.max_logit_rows = 10;
  limits.max_sequence_blocks = 4;
  limits.vocab_size = 100;
  limits.stateful = true;
  return limits;
}

// An entry that begins a sequence with `tokens` tokens in the given blocks.
SequenceEntry Begin(int32_t slot, uint64_t generation, int tokens, std::vector<int32_t> blocks) {
  SequenceEntry e;
  e.set_slot(slot);
  e.set_generation(generation);
  for (int i = 0; i < tokens; ++i) e.add_token_ids(i % 100);
  for (int32_t b : blocks) e.add_new_blocks(b);
  e.mutable_begin()->set_restore_snapshot(-1);
  e.set_num_logits(1);
  e.set_sample(true);
  return e;
}

SequenceEntry Next(int32_t slot, uint64_t generation, int64_t position, uint64_t source) {
  SequenceEntry e;
  e.set_slot(slot);
  e.set_generation(generation);
  e.set_position(position);
  e.set_sampled_in_step(source);
  e.set_num_logits(1);
  e.set_sample(true);
  return e;
}

StepPlan Plan(std::vector<SequenceEntry> entries) {
  StepPlan plan;
  for (SequenceEntry& e : entries) *plan.add_sequences() = std::move(e);
  return plan;
}

// A table with slot 0, generation 1, at position 70, sampled in step 1; snapshot 0 holds
// position 64.
SlotTable Started() {
  SlotTable table(Limits());
  SequenceEntry e = Begin(0, 1, 70, {0, 1});
  e.add_snapshots()->set_position(64);
  CHECK_OK(table.Admit(1, Plan({e})).status());
  table.Samples(0, 1);
  return table;
}

TEST(SlotTable, ASequenceGoesOnWithItsSampledTokens) {
  SlotTable table = Started();
  ASSERT_OK_AND_ASSIGN(PlannedStep step, table.Admit(2, Plan({Next(0, 1, 70, 1)})));
  ASSERT_EQ(step.sequences.size(), 1u);
  EXPECT_TRUE(step.sequences[0].feedback);
  EXPECT_EQ(step.sequences[0].start, 70);
  EXPECT_EQ(step.num_tokens, 1);
}

TEST(SlotTable, ReleasedBlocksMayGoToOthersInTheSamePlan) {
  SlotTable table = Started();
  StepPlan plan = Plan({Begin(1, 1, 3, {0})});
  plan.add_released_slots(0);
  EXPECT_OK(table.Admit(2, plan).status());
  EXPECT_THAT(table.Admit(3, Plan({Next(0, 1, 70, 1)})),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("slot is free")));
}

TEST(SlotTable, ANewGenerationReplacesTheOldOwner) {
  SlotTable table = Started();
  ASSERT_OK(table.Admit(2, Plan({Begin(0, 2, 3, {0})})).status());
  EXPECT_EQ(table.blocks(0), std::vector<int32_t>{0});
}

TEST(SlotTable, ASlotMayBeReleasedByTheStepThatNamesItLast) {
  SlotTable table = Started();
  StepPlan plan = Plan({Next(0, 1, 70, 1)});
  plan.add_released_slots(0);
  ASSERT_OK(table.Admit(2, plan).status());
  EXPECT_OK(table.Admit(3, Plan({Begin(1, 1, 3, {1})})).status());
}

TEST(SlotTable, APrefixHitSharesBlocksAndRestoresASnapshot) {
  SlotTable table = Started();
  SequenceEntry e = Begin(1, 1, 5, {2});
  e.set_position(64);
  e.mutable_begin()->add_blocks(0);
  e.mutable_begin()->set_restore_snapshot(0);
  ASSERT_OK_AND_ASSIGN(PlannedStep step, table.Admit(2, Plan({e, Next(0, 1, 70, 1)})));
  EXPECT_EQ(step.sequences[0].restore_snapshot, 0);
  EXPECT_EQ(table.blocks(1), (std::vector<int32_t>{0, 2}));
}

struct BadPlan {
  const char* name;
  std::function<StepPlan()> plan;
  absl::StatusCode code;
  const char* message;
};

class BadPlanTest : public ::testing::TestWithParam<BadPlan> {};

TEST_P(BadPlanTest, IsRefusedWithItsNumbers) {
  SlotTable table = Started();
  EXPECT_THAT(table.Admit(2, GetParam().plan()),
              StatusIs(GetParam().code, HasSubstr(GetParam().message)));
}

template <typename Edit>
StepPlan Edited(SequenceEntry entry, Edit edit) {
  edit(&entry);
  return Plan({entry});
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kContradiction = absl::StatusCode::kFailedPrecondition;

const BadPlan kBadPlans[] = {
    {"slot_range", [] { return Plan({Begin(3, 1, 1, {2})}); }, kInvalid, "slot 3 does not exist"},
    {"slot_twice",
     [] {
       return Plan({Begin(1, 1, 1, {2}), Begin(1, 2, 1, {3})});
     },
     kInvalid, "slot 1 has two entries in step 2"},
    {"old_generation", [] { return Plan({Begin(0, 1, 1, {2})}); }, kContradiction,
     "has generation 1, the slot has seen 1"},
    {"wrong_generation", [] { return Plan({Next(0, 2, 70, 1)}); }, kContradiction,
     "generation 2 continues, but the slot belongs to generation 1"},
    {"free_slot", [] { return Plan({Next(1, 1, 0, 1)}); }, kContradiction, "the slot is free"},
    {"position", [] { return Plan({Next(0, 1, 71, 1)}); }, kContradiction,
     "position 71, but the next one is 70"},
    {"negative_position", [] { return Plan({Next(0, 1, -1, 1)}); }, kInvalid, "position -1"},
    {"token_source",
     [] { return Edited(Next(0, 1, 70, 1), [](SequenceEntry* e) { e->add_token_ids(1); }); },
     kInvalid, "either token_ids or sampled_in_step"},
    {"no_tokens", [] { return Plan({Next(0, 1, 70, 0)}); }, kInvalid, "has 0 ids and step 0"},
    {"sampled_step", [] { return Plan({Next(0, 1, 70, 2)}); }, kContradiction,
     "takes the token of step 2, but it was sampled last in step 1"},
    {"vocabulary",
     [] { return Edited(Begin(1, 1, 1, {2}), [](SequenceEntry* e) { e->set_token_ids(0, 100); }); },
     kInvalid, "slot 1: token_ids[0] is 100, outside the vocabulary of 100"},
    {"block_range", [] { return Plan({Begin(1, 1, 1, {8})}); }, kInvalid,
     "block 8 does not exist; there are 8"},
    {"block_of_another", [] { return Plan({Begin(1, 1, 1, {1})}); }, kContradiction,
     "writes block 1"},
    {"block_twice",
     [] {
       return Plan({Begin(1, 1, 70, {2, 2})});
     },
     kContradiction, "writes block 2"},
    {"too_few_blocks", [] { return Plan({Begin(1, 1, 65, {2})}); }, kContradiction,
     "positions up to 65 need 2 blocks, the slot has 1"},
    {"too_many_blocks",
     [] {
       return Plan({Begin(1, 1, 1, {2, 3, 4, 5, 6})});
     },
     kInvalid, "more than 4 blocks"},
    {"too_many_tokens",
     [] {
       return Plan({Begin(1, 1, 201, {2, 3, 4, 5})});
     },
     kInvalid, "the plan has 201 tokens, at most 200"},
    {"too_many_sequences",
     [] {
       return Plan({Begin(0, 2, 1, {0}), Begin(1, 1, 1, {2}), Begin(2, 1, 1, {3})});
     },
     kInvalid, "3 sequences, at most 2"},
    {"too_many_rows",
     [] { return Edited(Begin(1, 1, 20, {2}), [](SequenceEntry* e) { e->set_num_logits(11); }); },
     kInvalid, "11 rows of logits, at most 10"},
    {"logits_of_no_token",
     [] { return Edited(Begin(1, 1, 2, {2}), [](SequenceEntry* e) { e->set_num_logits(3); }); },
     kInvalid, "num_logits 3 with 2 tokens"},
    {"sample_without_logits",
     [] { return Edited(Begin(1, 1, 2, {2}), [](SequenceEntry* e) { e->set_num_logits(0); }); },
     kInvalid, "num_logits 0"},
    {"snapshot_off_grid",
     [] {
       return Edited(Begin(1, 1, 70, {2, 3}),
                     [](SequenceEntry* e) { e->add_snapshots()->set_position(63); });
     },
     kInvalid, "snapshot at position 63"},
    {"snapshot_ahead",
     [] {
       return Edited(Begin(1, 1, 70, {2, 3}),
                     [](SequenceEntry* e) { e->add_snapshots()->set_position(128); });
     },
     kInvalid, "in (0, 70]"},
    {"snapshot_range",
     [] {
       return Edited(Begin(1, 1, 70, {2, 3}), [](SequenceEntry* e) {
         e->add_snapshots()->set_position(64);
         e->mutable_snapshots(0)->set_snapshot_slot(2);
       });
     },
     kInvalid, "snapshot slot 2 does not exist"},
    {"restore_at_zero",
     [] {
       return Edited(Begin(1, 1, 1, {2}),
                     [](SequenceEntry* e) { e->mutable_begin()->set_restore_snapshot(0); });
     },
     kInvalid, "restore_snapshot 0 at position 0"},
    {"restore_wrong_position",
     [] {
       return Edited(Begin(1, 1, 1, {4}), [](SequenceEntry* e) {
         e->set_position(128);
         e->mutable_begin()->add_blocks(0);
         e->mutable_begin()->add_blocks(2);
         e->mutable_begin()->set_restore_snapshot(0);
       });
     },
     kContradiction, "snapshot 0 holds position 64, not 128"},
    {"state_without_snapshot",
     [] {
       return Edited(Begin(1, 1, 1, {4}), [](SequenceEntry* e) {
         e->set_position(64);
         e->mutable_begin()->add_blocks(0);
       });
     },
     kInvalid, "without a snapshot"},
    {"begin_off_grid",
     [] { return Edited(Begin(1, 1, 1, {4}), [](SequenceEntry* e) { e->set_position(60); }); },
     kInvalid, "cannot begin at position 60"},
    {"released_range",
     [] {
       StepPlan plan;
       plan.add_released_slots(9);
       return plan;
     },
     kInvalid, "released slot 9 does not exist"},
    {"sampling",
     [] {
       return Edited(Begin(1, 1, 1, {4}), [](SequenceEntry* e) {
         e->mutable_begin()->mutable_sampling()->set_repetition_penalty(1.0f);
       });
     },
     kInvalid, "top_p is 0"},
};

INSTANTIATE_TEST_SUITE_P(Plans, BadPlanTest, ::testing::ValuesIn(kBadPlans),
                         [](const auto& info) { return info.param.name; });

TEST(BatchLimits, RefuseWhatNoWorkerCanHold) {
  BatchLimits limits = Limits();
  EXPECT_OK(limits.Validate());
  limits.kv_blocks = 0;
  EXPECT_THAT(limits.Validate(), StatusIs(kInvalid, HasSubstr("kv_blocks is 0")));
  limits = Limits();
  limits.snapshots = -1;
  EXPECT_THAT(limits.Validate(), StatusIs(kInvalid, HasSubstr("snapshots is -1")));
  limits.snapshots = int64_t{1} << 60;
  EXPECT_THAT(limits.Validate(), StatusIs(kInvalid, HasSubstr("in [0, 2147483647]")));
}

}  // namespace
}  // namespace lockstep
