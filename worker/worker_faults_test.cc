// What a worker does when its coordinator or its device goes away, and that nothing of an epoch
// reaches the next one.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "kernels/base/testing/matchers.h"
#include "worker/expiry_timer.h"
#include "worker/worker.h"
#include "worker/worker_test_util.h"

namespace lockstep {
namespace worker_test {
namespace {

using ::testing::HasSubstr;

grpc::Status Beat(Server* server, uint64_t term, int64_t lease_ms,
                  pb::HealthResponse* response = nullptr) {
  pb::HealthRequest request;
  request.set_term(term);
  request.set_epoch(1);
  request.set_lease_ms(lease_ms);
  pb::HealthResponse ignored;
  return server->Call(&Stub::Health, request, response != nullptr ? response : &ignored);
}

void WaitFor(Server* server, pb::WorkerState state) {
  while (server->Health().state() != state) std::this_thread::yield();
}

pb::PrepareCommRequest Prepare(uint64_t term, uint64_t epoch) {
  pb::PrepareCommRequest request;
  request.set_term(term);
  request.set_epoch(epoch);
  return request;
}

// The digest of a first step of `epoch` on a group of one.
uint64_t FirstStep(Group* group, uint64_t epoch, const pb::StepPlan& plan = Begin()) {
  grpc::ClientContext context;
  auto stream = group->at(0).stub->StepStream(&context);
  EXPECT_TRUE(stream->Write(Step(epoch, 1, 0, plan)));
  pb::StepResult result;
  EXPECT_TRUE(stream->Read(&result)) << stream->Finish().error_message();
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&result));
  EXPECT_TRUE(stream->Finish().ok());
  return result.result_digest();
}

TEST(WorkerFaults, BeatsAreFencedByTerm) {
  Server server;
  pb::HealthResponse response;
  ASSERT_TRUE(Beat(&server, 7, 60000, &response).ok());
  EXPECT_EQ(response.identity().term(), 7u);
  const grpc::Status stale = Beat(&server, 6, 60000);
  EXPECT_REFUSED(stale, "term 6 was sent, term 7 was seen");
  EXPECT_EQ(ReasonOf(stale), "STALE_TERM");
  EXPECT_TRUE(Beat(&server, 9, 0, &response).ok());
  EXPECT_EQ(response.identity().term(), 9u);
  EXPECT_EQ(server.Health().identity().term(), 9u) << "a probe has no term";
  EXPECT_EQ(response.identity().epoch(), 0u) << "only PrepareComm begins an epoch";
  EXPECT_EQ(Beat(&server, 9, -1).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(WorkerFaults, AnExpiredLeaseEndsTheGroupAndKeepsTheWeights) {
  Group group(2);
  group.Join(1);
  grpc::ClientContext context;
  auto stream = group.at(0).stub->StepStream(&context);
  ASSERT_TRUE(stream->Write(Step(1, 1, 0, Begin())));  // waits in a collective for rank 1
  WaitFor(&group.at(0), pb::BUSY);
  ASSERT_TRUE(Beat(&group.at(0), 1, 1).ok());
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the lease expired: no beat of term 1, epoch 1"));
  WaitFor(&group.at(0), pb::LOADED);
  EXPECT_THAT(group.at(0).Health().error(), HasSubstr("the lease expired"));
  // Nothing of the old group leads on.
  pb::ConfigureResponse configured;
  EXPECT_REFUSED(group.at(0).Call(&Stub::Configure, Limits(1), &configured), "in state LOADED");
  grpc::ClientContext second;
  EXPECT_REFUSED(group.at(0).stub->StepStream(&second)->Finish(), "in state LOADED");
  EXPECT_EQ(group.at(0).loader.loads, 1);
  group.Join(2);
  EXPECT_EQ(group.at(0).loader.loads, 1) << "the weights stayed";
  EXPECT_EQ(group.at(0).Health().state(), pb::READY) << "the lease of the past is over";
}

TEST(WorkerFaults, AnExpiredLeaseEndsAnInitCommThatWaits) {
  Group group(2);
  pb::PrepareCommResponse prepared[2];
  pb::InitCommRequest init;
  init.set_term(1);
  init.set_epoch(1);
  init.set_timeout_ms(600000);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(group.at(r).Call(&Stub::PrepareComm, Prepare(1, 1), &prepared[r]).ok());
    init.add_addresses(prepared[r].address());
  }
  pb::InitCommResponse joined;
  grpc::Status status;
  std::thread waiting([&] { status = group.at(0).Call(&Stub::InitComm, init, &joined); });
  ASSERT_TRUE(Beat(&group.at(0), 1, 1).ok());
  waiting.join();
  EXPECT_FALSE(status.ok());
  WaitFor(&group.at(0), pb::LOADED);
}

TEST(WorkerFaults, BeatsKeepTheGroup) {
  Group group(1);
  group.Join(1);
  // Each would expire before the last of them without the next.
  std::promise<void> later;
  ExpiryTimer timer([&] { later.set_value(); });
  ASSERT_TRUE(Beat(&group.at(0), 1, 300).ok());
  ASSERT_TRUE(Beat(&group.at(0), 1, 60000).ok());
  timer.Arm(absl::Milliseconds(500));
  later.get_future().wait();
  EXPECT_EQ(group.at(0).Health().state(), pb::READY);
  EXPECT_NE(FirstStep(&group, 1), 0u);
}

TEST(WorkerFaults, AnOrphanSaysSoOnceNobodyWasHeardOf) {
  std::promise<void> orphaned;
  WorkerOptions options;
  options.orphan_timeout = absl::Milliseconds(400);
  options.on_orphan = [&] { orphaned.set_value(); };
  Server server(options);
  const auto start = ExpiryTimer::Clock::now();
  ASSERT_TRUE(Beat(&server, 2, 0).ok());
  // Neither probes nor a coordinator of the past count.
  auto future = orphaned.get_future();
  while (future.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    server.Health();
    EXPECT_FALSE(Beat(&server, 1, 60000).ok());
  }
  EXPECT_GE(ExpiryTimer::Clock::now() - start, std::chrono::milliseconds(400));
}

TEST(WorkerFaults, ALostDeviceNeedsANewProcess) {
  std::atomic<bool> lost{false};
  WorkerOptions options;
  options.check_device = [&] {
    return lost ? absl::InternalError("an illegal memory access") : absl::OkStatus();
  };
  Server server(options);
  server.loader.forward = [&] {
    return lost ? absl::InternalError("launch failed") : absl::OkStatus();
  };
  ASSERT_TRUE(server.Load(LoadRequest(0, 1)).ok());
  pb::PrepareCommResponse prepared;
  ASSERT_TRUE(server.Call(&Stub::PrepareComm, Prepare(1, 1), &prepared).ok());
  pb::InitCommRequest init;
  init.set_term(1);
  init.set_epoch(1);
  init.add_addresses(prepared.address());
  pb::InitCommResponse joined;
  ASSERT_TRUE(server.Call(&Stub::InitComm, init, &joined).ok());
  pb::ConfigureResponse configured;
  ASSERT_TRUE(server.Call(&Stub::Configure, Limits(1), &configured).ok());

  grpc::ClientContext refused;
  auto stream = server.stub->StepStream(&refused);
  ASSERT_TRUE(stream->Write(Step(1, 2, 0, Begin())));  // a failure that is not the device's
  EXPECT_REFUSED(stream->Finish(), "step 1 was expected");
  EXPECT_FALSE(server.Health().device_lost());
  ASSERT_TRUE(server.Call(&Stub::PrepareComm, Prepare(1, 2), &prepared).ok());
  init.set_epoch(2);
  ASSERT_TRUE(server.Call(&Stub::InitComm, init, &joined).ok());
  ASSERT_TRUE(server.Call(&Stub::Configure, Limits(2), &configured).ok());

  lost = true;
  grpc::ClientContext context;
  stream = server.stub->StepStream(&context);
  ASSERT_TRUE(stream->Write(Step(2, 1, 0, Begin())));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(server.Health().device_lost());
  lost = false;  // what the device says later does not count
  for (int i = 0; i < 2; ++i) {
    const grpc::Status status = i == 0 ? server.Load(LoadRequest(0, 1))
                                       : server.Call(&Stub::PrepareComm, Prepare(1, 3), &prepared);
    EXPECT_REFUSED(status, "restart the process");
    EXPECT_EQ(ReasonOf(status), "DEVICE_LOST");
  }
  EXPECT_TRUE(server.Health().device_lost());
}

TEST(WorkerFaults, ADeviceLostWhileLoadingIsNoticed) {
  WorkerOptions options;
  options.check_device = [] { return absl::InternalError("an illegal memory access"); };
  Server server(options);
  server.loader.fail = absl::InternalError("copying to the device failed");
  EXPECT_EQ(server.Load(LoadRequest(0, 1)).error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(server.Health().device_lost());
  EXPECT_EQ(ReasonOf(server.Load(LoadRequest(0, 1))), "DEVICE_LOST");
}

TEST(WorkerFaults, NothingOfAnEpochReachesTheNextAndNothingLeaks) {
  Group group(1);
  group.Join(1);
  const uint64_t expected = FirstStep(&group, 1);
  const auto rss = [&] {
    pb::GetStatsResponse stats;
    EXPECT_TRUE(group.at(0).Call(&Stub::GetStats, pb::GetStatsRequest(), &stats).ok());
    return stats.rss_bytes();
  };
  int64_t before = 0;
  for (uint64_t epoch = 2; epoch <= 52; ++epoch) {
    group.Join(epoch, 4096 + static_cast<int64_t>(epoch / 4));  // caches are kept, or made anew
    grpc::ClientContext context;
    auto stream = group.at(0).stub->StepStream(&context);
    // The same slot, blocks, generation and step numbers as the epoch before, which was cut off.
    const pb::StepRequest request = Step(epoch, 1, 0, Begin());
    ASSERT_TRUE(stream->Write(request));
    pb::StepResult result;
    ASSERT_TRUE(stream->Read(&result)) << stream->Finish().error_message();
    EXPECT_EQ(result.result_digest(), expected) << "epoch " << epoch;
    EXPECT_EQ(result.step_id(), 1u);
    pb::StepPlan next;
    pb::SequenceEntry* e = next.add_sequences();
    e->set_generation(1);
    e->set_position(3);
    e->set_sampled_in_step(1);
    e->set_num_logits(1);
    e->set_sample(true);
    ASSERT_TRUE(stream->Write(Step(epoch, 2, request.batch_digest(), next)));
    if (epoch % 2 == 0) {
      ASSERT_TRUE(stream->Read(&result));
    }
    context.TryCancel();
    stream->Finish();
    if (epoch == 12) before = rss();
  }
  // A sanitizer keeps freed memory, and finds leaks itself.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(rss() - before, 8 << 20);
#else
  EXPECT_GT(before, 0);
#endif
}

// The calls that must never wait, each answered while `server` does something else.
void ExpectAnswers(Server* server, uint64_t epoch, bool aborts) {
  pb::HealthResponse health;
  EXPECT_TRUE(Beat(server, 1, 60000, &health).ok());
  pb::GetInfoResponse info;
  EXPECT_TRUE(server->Call(&Stub::GetInfo, pb::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.state(), health.state());
  pb::AbortCommRequest abort;
  abort.set_term(1);
  abort.set_epoch(epoch);
  abort.set_reason("a test");
  pb::AbortCommResponse aborted;
  EXPECT_TRUE(server->Call(&Stub::AbortComm, abort, &aborted).ok());
  EXPECT_EQ(aborted.aborted(), aborts);
}

TEST(WorkerFaults, ALoadGoesOnWhateverIsAborted) {
  Server server;
  std::promise<void> release;
  server.loader.hold = release.get_future().share();
  grpc::Status loaded;
  std::thread loading([&] { loaded = server.Load(LoadRequest(0, 1)); });
  WaitFor(&server, pb::LOADING);
  ExpectAnswers(&server, 5, /*aborts=*/false);
  EXPECT_EQ(server.Health().state(), pb::LOADING);
  release.set_value();
  loading.join();
  EXPECT_TRUE(loaded.ok()) << loaded.error_message();
  EXPECT_EQ(server.Health().state(), pb::LOADED);
  EXPECT_EQ(server.loader.loads, 1);
}

TEST(WorkerFaults, CallsAreAnsweredWhileInitCommWaitsAndWhileAStepRuns) {
  Group group(2);
  pb::PrepareCommResponse prepared;
  pb::InitCommRequest init;
  init.set_term(1);
  init.set_epoch(1);
  init.set_timeout_ms(600000);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(group.at(r).Call(&Stub::PrepareComm, Prepare(1, 1), &prepared).ok());
    init.add_addresses(prepared.address());
  }
  grpc::Status status;
  std::thread waiting([&] {
    pb::InitCommResponse joined;
    status = group.at(0).Call(&Stub::InitComm, init, &joined);
  });
  ExpectAnswers(&group.at(0), 1, /*aborts=*/true);
  waiting.join();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(group.at(0).Health().state(), pb::FAILED);

  group.Join(2);
  grpc::ClientContext context;
  auto stream = group.at(0).stub->StepStream(&context);
  ASSERT_TRUE(stream->Write(Step(2, 1, 0, Begin())));
  WaitFor(&group.at(0), pb::BUSY);
  ExpectAnswers(&group.at(0), 2, /*aborts=*/true);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::ABORTED);
  group.Join(3);
}

TEST(WorkerFaults, AnAbortWhileCachesAreAllocatedLeavesTheWeights) {
  Group group(1);
  // Sizing the workspace runs the model: Configure waits there.
  std::promise<void> entered, release;
  std::atomic<bool> hold{false};
  group.at(0).loader.dry_run = [&] {
    if (hold.exchange(false)) {
      entered.set_value();
      release.get_future().wait();
    }
  };
  group.Join(1);
  hold = true;
  pb::ConfigureResponse configured;
  grpc::Status status;
  std::thread configuring(
      [&] { status = group.at(0).Call(&Stub::Configure, Limits(1), &configured); });
  entered.get_future().wait();
  ExpectAnswers(&group.at(0), 1, /*aborts=*/true);
  release.set_value();
  configuring.join();
  EXPECT_REFUSED(status, "in state FAILED");
  EXPECT_EQ(group.at(0).loader.loads, 1);
  group.Join(2);
  EXPECT_NE(FirstStep(&group, 2), 0u);
}

TEST(WorkerFaults, AFailedReconfigurationRunsNoSteps) {
  Group group(1);
  group.Join(1);
  pb::ConfigureRequest huge = Limits(1);
  huge.set_kv_blocks(INT32_MAX);
  pb::ConfigureResponse configured;
  EXPECT_EQ(group.at(0).Call(&Stub::Configure, huge, &configured).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(group.at(0).Health().state(), pb::JOINED);
  grpc::ClientContext context;
  EXPECT_REFUSED(group.at(0).stub->StepStream(&context)->Finish(), "in state JOINED");
  ASSERT_TRUE(group.at(0).Call(&Stub::Configure, Limits(1), &configured).ok());
  EXPECT_NE(FirstStep(&group, 1), 0u);
}

}  // namespace
}  // namespace worker_test
}  // namespace lockstep
