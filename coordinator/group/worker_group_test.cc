// WorkerGroup against fake workers on real ports: bringing ranks up, carrying steps, and naming the
// rank that is at fault.
#include "coordinator/group/worker_group.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/group/fake_worker_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class WorkerGroupTest : public ::testing::Test {
 protected:
  FakeWorker* AddWorker(const FakeWorkerFaults& faults = FakeWorkerFaults()) {
    workers_.push_back(std::make_unique<FakeWorker>(faults));
    options_.addresses.push_back(workers_.back()->Start());
    return workers_.back().get();
  }
  void MakeGroup() {
    options_.model_path = "/models/m";
    options_.comm_timeout = absl::Seconds(10);
    group_ = std::make_unique<WorkerGroup>(options_);
  }
  absl::Status Join() {
    worker::v1::ConfigureRequest limits;
    limits.set_kv_blocks(16);
    return group_->Join(1, limits).status();
  }
  void LoadAndJoin() {
    MakeGroup();
    ASSERT_OK(group_->Load(1, nullptr));
    ASSERT_OK(Join());
  }
  static worker::v1::StepRequest Step(uint64_t id) {
    worker::v1::StepRequest request;
    request.set_term(1);
    request.set_epoch(1);
    request.set_step_id(id);
    request.set_batch_digest(id * 10);
    request.set_plan("plan");
    return request;
  }
  absl::StatusOr<worker::v1::StepResult> Receive() {
    return group_->Receive(absl::Now() + absl::Seconds(20));
  }
  void ExpectAllAborted() {
    for (const auto& worker : workers_) EXPECT_EQ(worker->seen().aborts, 1);
  }

  WorkerGroupOptions options_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::unique_ptr<WorkerGroup> group_;
};

