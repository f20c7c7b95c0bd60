#include "worker/worker_service.h"

#include <grpcpp/grpcpp.h>

#include <future>
#include <thread>

#include "kernels/base/testing/matchers.h"
#include "worker/worker_test_util.h"

namespace lockstep {
namespace worker_test {
namespace {

using ::testing::HasSubstr;

TEST(WorkerService, OneAndTwoRanksGiveTheSameTokensAndDigests) {
  std::vector<pb::SequenceResult> found[2];
  for (int world : {1, 2}) {
    Group group(world);
    group.Join(3);
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<Stream>> streams;
    for (int r = 0; r < world; ++r) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(group.at(r).stub->StepStream(contexts.back().get()));
    }
    uint64_t digest = 0;
    for (uint64_t id = 1; id <= 20; ++id) {
      pb::StepPlan plan = Begin();
      if (id > 1) {
        pb::SequenceEntry* e = plan.mutable_sequences(0);
        e->clear_begin();
        e->clear_token_ids();
        e->clear_new_blocks();
        e->set_position(static_cast<int64_t>(id) + 1);
        e->set_sampled_in_step(id - 1);
      }
      const pb::StepRequest request = Step(3, id, digest, plan);
      digest = request.batch_digest();
      uint64_t result_digest = 0;
      for (auto& stream : streams) ASSERT_TRUE(stream->Write(request));
      for (int r = 0; r < world; ++r) {
        pb::StepResult result;
        ASSERT_TRUE(streams[static_cast<size_t>(r)]->Read(&result));
        EXPECT_EQ(result.step_id(), id);
        EXPECT_EQ(result.batch_digest(), digest);
        EXPECT_EQ(result.sequences_size(), r == 0 ? 1 : 0);
        if (r == 0) {
          result_digest = result.result_digest();
          found[world - 1].push_back(result.sequences(0));
        }
        EXPECT_EQ(result.result_digest(), result_digest);
      }
    }
    for (auto& stream : streams) {
      stream->WritesDone();
      pb::StepResult result;
      EXPECT_FALSE(stream->Read(&result));
      EXPECT_TRUE(stream->Finish().ok());
    }
    pb::GetStatsResponse stats;
    ASSERT_TRUE(group.at(0).Call(&Stub::GetStats, pb::GetStatsRequest(), &stats).ok());
    EXPECT_EQ(stats.steps(), 20u);
    EXPECT_EQ(stats.refused_steps(), 0);
    EXPECT_GT(stats.traffic_bytes().at("plan_to_device"), 0);
    EXPECT_EQ(stats.traffic_bytes().at("collectives_sent") > 0, world > 1);
    EXPECT_GT(stats.rss_bytes(), 0);
  }
  ASSERT_EQ(found[0].size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(found[0][i].SerializeAsString(), found[1][i].SerializeAsString()) << i;
  }
}

TEST(WorkerService, AnotherEpochFollowsAfterTheEndOfAStream) {
  Group group(2);
  for (uint64_t epoch : {1, 2, 5}) {
    group.Join(epoch);
    grpc::ClientContext context0, context1;
    auto a = group.at(0).stub->StepStream(&context0);
    auto b = group.at(1).stub->StepStream(&context1);
    const pb::StepRequest request = Step(epoch, 1, 0, Begin());
    ASSERT_TRUE(a->Write(request) && b->Write(request));
    pb::StepResult result;
    EXPECT_TRUE(a->Read(&result) && b->Read(&result));
    // One stream ends well, the other breaks off.
    a->WritesDone();
    EXPECT_TRUE(a->Finish().ok());
    context1.TryCancel();
    EXPECT_EQ(b->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
}

TEST(WorkerService, AWrongStepEndsTheStreamWithExpectedAndFound) {
  Group group(1);
  uint64_t epoch = 0;
  struct Case {
    std::function<void(pb::StepRequest*)> edit;
    const char* message;
    const char* reason;
  };
  const Case cases[] = {
      {[](pb::StepRequest* r) { r->set_step_id(2); }, "step 1 was expected", ""},
      {[](pb::StepRequest* r) { r->set_epoch(r->epoch() - 1); }, "this rank is in epoch",
       "STALE_EPOCH"},
      {[](pb::StepRequest* r) { r->set_batch_digest(3); }, "batch digest 3 was sent", ""},
      {[](pb::StepRequest* r) { r->set_term(0); }, "term 0 was sent, term 1 was seen",
       "STALE_TERM"},
  };
  for (const Case& c : cases) {
    group.Join(++epoch);
    grpc::ClientContext context;
    auto stream = group.at(0).stub->StepStream(&context);
    pb::StepRequest request = Step(epoch, 1, 0, Begin());
    c.edit(&request);
    ASSERT_TRUE(stream->Write(request));
    pb::StepResult result;
    EXPECT_FALSE(stream->Read(&result));
    const grpc::Status status = stream->Finish();
    EXPECT_REFUSED(status, c.message);
    EXPECT_EQ(ReasonOf(status), c.reason);
  }
  pb::GetStatsResponse stats;
  ASSERT_TRUE(group.at(0).Call(&Stub::GetStats, pb::GetStatsRequest(), &stats).ok());
  EXPECT_EQ(stats.steps(), 0u);
  EXPECT_EQ(stats.traffic_bytes().at("plan_to_device"), 0);
}

TEST(WorkerService, CallsInTheWrongStateSayWhatWasExpected) {
  Server server;
  pb::PrepareCommRequest prepare;
  prepare.set_term(1);
  prepare.set_epoch(1);
  pb::PrepareCommResponse prepared;
  EXPECT_REFUSED(server.Call(&Stub::PrepareComm, prepare, &prepared),
                 "PrepareComm in state NEW; expected LOADED");
  pb::ConfigureResponse configured;
  EXPECT_REFUSED(server.Call(&Stub::Configure, Limits(1), &configured), "in state NEW");
  grpc::ClientContext context;
  auto stream = server.stub->StepStream(&context);
  EXPECT_REFUSED(stream->Finish(), "StepStream in state NEW; expected READY");

  ASSERT_TRUE(server.Load(LoadRequest(0, 1)).ok());
  pb::InitCommRequest init;
  init.set_term(1);
  pb::InitCommResponse joined;
  EXPECT_REFUSED(server.Call(&Stub::InitComm, init, &joined), "InitComm in state LOADED");
  ASSERT_TRUE(server.Call(&Stub::PrepareComm, prepare, &prepared).ok());
  EXPECT_EQ(prepared.address(), "solo");
  EXPECT_EQ(server.Health().state(), pb::COMM_INIT);
  init.set_epoch(1);
  init.set_rank(3);
  const grpc::Status status = server.Call(&Stub::InitComm, init, &joined);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("this worker is rank 0 of 1"));
  EXPECT_EQ(server.Health().state(), pb::COMM_INIT);
  EXPECT_REFUSED(server.Call(&Stub::PrepareComm, prepare, &prepared), "STALE_EPOCH");
  prepare.set_epoch(2);
  prepare.set_term(0);
  EXPECT_REFUSED(server.Call(&Stub::PrepareComm, prepare, &prepared), "STALE_TERM");
}

TEST(WorkerService, CallsOfAnOlderEpochAreRefusedAndChangeNothing) {
  Server server;
  ASSERT_TRUE(server.Load(LoadRequest(0, 1)).ok());
  pb::PrepareCommRequest prepare;
  prepare.set_term(1);
  prepare.set_epoch(5);
  pb::PrepareCommResponse prepared;
  ASSERT_TRUE(server.Call(&Stub::PrepareComm, prepare, &prepared).ok());
  prepare.set_epoch(4);
  EXPECT_REFUSED(server.Call(&Stub::PrepareComm, prepare, &prepared), "STALE_EPOCH");
  pb::InitCommRequest init;
  init.set_term(1);
  init.set_epoch(4);
  pb::InitCommResponse joined;
  EXPECT_REFUSED(server.Call(&Stub::InitComm, init, &joined), "STALE_EPOCH");
  pb::ConfigureRequest configure;
  configure.set_term(1);
  configure.set_epoch(4);
  pb::ConfigureResponse configured;
  EXPECT_REFUSED(server.Call(&Stub::Configure, configure, &configured), "STALE_EPOCH");
  pb::AbortCommRequest abort;
  abort.set_term(1);
  abort.set_epoch(4);
  pb::AbortCommResponse aborted;
  EXPECT_REFUSED(server.Call(&Stub::AbortComm, abort, &aborted), "STALE_EPOCH");
  EXPECT_EQ(server.Health().state(), pb::COMM_INIT);
  EXPECT_EQ(server.Health().identity().epoch(), 5u);
}

TEST(WorkerService, LoadModelIsIdempotentAndExclusive) {
  Server server;
  std::promise<void> release;
  server.loader.hold = release.get_future().share();
  std::vector<std::thread> callers;
  std::atomic<int> ok{0};
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      pb::LoadModelResult result;
      if (server.Load(LoadRequest(0, 1), &result).ok() && result.vocab_size() == 300) ++ok;
    });
  }
  while (server.Health().state() != pb::LOADING) std::this_thread::yield();
  pb::LoadModelRequest other = LoadRequest(0, 1);
  other.set_path("elsewhere");
  // It waits for the end of the load that runs, and only then is refused.
  std::thread waiting([&] { EXPECT_REFUSED(server.Load(other), "has loaded model"); });
  release.set_value();
  waiting.join();
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(ok.load(), 2);
  EXPECT_EQ(server.loader.loads.load(), 1);
  other.set_expected_digest(kDigest);
  EXPECT_TRUE(server.Load(other).ok()) << "the same digest is the same model";
  other.set_expected_digest(1);
  EXPECT_REFUSED(server.Load(other), "has loaded model");
  EXPECT_EQ(server.Health().identity().model_digest(), kDigest);
}

