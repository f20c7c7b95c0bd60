// The coordinator over fake workers: what clients see while it loads, serves, drains and fails.
#include "coordinator/coordinator.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/group/fake_worker_service.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/base/version.h"
#include "proto/error_details.pb.h"
#include "proto/health.grpc.pb.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"

namespace lockstep {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckResponse;
using inference::v1::ServerStatus;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CoordinatorTest : public ::testing::Test {
 protected:
  FakeWorker* AddWorker(const FakeWorkerFaults& faults = FakeWorkerFaults()) {
    workers_.push_back(std::make_unique<FakeWorker>(faults));
    options_.workers.push_back(workers_.back()->Start());
    return workers_.back().get();
  }
  void Start() {
    options_.model_path = ::testing::TempDir();  // a folder without tokenizer.json
    options_.served_model_name = "tiny";
    options_.port = 0;
    auto coordinator = Coordinator::Start(options_);
    ASSERT_OK(coordinator);
    coordinator_ = *std::move(coordinator);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", coordinator_->port()),
                                   grpc::InsecureChannelCredentials());
  }
  HealthCheckResponse::ServingStatus CheckHealth(const std::string& name) {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(name);
    HealthCheckResponse response;
    const grpc::Status status = Health::NewStub(channel_)->Check(&context, request, &response);
    return status.ok() ? response.status() : HealthCheckResponse::SERVICE_UNKNOWN;
  }
  // Polls: health follows the state within a moment.
  void ExpectHealth(const std::string& name, HealthCheckResponse::ServingStatus expected) {
    for (int i = 0; i < 500 && CheckHealth(name) != expected; ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    EXPECT_EQ(CheckHealth(name), expected) << name;
  }
  ServerStatus Status() {
    grpc::ClientContext context;
    ServerStatus status;
    EXPECT_TRUE(inference::v1::ModelService::NewStub(channel_)
                    ->GetServerStatus(&context, {}, &status)
                    .ok());
    return status;
  }
  grpc::Status Generate() {
    grpc::ClientContext context;
    inference::v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    inference::v1::GenerateResult result;
    return inference::v1::InferenceService::NewStub(channel_)->GenerateOnce(&context, request,
                                                                            &result);
  }
  static google::rpc::ErrorInfo Info(const grpc::Status& status) {
    google::rpc::Status wire;
    google::rpc::ErrorInfo info;
    if (wire.ParseFromString(status.error_details()) && wire.details_size() > 0) {
      wire.details(0).UnpackTo(&info);
    }
    return info;
  }

  CoordinatorOptions options_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::unique_ptr<Coordinator> coordinator_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(CoordinatorTest, LoadsServesAndDrains) {
  FakeWorkerFaults slow;
  slow.load_time = absl::Milliseconds(500);
  FakeWorker* first = AddWorker(slow);
  AddWorker();
  Start();
  std::thread loader([&]() { EXPECT_OK(coordinator_->Load()); });
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth("liveness"), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth("worker/1"), HealthCheckResponse::NOT_SERVING);
  const grpc::Status loading = Generate();
  EXPECT_EQ(loading.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(loading).reason(), "MODEL_LOADING");
  EXPECT_EQ(Info(loading).metadata().count("progress"), 1u);
  EXPECT_EQ(Status().state(), "LOADING");
  loader.join();

  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth("worker/0"), HealthCheckResponse::SERVING);
  EXPECT_OK(coordinator_->Healthy());
  EXPECT_EQ(Status().state(), "READY");
  EXPECT_EQ(Status().workers_size(), 2);
  EXPECT_EQ(Status().workers(1).state(), "READY");
  EXPECT_EQ(Status().slots_total(), 16);
  EXPECT_EQ(first->seen().configure.kv_blocks(), 16 * 4);
  EXPECT_EQ(first->seen().configure.max_sequence_blocks(), 4);
  EXPECT_THAT(coordinator_->Describe(),
              AllOf(HasSubstr("tiny"), HasSubstr("256 tokens"), HasSubstr("token ids only")));

  coordinator_->Drain();
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Info(Generate()).reason(), "DRAINING");
  EXPECT_EQ(Status().state(), "DRAINING");
  EXPECT_TRUE(coordinator_->Idle());
  coordinator_->Stop();
  // The workers are left as they are, for the next coordinator.
  EXPECT_EQ(first->seen().drains, 0);
}

TEST_F(CoordinatorTest, AcceptedNamesTheModelAndTheVersion) {
  AddWorker();
  Start();
  ASSERT_OK(coordinator_->Load());
  grpc::ClientContext context;
  inference::v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  auto stream = inference::v1::InferenceService::NewStub(channel_)->Generate(&context, request);
  inference::v1::GenerateEvent event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.accepted().model(), "tiny");
  EXPECT_EQ(event.accepted().server_version(), kVersion);
  context.TryCancel();
  stream->Finish();
}

TEST_F(CoordinatorTest, FailedLoadIsToldToClients) {
  AddWorker();
  FakeWorkerFaults broken;
  broken.load_status = grpc::Status(grpc::StatusCode::DATA_LOSS, "shard 2 is truncated");
  AddWorker(broken);
  Start();
  EXPECT_THAT(coordinator_->Load(),
              testing::StatusIs(absl::StatusCode::kDataLoss, HasSubstr("shard 2 is truncated")));
  EXPECT_THAT(coordinator_->Healthy(), testing::StatusIs(absl::StatusCode::kDataLoss));
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(status).reason(), "ENGINE_FAILED");
  EXPECT_THAT(status.error_message(), HasSubstr("shard 2 is truncated"));
  EXPECT_EQ(Status().state(), "FAILED");
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::NOT_SERVING);
}