TEST_F(WorkerGroupTest, LoadsJoinsAndCarriesSteps) {
  FakeWorker* first = AddWorker();
  FakeWorker* second = AddWorker();
  options_.expected_digest = 7;
  options_.activation_dtype = worker::v1::ACTIVATION_F32;
  MakeGroup();
  EXPECT_EQ(group_->world(), 2);
  std::vector<int> progress(2, 0);
  ASSERT_OK_AND_ASSIGN(const auto loaded,
                       group_->Load(3, [&](int rank, const worker::v1::LoadModelProgress&) {
                         ++progress[static_cast<size_t>(rank)];
                       }));
  ASSERT_EQ(loaded.size(), 2u);
  EXPECT_EQ(loaded[1].identity().rank(), 1);
  EXPECT_THAT(progress, ElementsAre(2, 2));
  const worker::v1::LoadModelRequest request = second->seen().load;
  EXPECT_EQ(request.term(), 3u);
  EXPECT_EQ(request.path(), "/models/m");
  EXPECT_EQ(request.expected_digest(), 7u);
  EXPECT_EQ(request.rank(), 1);
  EXPECT_EQ(request.world(), 2);
  EXPECT_EQ(request.activation_dtype(), worker::v1::ACTIVATION_F32);

  ASSERT_OK(Join());
  EXPECT_THAT(first->seen().addresses, ElementsAre("peer 0 of epoch 1", "peer 1 of epoch 1"));
  EXPECT_EQ(second->seen().configure.kv_blocks(), 16);
  EXPECT_EQ(second->seen().configure.epoch(), 1u);

  ASSERT_OK(group_->Send(Step(1)));
  ASSERT_OK(group_->Send(Step(2)));
  for (uint64_t step = 1; step <= 2; ++step) {
    ASSERT_OK_AND_ASSIGN(const auto result, Receive());
    EXPECT_EQ(result.step_id(), step);
    EXPECT_EQ(result.batch_digest(), step * 10);
  }
  EXPECT_EQ(first->seen().steps, second->seen().steps);
  EXPECT_EQ(first->seen().steps.size(), 2u);

  const auto health = group_->Health(absl::Seconds(5));
  ASSERT_OK(health[1].status());
  EXPECT_EQ(health[1]->state(), worker::v1::READY);
  ASSERT_OK_AND_ASSIGN(const auto stats, group_->GetStats());
  EXPECT_EQ(stats[0].steps(), 2u);
  ASSERT_OK_AND_ASSIGN(const auto info, group_->GetInfo());
  EXPECT_EQ(info[0].device(), "cpu");
  worker::v1::ProbeLinearRequest probe;
  probe.set_tokens(5);
  ASSERT_OK_AND_ASSIGN(const auto probed, group_->ProbeLinear(probe));
  EXPECT_EQ(probed[1].local_n(), 5);

  group_->Shutdown();
  for (const auto& worker : workers_) {
    EXPECT_EQ(worker->seen().drains, 0);
    EXPECT_EQ(worker->seen().aborts, 0);
  }
  EXPECT_THAT(group_->Send(Step(3)), StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_F(WorkerGroupTest, ReceiveWaitsForAllRanksUntilItsDeadline) {
  AddWorker();
  FakeWorkerFaults slow;
  slow.step_time = absl::Milliseconds(150);
  AddWorker(slow);
  LoadAndJoin();
  ASSERT_OK(group_->Send(Step(1)));
  EXPECT_THAT(group_->Receive(absl::Now() + absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  ASSERT_OK_AND_ASSIGN(const auto result, Receive());
  EXPECT_EQ(result.step_id(), 1u);
}

TEST_F(WorkerGroupTest, WakeEndsAReceiveAndIsKept) {
  AddWorker();
  LoadAndJoin();
  group_->Wake();
  EXPECT_THAT(Receive(), StatusIs(absl::StatusCode::kCancelled));
  std::thread waker([this] { group_->Wake(); });
  EXPECT_THAT(Receive(), StatusIs(absl::StatusCode::kCancelled));
  waker.join();
  EXPECT_THAT(group_->Receive(absl::Now()), StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(WorkerGroupTest, WaitsForARankThatComesUpLate) {
  AddWorker();
  // TEST_TMPDIR is too long for the path of a socket.
  char directory[] = "/tmp/late_XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string address = absl::StrCat("unix:", directory, "/s");
  options_.addresses.push_back(address);
  auto late = std::make_unique<FakeWorker>();
  MakeGroup();
  std::thread starter([&] {
    absl::SleepFor(absl::Milliseconds(300));
    late->Start(address);
  });
  const auto loaded = group_->Load(1, nullptr);
  starter.join();
  EXPECT_OK(loaded);
  EXPECT_EQ(late->seen().load.rank(), 1);
}

TEST_F(WorkerGroupTest, NamesARankThatNeverComesUp) {
  FakeWorker* first = AddWorker();
  options_.addresses.push_back("unix:/nonexistent/worker.sock");
  options_.connect_timeout = absl::Milliseconds(300);
  MakeGroup();
  EXPECT_THAT(group_->Load(1, nullptr),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("rank 1 (unix:/nonexistent/worker.sock), GetInfo"),
                             HasSubstr("did not answer within 300ms"))));
  EXPECT_EQ(first->seen().load.world(), 0) << "nothing is loaded before all ranks answer";
}

TEST_F(WorkerGroupTest, ARefusedLoadStopsTheOthers) {
  FakeWorkerFaults slow;
  slow.load_time = absl::Seconds(25);
  FakeWorker* first = AddWorker(slow);
  FakeWorkerFaults refuses;
  refuses.load_status = grpc::Status(grpc::StatusCode::DATA_LOSS, "3 bytes missing");
  AddWorker(refuses);
  MakeGroup();
  const absl::Time begin = absl::Now();
  EXPECT_THAT(group_->Load(1, nullptr),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("rank 1 (" + options_.addresses[1] + "), LoadModel"),
                             HasSubstr("3 bytes missing"))));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  for (int i = 0; i < 1000 && first->seen().cancelled_loads == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(first->seen().cancelled_loads, 1);
}

TEST_F(WorkerGroupTest, RefusesDifferentCheckpoints) {
  AddWorker();
  FakeWorkerFaults other;
  other.model_digest = 8;
  AddWorker(other);
  MakeGroup();
  EXPECT_THAT(group_->Load(1, nullptr),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("rank 1"), HasSubstr("the same checkpoint"))));
}

struct JoinFault {
  const char* name;
  FakeWorkerFaults faults;
  absl::StatusCode code;
  const char* message;
};

TEST_F(WorkerGroupTest, AFailedJoinNamesRankAndPhaseAndAbortsAll) {
  JoinFault init{"init", {}, absl::StatusCode::kUnavailable, "InitComm: UNAVAILABLE: no peer 0"};
  init.faults.init_status = grpc::Status(grpc::StatusCode::UNAVAILABLE, "no peer 0");
  JoinFault configure{"configure", {}, absl::StatusCode::kResourceExhausted, "Configure"};
  configure.faults.configure_status =
      grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "2 GiB needed");
  JoinFault self_test{"self_test", {}, absl::StatusCode::kInternal, "its self-test gave 2b"};
  self_test.faults.self_test = 43;
  for (const JoinFault& fault : {init, configure, self_test}) {
    SCOPED_TRACE(fault.name);
    workers_.clear();
    options_.addresses.clear();
    AddWorker();
    AddWorker(fault.faults);
    MakeGroup();
    ASSERT_OK(group_->Load(1, nullptr));
    EXPECT_THAT(Join(), StatusIs(fault.code, AllOf(HasSubstr("rank 1"), HasSubstr(fault.message))));
    ExpectAllAborted();
    EXPECT_THAT(group_->Send(Step(1)), StatusIs(fault.code));
  }
}

