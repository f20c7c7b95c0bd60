#include "worker/batch_builder.h"

#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::testing::ElementsAre;

std::vector<int32_t> Values(const ConstTensorView& view) {
  const int32_t* data = static_cast<const int32_t*>(view.data);
  return std::vector<int32_t>(data, data + view.shape.num_elements());
}

TEST(BatchBuilder, PacksAPlanIntoOneUpload) {
  BatchLimits limits;
  limits.kv_blocks = 8;
  limits.slots = 4;
  limits.snapshots = 2;
  limits.max_tokens = 100;
  limits.max_sequences = 4;
  limits.max_logit_rows = 8;
  limits.max_sequence_blocks = 4;
  limits.vocab_size = 50;
  SlotTable slots(limits);
  Counters counters;
  ASSERT_OK_AND_ASSIGN(const auto stream, DeviceStream::Create(DeviceType::kCpu));
  ASSERT_OK_AND_ASSIGN(BatchBuilder builder, BatchBuilder::Create(DeviceType::kCpu, limits));

  worker::v1::StepPlan first;
  auto* a = first.add_sequences();
  a->set_slot(2);
  a->set_generation(1);
  a->mutable_begin()->set_restore_snapshot(-1);
  for (int i = 0; i < 66; ++i) a->add_token_ids(i % 50);
  a->add_new_blocks(5);
  a->add_new_blocks(3);
  a->set_num_logits(2);
  a->set_sample(true);
  a->add_snapshots()->set_position(64);
  a->mutable_snapshots(0)->set_snapshot_slot(1);
  ASSERT_OK_AND_ASSIGN(PlannedStep step, slots.Admit(1, first));
  ASSERT_OK_AND_ASSIGN(ForwardBatch batch,
                       builder.Build(stream.get(), first, step, slots, 0, &counters));
  EXPECT_EQ(batch.num_tokens, 66);
  EXPECT_THAT(Values(batch.row_offsets), ElementsAre(0, 66));
  EXPECT_THAT(Values(batch.block_table), ElementsAre(5, 3));
  EXPECT_THAT(Values(batch.logit_rows), ElementsAre(64, 65));
  EXPECT_THAT(Values(batch.snapshot_sequence), ElementsAre(0));
  EXPECT_THAT(Values(batch.snapshot_position), ElementsAre(64));
  EXPECT_THAT(Values(batch.snapshot_slot), ElementsAre(1));
  slots.Samples(2, 1);

  worker::v1::StepPlan second;
  auto* b = second.add_sequences();
  b->set_slot(0);
  b->set_generation(1);
  b->mutable_begin()->set_restore_snapshot(-1);
  for (int id : {7, 8, 9}) b->add_token_ids(id);
  b->add_new_blocks(0);
  auto* c = second.add_sequences();
  c->set_slot(2);
  c->set_generation(1);
  c->set_position(66);
  c->set_sampled_in_step(1);
  c->set_num_logits(1);
  c->set_sample(true);
  ASSERT_OK_AND_ASSIGN(step, slots.Admit(2, second));
  const int64_t before = counters.Get(Traffic::kPlanToDevice);
  ASSERT_OK_AND_ASSIGN(batch, builder.Build(stream.get(), second, step, slots, 1, &counters));
  EXPECT_EQ(batch.num_sequences, 2);
  EXPECT_THAT(Values(batch.tokens), ElementsAre(7, 8, 9, -1));
  EXPECT_THAT(Values(batch.positions), ElementsAre(0, 1, 2, 66));
  EXPECT_THAT(Values(batch.row_offsets), ElementsAre(0, 3, 4));
  EXPECT_THAT(Values(batch.slots), ElementsAre(0, 2));
  EXPECT_THAT(Values(batch.start_positions), ElementsAre(0, 66));
  EXPECT_THAT(Values(batch.block_table), ElementsAre(0, -1, 5, 3));
  EXPECT_THAT(Values(batch.logit_rows), ElementsAre(3));
  EXPECT_EQ(batch.num_snapshots, 0);
  EXPECT_EQ(counters.Get(Traffic::kPlanToDevice) - before, 4 * (4 + 4 + 3 + 2 + 2 + 4 + 1));
}

TEST(BatchBuilder, ASlotReleasedByItsLastStepStillHasItsBlocks) {
  BatchLimits limits;
  limits.kv_blocks = 4;
  limits.slots = 1;
  limits.max_tokens = 4;
  limits.max_sequences = 1;
  limits.max_logit_rows = 1;
  limits.max_sequence_blocks = 2;
  limits.vocab_size = 50;
  SlotTable slots(limits);
  Counters counters;
  ASSERT_OK_AND_ASSIGN(const auto stream, DeviceStream::Create(DeviceType::kCpu));
  ASSERT_OK_AND_ASSIGN(BatchBuilder builder, BatchBuilder::Create(DeviceType::kCpu, limits));
  for (uint64_t generation : {1, 2}) {  // the second owner gets the same block
    worker::v1::StepPlan plan;
    auto* entry = plan.add_sequences();
    entry->set_generation(generation);
    entry->mutable_begin()->set_restore_snapshot(-1);
    entry->add_token_ids(7);
    entry->add_new_blocks(3);
    ASSERT_OK(slots.Admit(2 * generation, plan).status());
    plan.Clear();
    entry = plan.add_sequences();
    entry->set_generation(generation);
    entry->set_position(1);
    entry->add_token_ids(8);
    plan.add_released_slots(0);
    ASSERT_OK_AND_ASSIGN(const PlannedStep step, slots.Admit(2 * generation + 1, plan));
    ASSERT_OK_AND_ASSIGN(const ForwardBatch batch,
                         builder.Build(stream.get(), plan, step, slots, 0, &counters));
    EXPECT_THAT(Values(batch.block_table), ElementsAre(3));
  }
}

TEST(BatchBuilder, LargestHasShapesOnly) {
  BatchLimits limits;
  limits.max_tokens = 128;
  limits.max_sequences = 3;
  limits.max_logit_rows = 5;
  limits.max_sequence_blocks = 7;
  const ForwardBatch batch = BatchBuilder::Largest(DeviceType::kCpu, limits);
  EXPECT_EQ(batch.tokens.data, nullptr);
  EXPECT_EQ(batch.tokens.shape, (Shape{128}));
  EXPECT_EQ(batch.block_table.shape, (Shape{3, 7}));
  EXPECT_EQ(batch.logit_rows.shape, (Shape{5}));
  EXPECT_EQ(batch.snapshot_slot.shape, (Shape{2 + 3}));
}

}  // namespace
}  // namespace lockstep