TEST_F(CoordinatorTest, RanksWithDifferentCheckpointsAreRefused) {
  AddWorker();
  FakeWorkerFaults other;
  other.model_digest = 8;
  AddWorker(other);
  Start();
  EXPECT_FALSE(coordinator_->Load().ok());
}

TEST_F(CoordinatorTest, MissingFolderAndMissingWorkersAreNamed) {
  Start();
  EXPECT_THAT(coordinator_->Load(),
              testing::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--workers")));
  AddWorker();
  CoordinatorOptions options = options_;
  options.model_path = "/nowhere/at/all";
  auto coordinator = Coordinator::Start(options);
  ASSERT_OK(coordinator);
  EXPECT_THAT((*coordinator)->Load(), testing::StatusIs(absl::StatusCode::kNotFound,
                                                        HasSubstr("/nowhere/at/all is no folder")));
}

TEST_F(CoordinatorTest, UnreachableWorkersHaveAReasonOfTheirOwn) {
  options_.workers = {"127.0.0.1:1"};
  options_.group.connect_timeout = absl::Milliseconds(300);
  Start();
  const absl::Status status = coordinator_->Load();
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kDeadlineExceeded,
                                        HasSubstr("rank 0 (127.0.0.1:1)")));
  EXPECT_EQ(ReasonOf(status), "WORKER_UNREACHABLE");
}

TEST_F(CoordinatorTest, StopEndsStreamsWithAReasonAndWatchesWithNotServing) {
  FakeWorkerFaults slow;
  slow.step_time = absl::Milliseconds(200);
  AddWorker(slow);
  Start();
  ASSERT_OK(coordinator_->Load());
  grpc::ClientContext watch_context;
  auto watch = Health::NewStub(channel_)->Watch(&watch_context, {});
  HealthCheckResponse health;
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), HealthCheckResponse::SERVING);
  grpc::ClientContext context;
  inference::v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  auto stream = inference::v1::InferenceService::NewStub(channel_)->Generate(&context, request);
  inference::v1::GenerateEvent event;
  ASSERT_TRUE(stream->Read(&event));
  coordinator_->Stop();
  while (stream->Read(&event)) EXPECT_FALSE(event.has_finished());
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(status).reason(), "DRAINING");
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&health));
  const grpc::Status watched = watch->Finish();
  EXPECT_EQ(watched.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(watched).reason(), "DRAINING");
}

TEST_F(CoordinatorTest, AStepThatIsRefusedAgainAndAgainEndsItsRequestAlone) {
  FakeWorkerFaults faults;
  faults.refuse_step = 1;
  AddWorker(faults);
  Start();
  ASSERT_OK(coordinator_->Load());
  ExpectHealth("", HealthCheckResponse::SERVING);
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Info(status).reason(), "POISON_REQUEST");
  EXPECT_THAT(status.error_message(), HasSubstr("refused by the test"));
  // The server becomes whole again.
  for (int i = 0; i < 500 && Status().state() != "READY"; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_OK(coordinator_->Healthy());
  EXPECT_EQ(Status().state(), "READY");
  EXPECT_EQ(Status().counters().at("recoveries"), 2);
  EXPECT_EQ(Status().counters().at("poison_requests"), 1);
  ASSERT_EQ(coordinator_->Faults().size(), 2u);
  EXPECT_EQ(coordinator_->Faults()[1].fault.cause, FaultCause::kStepRefused);
  EXPECT_EQ(coordinator_->Faults()[1].epoch_after, 3u);
  // Nothing is left to replay, so that is the end of the recovery.
  for (int i = 0; i < 500 && coordinator_->Faults()[1].outcome != "recovered"; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(coordinator_->Faults()[1].outcome, "recovered");
}

TEST_F(CoordinatorTest, TheRankWhoseStepFailedIsBlamedThoughItsPeerEndsFirst) {
  FakeWorkerFaults peer, culprit;
  peer.refuse_step = culprit.refuse_step = 1;
  peer.refusal = grpc::Status(grpc::StatusCode::ABORTED, "another rank has failed");
  culprit.refusal = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory for the test");
  culprit.refusal_delay = absl::Milliseconds(50);
  AddWorker(peer);
  AddWorker(culprit);
  Start();
  ASSERT_OK(coordinator_->Load());
  const grpc::Status status = Generate();
  EXPECT_EQ(Info(status).reason(), "POISON_REQUEST");
  EXPECT_THAT(status.error_message(), HasSubstr("no memory for the test"));
  ASSERT_FALSE(coordinator_->Faults().empty());
  const Fault fault = coordinator_->Faults()[0].fault;
  EXPECT_EQ(fault.cause, FaultCause::kStepRefused);
  EXPECT_THAT(fault.ranks, ::testing::ElementsAre(1));
  EXPECT_TRUE(fault.own_crash);
}

TEST_F(CoordinatorTest, AServerThatGivesUpSaysSoAndGoesOnAnswering) {
  FakeWorkerFaults faults;
  faults.refuse_step = 1;
  AddWorker(faults);
  options_.group.recovery_budget = 0;
  Start();
  ASSERT_OK(coordinator_->Load());
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Info(status).reason(), "RECOVERY_EXHAUSTED");
  ExpectHealth("", HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Status().state(), "FAILED");
  EXPECT_THAT(Status().state_detail(), HasSubstr("refused by the test"));
  EXPECT_EQ(CheckHealth("liveness"), HealthCheckResponse::SERVING);
  EXPECT_EQ(ReasonOf(coordinator_->Healthy()), "RECOVERY_EXHAUSTED");
  EXPECT_EQ(Info(Generate()).reason(), "RECOVERY_EXHAUSTED");
}

}  // namespace
}  // namespace lockstep
