#include "worker/step_executor.h"

#include <functional>
#include <future>

#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/comm/fake_comm_group.h"
#include "kernels/comm/solo_comm_group.h"
#include "worker/fake_model.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using worker::v1::SequenceEntry;
using worker::v1::StepPlan;
using worker::v1::StepRequest;
using worker::v1::StepResult;

BatchLimits Limits() {
  BatchLimits limits;
  limits.kv_blocks = 32;
  limits.slots = 4;
  limits.snapshots = 2;
  limits.max_tokens = 256;
  limits.max_sequences = 4;
  limits.max_logit_rows = 200;
  limits.max_sequence_blocks = 8;
  return limits;
}

constexpr uint64_t kEpoch = 9;

// Numbers plans into requests, as a coordinator does.
class Coordinator {
 public:
  StepRequest Number(const StepPlan& plan) {
    StepRequest request;
    request.set_epoch(kEpoch);
    request.set_step_id(++step_);
    request.set_plan(plan.SerializeAsString());
    digest_ = Fold64(digest_, HashBytes(request.plan()));
    request.set_batch_digest(digest_);
    return request;
  }

 private:
  uint64_t step_ = 0;
  uint64_t digest_ = 0;
};

// The executors of a group, with a fake model each.
class Cluster {
 public:
  explicit Cluster(int world, FakeModelOptions options = {}, BatchLimits limits = Limits()) {
    std::vector<std::unique_ptr<CommGroup>> comms = MakeFakeCommGroups(world, kEpoch);
    for (int r = 0; r < world; ++r) {
      counters_.push_back(std::make_unique<Counters>());
      ranks_.push_back(std::make_unique<StepExecutor>(DeviceType::kCpu, counters_.back().get()));
      options.rank = r;
      options.world = world;
      ranks_.back()->SetModel(std::make_unique<FakeModel>(options), 1);
      ranks_.back()->SetComm(std::move(comms[static_cast<size_t>(r)]));
      CHECK_OK(ranks_.back()->Configure(limits).status());
    }
  }

  std::future<absl::StatusOr<StepResult>> Submit(int rank, const StepRequest& request) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<StepResult>>>();
    ranks_[static_cast<size_t>(rank)]->Submit(
        request, [promise](absl::StatusOr<StepResult> r) { promise->set_value(std::move(r)); });
    return promise->get_future();
  }

  // Rank 0's result; all ranks must agree on the digests.
  absl::StatusOr<StepResult> Run(const StepRequest& request) {
    std::vector<std::future<absl::StatusOr<StepResult>>> futures;
    for (size_t r = 0; r < ranks_.size(); ++r)
      futures.push_back(Submit(static_cast<int>(r), request));
    std::vector<absl::StatusOr<StepResult>> results;
    for (auto& f : futures) results.push_back(f.get());
    for (auto& result : results) {
      if (!result.ok()) return result;
      EXPECT_EQ(result->result_digest(), results[0]->result_digest());
      EXPECT_EQ(result->batch_digest(), request.batch_digest());
    }
    for (size_t r = 1; r < results.size(); ++r) EXPECT_EQ(results[r]->sequences_size(), 0);
    return results[0];
  }
  absl::StatusOr<StepResult> Run(const StepPlan& plan) { return Run(coordinator.Number(plan)); }

  StepExecutor& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }
  Counters& counters(int r) { return *counters_[static_cast<size_t>(r)]; }
  Coordinator coordinator;

 private:
  std::vector<std::unique_ptr<Counters>> counters_;
  std::vector<std::unique_ptr<StepExecutor>> ranks_;
};

std::vector<int32_t> Prompt(int n, int seed) {
  std::vector<int32_t> ids = {};
  for (int i = 0; i < n; ++i)
    ids.push_back(static_cast<int32_t>(Mix64(static_cast<uint64_t>(seed * 1000 + i)) % 300));
  return ids;
}

// Feeds a sequence in chunks and then decodes; collects sampled ids and all digests of logits.
struct Sequence {
  int32_t slot;
  uint64_t generation;
  std::vector<int32_t> prompt;
  int32_t next_block;
  int64_t position = 0;
  uint64_t last_step = 0;
  std::vector<int32_t> ids = {};
  std::vector<uint64_t> digests = {};