TEST_F(WorkerGroupTest, ARefusedStepNamesTheRankAndAbortsAll) {
  AddWorker();
  FakeWorkerFaults refuses;
  refuses.refuse_step = 2;
  AddWorker(refuses);
  LoadAndJoin();
  ASSERT_OK(group_->Send(Step(1)));
  ASSERT_OK(Receive()) << "step 1 is agreed";
  ASSERT_OK(group_->Send(Step(2)));
  const auto broken = StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("rank 1 (" + options_.addresses[1]),
                                     HasSubstr("StepStream"), HasSubstr("refused by the test")));
  EXPECT_THAT(Receive(), broken);
  ExpectAllAborted();
  EXPECT_THAT(workers_[0]->seen().abort_reason, HasSubstr("refused by the test"));
  EXPECT_THAT(group_->Send(Step(3)), broken);
  EXPECT_THAT(Receive(), broken);
}

TEST_F(WorkerGroupTest, DigestDisagreementNamesBothRanksAndAbortsAll) {
  for (const bool batch : {false, true}) {
    workers_.clear();
    options_.addresses.clear();
    AddWorker();
    AddWorker();
    FakeWorkerFaults wrong;
    (batch ? wrong.wrong_batch_at_step : wrong.wrong_result_at_step) = 2;
    AddWorker(wrong);
    LoadAndJoin();
    ASSERT_OK(group_->Send(Step(1)));
    ASSERT_OK(group_->Send(Step(2)));
    ASSERT_OK(Receive());
    EXPECT_THAT(Receive(), StatusIs(absl::StatusCode::kInternal,
                                    AllOf(HasSubstr("step 2: ranks 0"), HasSubstr("and 2 ("),
                                          HasSubstr(batch ? "batch digest" : "result digest"))));
    ExpectAllAborted();
  }
}

TEST_F(WorkerGroupTest, ARankThatDiesIsNamed) {
  AddWorker();
  AddWorker();
  LoadAndJoin();
  ASSERT_OK(group_->Send(Step(1)));
  ASSERT_OK(Receive());
  workers_[1]->Stop();
  EXPECT_THAT(Receive(), StatusIs(absl::StatusCode::kUnavailable,
                                  HasSubstr("rank 1 (" + options_.addresses[1])));
  EXPECT_EQ(workers_[0]->seen().aborts, 1);
}

TEST_F(WorkerGroupTest, AStreamThatAWorkerEndsIsAFailure) {
  FakeWorkerFaults ends;
  ends.end_stream_at_step = 1;
  AddWorker(ends);
  LoadAndJoin();
  ASSERT_OK(group_->Send(Step(1)));
  EXPECT_THAT(Receive(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("the worker ended the stream")));
  ExpectAllAborted();
}

TEST_F(WorkerGroupTest, JoinsAgainWithAHigherEpoch) {
  FakeWorkerFaults refuses;
  refuses.refuse_step = 9;
  AddWorker(refuses);
  LoadAndJoin();
  ASSERT_OK(group_->Send(Step(9)));
  ASSERT_FALSE(Receive().ok());
  worker::v1::ConfigureRequest limits;
  ASSERT_OK(group_->Join(2, limits));
  worker::v1::StepRequest step = Step(1);
  step.set_epoch(2);
  ASSERT_OK(group_->Send(step));
  ASSERT_OK_AND_ASSIGN(const auto result, Receive());
  EXPECT_EQ(result.epoch(), 2u);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
