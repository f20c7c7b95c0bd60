// Ranks that fail while a group forms: the error names rank, phase and cause, in bounded time, and
// the other ranks are told.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "coordinator/group/worker_group.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/worker.grpc.pb.h"
#include "tests/cluster.h"
#include "tools/process/child_process.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two ranks, the second with a fault.
struct Ranks {
  std::vector<ChildProcess> processes;
  WorkerGroupOptions options;
};

Ranks Start(const std::string& fault) {
  Ranks ranks;
  ranks.options.model_path = TestModel("qwen3_5-ct-nvfp4-fp8");
  for (int rank = 0; rank < 2; ++rank) {
    const std::string file = TempPath("address");
    std::vector<std::string> argv = {"tests/fault_worker", "--listen", "127.0.0.1:0",
                                     "--address-file", file};
    if (rank == 1) argv.insert(argv.end(), {"--fault", fault});
    auto process = ChildProcess::Start(argv, ChildProcess::Options());
    EXPECT_OK(process.status());
    if (!process.ok()) return ranks;
    ranks.processes.push_back(*std::move(process));
    const auto address = WaitForAddressFile(file, &ranks.processes.back(), absl::Seconds(60));
    EXPECT_OK(address.status());
    ranks.options.addresses.push_back(address.ok() ? *address : "");
  }
  return ranks;
}

worker::v1::ConfigureRequest Limits() {
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(8);
  limits.set_slots(2);
  limits.set_max_batch_tokens(64);
  limits.set_max_batch_sequences(2);
  limits.set_max_logit_rows(2);
  limits.set_max_sequence_blocks(4);
  return limits;
}

TEST(StartFaults, ARankKilledWhileItLoadsIsNamedAtOnce) {
  Ranks ranks = Start("load=kill");
  WorkerGroup group(ranks.options);
  const absl::Time start = absl::Now();
  EXPECT_THAT(
      group.Load(1, nullptr).status(),
      StatusIs(absl::StatusCode::kUnavailable, AllOf(HasSubstr("rank 1"), HasSubstr("LoadModel"))));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_TRUE(ranks.processes[1].Wait(absl::Seconds(60)));
  EXPECT_EQ(ranks.processes[1].Outcome(), "signal 9 (Killed)");
}

TEST(StartFaults, OneProcessIsNotTwoRanks) {
  Ranks ranks = Start("idle=kill");
  ranks.options.addresses[1] = ranks.options.addresses[0];
  WorkerGroup group(ranks.options);
  EXPECT_THAT(group.Load(1, nullptr).status(),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("same process"))));
}

TEST(StartFaults, ARankSilentInInitCommIsNamedWithThePhase) {
  Ranks ranks = Start("init=delay,600000");
  ranks.options.comm_timeout = absl::Seconds(1);
  WorkerGroup group(ranks.options);
  ASSERT_OK(group.Load(1, nullptr).status());
  EXPECT_THAT(
      group.Join(1, Limits()).status(),
      StatusIs(absl::StatusCode::kUnavailable, AllOf(HasSubstr("InitComm: DEADLINE_EXCEEDED"),
                                                     HasSubstr("rank 1"), HasSubstr("within 1s"))));
  ranks.processes[1].Signal(SIGKILL);  // its call would go on
}

TEST(StartFaults, AnErrorInInitCommEndsTheWaitOfTheOthers) {
  Ranks ranks = Start("init=error");
  ranks.options.comm_timeout = absl::Minutes(5);
  WorkerGroup group(ranks.options);
  ASSERT_OK(group.Load(1, nullptr).status());
  const absl::Time start = absl::Now();
  EXPECT_THAT(group.Join(1, Limits()).status(),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("rank 1"), HasSubstr("InitComm"), HasSubstr("fault"))));
  EXPECT_LT(absl::Now() - start, absl::Minutes(1));
  const auto stub = worker::v1::WorkerService::NewStub(
      grpc::CreateChannel(ranks.options.addresses[0], grpc::InsecureChannelCredentials()));
  worker::v1::HealthResponse health;
  do {  // its InitComm ends
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Health(&context, {}, &health).ok());
  } while (health.state() != worker::v1::FAILED && absl::Now() - start < absl::Minutes(1));
  EXPECT_EQ(health.state(), worker::v1::FAILED);
  EXPECT_OK(group.Join(2, Limits()).status()) << "the weights stayed";
}

TEST(StartFaults, ARankWithoutMemoryForTheCachesSaysSo) {
  Ranks ranks = Start("configure=oom");
  WorkerGroup group(ranks.options);
  ASSERT_OK(group.Load(1, nullptr).status());
  EXPECT_THAT(group.Join(1, Limits()).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("rank 1"), HasSubstr("Configure"))));
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