  SequenceEntry Chunk(int64_t n) {
    SequenceEntry e;
    e.set_slot(slot);
    e.set_generation(generation);
    e.set_position(position);
    if (position == 0) {
      e.mutable_begin()->set_restore_snapshot(-1);
      e.mutable_begin()->mutable_prompt_ids()->Add(prompt.begin(), prompt.end());
    }
    const int64_t size = static_cast<int64_t>(prompt.size());
    if (position >= size) {
      e.set_sampled_in_step(last_step);
      n = 1;
    } else {
      n = std::min(n, size - position);
      for (int64_t i = 0; i < n; ++i) e.add_token_ids(prompt[static_cast<size_t>(position + i)]);
    }
    for (int64_t p = (position + 63) / 64; p * 64 < position + n; ++p)
      e.add_new_blocks(next_block++);
    position += n;
    e.set_num_logits(static_cast<int32_t>(n));
    e.set_sample(position >= size);
    return e;
  }
  void Take(const StepResult& result, int index) {
    last_step = result.step_id();
    const auto& r = result.sequences(index);
    EXPECT_EQ(r.slot(), slot);
    EXPECT_EQ(r.generation(), generation);
    if (r.sampled_id() >= 0) ids.push_back(r.sampled_id());
    for (uint64_t d : r.digests()) digests.push_back(d);
  }
};

Sequence Decode(Cluster* cluster, Sequence sequence, int64_t chunk, int steps) {
  while (static_cast<int>(sequence.ids.size()) < steps) {
    StepPlan plan;
    *plan.add_sequences() = sequence.Chunk(chunk);
    auto result = cluster->Run(plan);
    CHECK_OK(result.status());
    sequence.Take(*result, 0);
  }
  return sequence;
}

TEST(StepExecutor, RanksChunksAndBatchesGiveTheSameDigests) {
  Cluster alone(1);
  const Sequence expected = Decode(&alone, {0, 1, Prompt(150, 1), 0}, 150, 20);
  EXPECT_EQ(expected.digests.size(), 150u + 19u);
  for (int world : {1, 2, 4}) {
    for (int64_t chunk : {1, 7, 64, 100}) {
      Cluster cluster(world);
      const Sequence found = Decode(&cluster, {2, 5, Prompt(150, 1), 11}, chunk, 20);
      EXPECT_EQ(found.ids, expected.ids) << world << " ranks, chunks of " << chunk;
      EXPECT_EQ(found.digests, expected.digests) << world << " ranks, chunks of " << chunk;
    }
  }
  Cluster batched(2);
  Sequence a = {0, 1, Prompt(150, 1), 0}, b = {3, 1, Prompt(33, 2), 20};
  while (a.ids.size() < 20) {
    StepPlan plan;
    *plan.add_sequences() = b.Chunk(5);
    *plan.add_sequences() = a.Chunk(13);
    ASSERT_OK_AND_ASSIGN(StepResult result, batched.Run(plan));
    b.Take(result, 0);
    a.Take(result, 1);
  }
  EXPECT_EQ(a.digests, expected.digests);
}

TEST(StepExecutor, ASnapshotRestoresAPrefix) {
  Cluster cluster(2);
  const std::vector<int32_t> prompt = Prompt(100, 3);
  Sequence first = {0, 1, prompt, 0};
  StepPlan plan;
  *plan.add_sequences() = first.Chunk(100);
  plan.mutable_sequences(0)->add_snapshots()->set_position(64);
  plan.mutable_sequences(0)->mutable_snapshots(0)->set_snapshot_slot(1);
  ASSERT_OK_AND_ASSIGN(StepResult whole, cluster.Run(plan));

  StepPlan hit;
  SequenceEntry* e = hit.add_sequences();
  e->set_slot(1);
  e->set_generation(1);
  e->set_position(64);
  e->mutable_begin()->add_blocks(0);
  e->mutable_begin()->set_restore_snapshot(1);
  for (size_t i = 64; i < 100; ++i) e->add_token_ids(prompt[i]);
  e->add_new_blocks(9);
  e->set_num_logits(36);
  e->set_sample(true);
  ASSERT_OK_AND_ASSIGN(StepResult tail, cluster.Run(hit));
  EXPECT_EQ(tail.sequences(0).sampled_id(), whole.sequences(0).sampled_id());
  for (int i = 0; i < 36; ++i) {
    EXPECT_EQ(tail.sequences(0).digests(i), whole.sequences(0).digests(64 + i)) << i;
  }
}

TEST(StepExecutor, AReusedSlotStartsFromZero) {
  Cluster cluster(1);
  Decode(&cluster, {0, 1, Prompt(130, 4), 0}, 130, 3);
  const Sequence again = Decode(&cluster, {0, 2, Prompt(70, 5), 0}, 70, 3);
  Cluster fresh(1);
  EXPECT_EQ(again.digests, Decode(&fresh, {0, 1, Prompt(70, 5), 0}, 70, 3).digests);
}

