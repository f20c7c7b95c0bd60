// Workers that die while streams run: every stream ends with what it would have said undisturbed.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "tests/cluster.h"
#include "tests/request_mix.h"
#include "tests/serve_process.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::GenerateRequest;
using ::testing::HasSubstr;

constexpr char kModel[] = "qwen3_5-trained-ct-nvfp4-fp8";

ServeProcess::Options Options(int tp, std::vector<std::string> flags = {}) {
  ServeProcess::Options options;
  options.model = TestModel(kModel);
  options.tp = tp;
  options.flags = std::move(flags);
  return options;
}

TEST(Recovery, ThirtyTwoStreamsOutliveAKilledWorker) {
  constexpr int kStreams = 32, kTokens = 60;
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2)));
  const std::vector<Answer> wanted = ReadAnswers(serve->inference(), kStreams, kTokens, 0, nullptr);
  for (const int rank : {1, 0}) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    const pid_t other = serve->WorkerPid(1 - rank);
    const int64_t before = serve->Counter("recoveries");
    const std::vector<Answer> found =
        ReadAnswers(serve->inference(), kStreams, kTokens, kStreams * kTokens / 4,
                    [&] { serve->KillWorker(rank); });
    ExpectSameAnswers(found, wanted);
    EXPECT_EQ(serve->Counter("recoveries"), before + 1);
    EXPECT_EQ(serve->WorkerPid(1 - rank), other) << "the survivor lives on, with its weights";
    int recovered = 0;
    for (const Answer& answer : found) recovered += answer.recoveries;
    EXPECT_GT(recovered, 0);
  }
  EXPECT_OK(serve->WaitState("READY", absl::Seconds(30)));
  EXPECT_EQ(serve->Counter("digest_mismatches"), 0);
  EXPECT_GT(serve->Counter("digests_checked"), 0);
  EXPECT_EQ(serve->Counter("requests_failed"), 0);
}

TEST(Recovery, ASpareTakesThePlaceAndTheLostOneBecomesTheNextSpare) {
  constexpr int kStreams = 6, kTokens = 80;
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2, {"--spare-workers", "1"})));
  const std::vector<Answer> wanted = ReadAnswers(serve->inference(), kStreams, kTokens, 0, nullptr);
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    // In the second round rank 1 is held by what was the spare.
    const int number = round == 0 ? 1 : 2;
    ExpectSameAnswers(
        ReadAnswers(serve->inference(), kStreams, kTokens, 50, [&] { serve->KillWorker(number); }),
        wanted);
    EXPECT_OK(serve->WaitState("READY", absl::Seconds(30)));
  }
  EXPECT_THAT(serve->log(), HasSubstr("goes to the spare worker"));
}

TEST(Recovery, AWorkerKilledWhileNothingRunsIsReplaced) {
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2)));
  const Answer wanted = ReadAnswer(serve->inference(), MixedRequest(3, 20), nullptr);
  serve->KillWorker(0);
  // Noticed without any request.
  while (serve->Counter("recoveries") == 0) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_OK(serve->WaitState("READY", absl::Seconds(60)));
  ExpectSameAnswers({ReadAnswer(serve->inference(), MixedRequest(3, 20), nullptr)}, {wanted});
  EXPECT_THAT(serve->log(), HasSubstr("ended with signal 9"));
}

TEST(Recovery, AnOperatorHasAWorkerReplacedAndStreamsGoOn) {
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2)));
  constexpr int kStreams = 4, kTokens = 80;
  const std::vector<Answer> wanted = ReadAnswers(serve->inference(), kStreams, kTokens, 0, nullptr);
  const pid_t before = serve->WorkerPid(1), other = serve->WorkerPid(0);
  const std::vector<Answer> found = ReadAnswers(serve->inference(), kStreams, kTokens, 40, [&] {
    grpc::ClientContext context;
    admin::v1::ReplaceWorkerRequest request;
    request.set_rank(1);
    request.set_reason("it is old");
    admin::v1::ReplaceWorkerResponse response;
    EXPECT_TRUE(serve->admin()->ReplaceWorker(&context, request, &response).ok());
  });
  ExpectSameAnswers(found, wanted);
  EXPECT_NE(serve->WorkerPid(1), before);
  EXPECT_EQ(serve->WorkerPid(0), other);
  ASSERT_EQ(serve->Faults().size(), 1u);
  EXPECT_EQ(serve->Faults()[0].cause(), "operator");
  EXPECT_THAT(serve->Faults()[0].detail(), HasSubstr("it is old"));
}

TEST(Recovery, ARequestThatKillsWorkersFailsAloneAndItsNeighboursFinish) {
  ServeProcess::Options options = Options(2);
  // Id 299 is in no other prompt, and hardly ever sampled by these.
  options.faults = {{}, {"--fault-token", "299=abort"}};
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(options));
  constexpr int kStreams = 4, kTokens = 120;
  std::vector<Answer> wanted = ReadAnswers(serve->inference(), kStreams, kTokens, 0, nullptr);
  ASSERT_EQ(serve->Counter("recoveries"), 0);
  Answer poisoned;
  const std::vector<Answer> found = ReadAnswers(serve->inference(), kStreams, kTokens, 20, [&] {
    GenerateRequest poison = MixedRequest(5, 50);
    poison.mutable_token_ids()->add_ids(299);
    poisoned = ReadAnswer(serve->inference(), poison, nullptr);
  });
  EXPECT_EQ(poisoned.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(ReasonOf(poisoned.status), "POISON_REQUEST");
  EXPECT_THAT(poisoned.status.error_message(), HasSubstr("rank 1"));
  ExpectSameAnswers(found, wanted);
  EXPECT_EQ(serve->Counter("recoveries"), 2) << "once with its neighbours, once alone";
  EXPECT_EQ(serve->Counter("poison_requests"), 1);
}

TEST(Recovery, ARequestForWhichThereIsNoMemoryFailsAloneAndTheNextIsServed) {
  ServeProcess::Options options = Options(2);
  options.faults = {{}, {"--fault", "prefill:2=oom", "--fault", "prefill:3=oom"}};
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(options));
  const Answer wanted = ReadAnswer(serve->inference(), MixedRequest(3, 20), nullptr);
  EXPECT_TRUE(wanted.status.ok());
  const pid_t rank0 = serve->WorkerPid(0), rank1 = serve->WorkerPid(1);
  const Answer failed = ReadAnswer(serve->inference(), MixedRequest(4, 20), nullptr);
  EXPECT_EQ(ReasonOf(failed.status), "POISON_REQUEST");
  EXPECT_THAT(failed.status.error_message(), HasSubstr("rank 1"));
  EXPECT_THAT(failed.status.error_message(), HasSubstr("RESOURCE_EXHAUSTED"));
  ExpectSameAnswers({ReadAnswer(serve->inference(), MixedRequest(3, 20), nullptr)}, {wanted});
  EXPECT_EQ(serve->WorkerPid(0), rank0);
  EXPECT_EQ(serve->WorkerPid(1), rank1);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