TEST(WorkerService, ALoadThatFailsGivesWayToTheOneThatWaits) {
  Server server;
  std::promise<void> release;
  server.loader.hold = release.get_future().share();
  server.loader.fail = absl::DataLossError("CHECKPOINT_TRUNCATED: 3 bytes missing");
  std::thread failing(
      [&] { EXPECT_EQ(server.Load(LoadRequest(0, 1)).error_code(), grpc::StatusCode::DATA_LOSS); });
  while (server.Health().state() != pb::LOADING) std::this_thread::yield();
  pb::LoadModelRequest other = LoadRequest(0, 1);
  other.set_path("elsewhere");
  // Whether this load succeeds is not the point: it is its own load that answers, not a refusal.
  std::thread waiting(
      [&] { EXPECT_EQ(server.Load(other).error_code(), grpc::StatusCode::DATA_LOSS); });
  release.set_value();
  failing.join();
  waiting.join();
  EXPECT_EQ(server.loader.loads.load(), 2);
  EXPECT_EQ(server.Health().state(), pb::NEW);
}

TEST(WorkerService, AFailedLoadMayBeRepeated) {
  Server server;
  server.loader.fail = absl::DataLossError("CHECKPOINT_TRUNCATED: 3 bytes missing");
  const grpc::Status status = server.Load(LoadRequest(0, 1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_THAT(status.error_message(), HasSubstr("3 bytes missing"));
  EXPECT_EQ(ReasonOf(status), "CHECKPOINT_TRUNCATED");
  EXPECT_EQ(server.Health().state(), pb::NEW);
  server.loader.fail = absl::OkStatus();
  EXPECT_TRUE(server.Load(LoadRequest(0, 1)).ok());
  EXPECT_EQ(server.Load(LoadRequest(2, 2)).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(WorkerService, AbortEndsACollectiveThatWaitsForAPeer) {
  Group group(2);
  group.Join(1);
  grpc::ClientContext context;
  auto stream = group.at(0).stub->StepStream(&context);
  ASSERT_TRUE(stream->Write(Step(1, 1, 0, Begin())));  // rank 1 never gets it
  while (group.at(0).Health().state() != pb::BUSY) std::this_thread::yield();
  EXPECT_GT(group.at(0).Health().step_running_ms(), 0);
  pb::AbortCommRequest abort;
  abort.set_term(1);
  abort.set_epoch(2);
  pb::AbortCommResponse response;
  ASSERT_TRUE(group.at(0).Call(&Stub::AbortComm, abort, &response).ok());
  EXPECT_FALSE(response.aborted()) << "there is no such epoch";
  abort.set_epoch(1);
  abort.set_reason("rank 1 is dead");
  ASSERT_TRUE(group.at(0).Call(&Stub::AbortComm, abort, &response).ok());
  EXPECT_TRUE(response.aborted());
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("rank 1 is dead"));
  EXPECT_EQ(group.at(0).Health().state(), pb::FAILED);
  EXPECT_THAT(group.at(0).Health().error(), HasSubstr("rank 1 is dead"));
  group.Join(2);  // weights stayed
}

TEST(WorkerService, ANewEpochEndsTheOldStream) {
  Group group(1);
  group.Join(1);
  grpc::ClientContext context;
  auto stream = group.at(0).stub->StepStream(&context);
  stream->WaitForInitialMetadata();
  grpc::ClientContext second;
  EXPECT_REFUSED(group.at(0).stub->StepStream(&second)->Finish(), "has a step stream already");
  group.Join(2);
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("epoch 2 of term 1 begins"));
}

TEST(WorkerService, AThirdUnansweredStepIsRefused) {
  Group group(2);
  group.Join(1);
  grpc::ClientContext context;
  auto stream = group.at(0).stub->StepStream(&context);
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(stream->Write(Step(1, id, 0, Begin())));
  EXPECT_REFUSED(stream->Finish(), "step 3 was sent while 2 steps were unanswered");
}

TEST(WorkerService, DrainRefusesNewStreams) {
  Group group(1);
  group.Join(1);
  pb::DrainResponse response;
  pb::DrainRequest request;
  const uint64_t term = group.at(0).Health().identity().term();
  request.set_term(term - 1);
  EXPECT_REFUSED(group.at(0).Call(&Stub::Drain, request, &response), "STALE_TERM");
  EXPECT_EQ(group.at(0).Health().state(), pb::READY);
  request.set_term(term);
  ASSERT_TRUE(group.at(0).Call(&Stub::Drain, request, &response).ok());
  EXPECT_EQ(group.at(0).Health().state(), pb::DRAINING);
  grpc::ClientContext context;
  EXPECT_REFUSED(group.at(0).stub->StepStream(&context)->Finish(), "in state DRAINING");
}

TEST(WorkerService, UnknownLinearsAreNotFound) {
  Group group(1);
  group.Join(1);
  pb::ProbeLinearRequest request;
  request.set_module("model.layers.0.mlp.up_proj");
  pb::ProbeLinearResponse response;
  const grpc::Status status = group.at(0).Call(&Stub::ProbeLinear, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("model.layers.0.mlp.up_proj"));
}

TEST(WorkerService, InfoNamesTheDeviceAndTheBuild) {
  Server server;
  pb::GetInfoResponse info;
  ASSERT_TRUE(server.Call(&Stub::GetInfo, pb::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.state(), pb::NEW);
  EXPECT_EQ(info.device(), "cpu");
  EXPECT_EQ(info.identity().rank(), -1);
  EXPECT_NE(info.identity().incarnation(), 0u);
  EXPECT_FALSE(info.version().empty());
  EXPECT_GT(info.total_bytes(), 0);
  EXPECT_EQ(info.device_uuid().size(), 20u) << info.device_uuid();
  Server other;
  pb::GetInfoResponse second;
  ASSERT_TRUE(other.Call(&Stub::GetInfo, pb::GetInfoRequest(), &second).ok());
  EXPECT_NE(info.device_uuid(), second.device_uuid()) << "two workers of one host";
  ASSERT_TRUE(server.Call(&Stub::GetInfo, pb::GetInfoRequest(), &second).ok());
  EXPECT_EQ(info.device_uuid(), second.device_uuid());
}

}  // namespace
}  // namespace worker_test
}  // namespace lockstep