TEST(StepExecutor, TwoStepsMayBeQueuedBehindEachOther) {
  Cluster cluster(2);
  Sequence s = {0, 1, Prompt(10, 6), 0};
  StepPlan first, second;
  *first.add_sequences() = s.Chunk(10);
  s.last_step = 1;  // not answered yet
  *second.add_sequences() = s.Chunk(1);
  std::vector<std::future<absl::StatusOr<StepResult>>> futures;
  const StepRequest a = cluster.coordinator.Number(first), b = cluster.coordinator.Number(second);
  for (int r : {0, 1}) {
    futures.push_back(cluster.Submit(r, a));
    futures.push_back(cluster.Submit(r, b));
  }
  for (auto& f : futures) EXPECT_OK(f.get().status());
}

TEST(StepExecutor, AWrongStepIsRefusedAndNothingRuns) {
  struct Case {
    const char* name;
    std::function<void(StepRequest*)> edit;
    absl::StatusCode code;
    const char* message;
  };
  const Case cases[] = {
      {"step", [](StepRequest* r) { r->set_step_id(3); }, absl::StatusCode::kFailedPrecondition,
       "step 3 of epoch 9 was sent, step 1 was expected"},
      {"old epoch", [](StepRequest* r) { r->set_epoch(8); }, absl::StatusCode::kFailedPrecondition,
       "STALE_EPOCH: step 1 is of epoch 8, this rank is in epoch 9"},
      {"new epoch", [](StepRequest* r) { r->set_epoch(10); }, absl::StatusCode::kFailedPrecondition,
       "step 1 is of epoch 10"},
      {"digest", [](StepRequest* r) { r->set_batch_digest(1); },
       absl::StatusCode::kFailedPrecondition, "batch digest 1 was sent"},
      {"plan",
       [](StepRequest* r) {
         r->set_plan("\xff\xff");
         r->set_batch_digest(Fold64(0, HashBytes(r->plan())));
       },
       absl::StatusCode::kInvalidArgument, "2 bytes are no StepPlan"},
      {"slot",
       [](StepRequest* r) {
         StepPlan plan;
         plan.add_sequences()->set_slot(99);
         r->set_plan(plan.SerializeAsString());
         r->set_batch_digest(Fold64(0, HashBytes(r->plan())));
       },
       absl::StatusCode::kInvalidArgument, "step 1 refused: slot 99 does not exist"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    int forwards = 0;
    FakeModelOptions options;
    options.on_forward = [&] { ++forwards; };
    Cluster cluster(1, options);
    StepPlan plan;
    Sequence s = {0, 1, Prompt(10, 6), 0};
    *plan.add_sequences() = s.Chunk(10);
    StepRequest request = cluster.coordinator.Number(plan);
    const StepRequest good = request;
    c.edit(&request);
    EXPECT_THAT(cluster.Run(request), StatusIs(c.code, HasSubstr(c.message)));
    EXPECT_EQ(forwards, 0);
    EXPECT_EQ(cluster.rank(0).stats().refused_steps, 1u);
    EXPECT_EQ(cluster.counters(0).Get(Traffic::kPlanToDevice), 0);
    // The epoch is over, even for the right step.
    EXPECT_THAT(cluster.Run(good), StatusIs(c.code, HasSubstr(c.message)));
  }
}

TEST(StepExecutor, ARankThatRefusesEndsItsPeers) {
  Cluster cluster(2);
  Sequence s = {0, 1, Prompt(10, 6), 0};
  StepPlan plan;
  *plan.add_sequences() = s.Chunk(10);
  StepRequest request = cluster.coordinator.Number(plan);
  auto waiting = cluster.Submit(0, request);
  request.set_step_id(7);
  auto refused = cluster.Submit(1, request);
  EXPECT_THAT(refused.get(), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(waiting.get(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("step 1 was expected")));
}

TEST(StepExecutor, ARowWithNanIsFlaggedAndOthersAreNot) {
  FakeModelOptions options;
  options.nan_token = 299;
  Cluster cluster(2, options);
  Sequence good = {0, 1, {1, 2, 3}, 0}, bad = {1, 1, {4, 299}, 8};
  StepPlan plan;
  *plan.add_sequences() = bad.Chunk(2);
  *plan.add_sequences() = good.Chunk(3);
  ASSERT_OK_AND_ASSIGN(StepResult result, cluster.Run(plan));
  EXPECT_TRUE(result.sequences(0).nan());
  EXPECT_EQ(result.sequences(0).sampled_id(), -1);
  EXPECT_FALSE(result.sequences(1).nan());
  EXPECT_GE(result.sequences(1).sampled_id(), 0);
}

TEST(StepExecutor, ReturnsRowsOfLogitsInVocabularyOrder) {
  Cluster one(1), two(2);
  std::string rows[2];
  int i = 0;
  for (Cluster* cluster : {&one, &two}) {
    Sequence s = {0, 1, Prompt(5, 7), 0};
    StepPlan plan;
    *plan.add_sequences() = s.Chunk(5);
    plan.mutable_sequences(0)->set_return_logits(true);
    ASSERT_OK_AND_ASSIGN(StepResult result, cluster->Run(plan));
    rows[i++] = result.sequences(0).logits();
    EXPECT_EQ(rows[0].size(), 5u * 300u * 4u);
    EXPECT_EQ(cluster->counters(0).Get(Traffic::kLogitsToHost), 5 * 300 * 4);
  }
  EXPECT_EQ(rows[0], rows[1]);
}

TEST(StepExecutor, APlanOfReleasesRunsNothing) {
  Cluster cluster(2);
  StepPlan plan;
  plan.add_released_slots(1);
  ASSERT_OK_AND_ASSIGN(StepResult result, cluster.Run(plan));
  EXPECT_EQ(result.sequences_size(), 0);
}

TEST(StepExecutor, CountsIdleWaitsOfAnOpenStream) {
  Cluster cluster(1);
  cluster.rank(0).OpenStream();
  Sequence s = {0, 1, Prompt(5, 8), 0};
  for (int step = 0; step < 4; ++step) {
    StepPlan plan;
    *plan.add_sequences() = s.Chunk(5);
    ASSERT_OK_AND_ASSIGN(StepResult result, cluster.Run(plan));
    s.Take(result, 0);
    ASSERT_TRUE(cluster.rank(0).WaitUntilIdle(absl::Now() + absl::Seconds(5)));
  }
  const StepExecutor::Stats stats = cluster.rank(0).stats();
  EXPECT_EQ(stats.steps, 4u);
  EXPECT_EQ(stats.last_step, 4u);
  EXPECT_EQ(stats.idle_waits, 4);
  EXPECT_GT(stats.step_micros, 0);
  EXPECT_FALSE(stats.running);
}

TEST(StepExecutor, EndEpochDropsWhatIsQueued) {
  std::promise<void> entered, release;
  FakeModelOptions options;
  options.on_forward = [&] {
    entered.set_value();
    release.get_future().wait();
  };
  Cluster cluster(1, options);
  Sequence s = {0, 1, Prompt(5, 8), 0};
  StepPlan first, second;
  *first.add_sequences() = s.Chunk(5);
  s.last_step = 1;
  *second.add_sequences() = s.Chunk(1);
  auto running = cluster.Submit(0, cluster.coordinator.Number(first));
  auto queued = cluster.Submit(0, cluster.coordinator.Number(second));
  entered.get_future().wait();
  EXPECT_TRUE(cluster.rank(0).stats().running);
  EXPECT_FALSE(cluster.rank(0).WaitUntilIdle(absl::Now() + absl::Milliseconds(10)));
  cluster.rank(0).EndEpoch(absl::CancelledError("over"));
  EXPECT_THAT(queued.get(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("over")));
  release.set_value();
  EXPECT_OK(running.get().status());
}

TEST(StepExecutor, ConfigureSaysWhatItCannotDo) {
  Counters counters;
  StepExecutor executor(DeviceType::kCpu, &counters);
  EXPECT_THAT(executor.Configure(Limits()), StatusIs(absl::StatusCode::kFailedPrecondition));
  executor.SetModel(std::make_unique<FakeModel>(FakeModelOptions()), 1);
  executor.SetComm(std::make_shared<SoloCommGroup>(1));
  BatchLimits bad = Limits();
  bad.slots = 0;
  EXPECT_THAT(executor.Configure(bad),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("slots is 0")));
  ASSERT_OK_AND_ASSIGN(StepExecutor::Sizes sizes, executor.Configure(Limits()));
  EXPECT_EQ(sizes.cache_bytes, 32 * 64 * 4 * 2 + 4 * (8 + 16) + 2 * 8);
  EXPECT_GE(sizes.workspace_bytes, 200 * 300 * 4);
  // The same limits again: the memory stays.
  ASSERT_OK_AND_ASSIGN(StepExecutor::Sizes again, executor.Configure(Limits()));
  EXPECT_EQ(again.workspace_bytes, sizes.workspace_bytes);
}

}  // namespace
}  // namespace lockstep
