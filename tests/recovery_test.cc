// Workers that die while streams run: every stream ends with what it would have said undisturbed.
#include <signal.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "tests/cluster.h"
#include "tests/serve_process.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::GenerateEvent;
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

// Request `i` of a mixture: greedy and sampled, with penalties, prompts of different lengths.
GenerateRequest Request(int i, int max_tokens) {
  GenerateRequest request;
  for (int j = 0; j < 3 + (i * 37) % 150; ++j) {
    request.mutable_token_ids()->add_ids((i * 7919 + j * 104729) % 300);
  }
  auto* sampling = request.mutable_sampling();
  sampling->set_max_tokens(max_tokens);
  if (i % 2 == 0) {
    sampling->set_temperature(0);
  } else {
    sampling->set_temperature(0.9f);
    sampling->set_top_p(0.95f);
    sampling->set_presence_penalty(0.4f);
    sampling->set_repetition_penalty(1.1f);
    sampling->set_min_tokens(5);
    sampling->set_seed(static_cast<uint64_t>(i));
  }
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

struct Answer {
  grpc::Status status;
  std::vector<int32_t> ids;
  uint64_t digest = 0;
  int32_t recoveries = 0;
  std::string breach;  // of the numbering
};

Answer Read(ServeProcess* serve, const GenerateRequest& request, std::atomic<int64_t>* tokens) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(4)));
  auto stream = serve->inference()->Generate(&context, request);
  Answer answer;
  GenerateEvent event;
  uint64_t last = 0;
  while (stream->Read(&event)) {
    const uint64_t first = event.first_sequence() > 0 ? event.first_sequence() : event.sequence();
    if (first != last + 1) answer.breach = absl::StrCat("event ", first, " follows ", last);
    last = event.sequence();
    if (event.has_delta()) {
      answer.ids.insert(answer.ids.end(), event.delta().token_ids().begin(),
                        event.delta().token_ids().end());
      if (tokens != nullptr) *tokens += event.delta().token_ids_size();
    }
    if (event.has_finished()) {
      answer.digest = event.finished().determinism_digest();
      answer.recoveries = event.finished().recoveries();
    }
  }
  answer.status = stream->Finish();
  return answer;
}

// All at once; `disturb` runs beside them, once `after` tokens have come.
std::vector<Answer> ReadAll(ServeProcess* serve, int count, int max_tokens, int64_t after,
                            const std::function<void()>& disturb) {
  std::vector<Answer> answers(static_cast<size_t>(count));
  std::atomic<int64_t> tokens{0};
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      answers[static_cast<size_t>(i)] = Read(serve, Request(i, max_tokens), &tokens);
      ++ended;
    });
  }
  while (disturb && tokens < after && ended < count) absl::SleepFor(absl::Milliseconds(1));
  if (disturb) disturb();
  for (std::thread& thread : threads) thread.join();
  return answers;
}

void ExpectEqual(const std::vector<Answer>& found, const std::vector<Answer>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(found[i].status.ok()) << i << ": " << found[i].status.error_message();
    EXPECT_EQ(found[i].breach, "") << i;
    EXPECT_EQ(found[i].ids, wanted[i].ids) << i;
    EXPECT_EQ(found[i].digest, wanted[i].digest) << i;
  }
}

TEST(Recovery, ThirtyTwoStreamsOutliveAKilledWorker) {
  constexpr int kStreams = 32, kTokens = 60;
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2)));
  const std::vector<Answer> wanted = ReadAll(serve.get(), kStreams, kTokens, 0, nullptr);
  for (const int rank : {1, 0}) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    const pid_t other = serve->WorkerPid(1 - rank);
    const int64_t before = serve->Counter("recoveries");
    const std::vector<Answer> found = ReadAll(
        serve.get(), kStreams, kTokens, kStreams * kTokens / 4, [&] { serve->KillWorker(rank); });
    ExpectEqual(found, wanted);
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
  const std::vector<Answer> wanted = ReadAll(serve.get(), kStreams, kTokens, 0, nullptr);
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    // In the second round rank 1 is held by what was the spare.
    const int number = round == 0 ? 1 : 2;
    ExpectEqual(ReadAll(serve.get(), kStreams, kTokens, 50, [&] { serve->KillWorker(number); }),
                wanted);
    EXPECT_OK(serve->WaitState("READY", absl::Seconds(30)));
  }
  EXPECT_THAT(serve->log(), HasSubstr("goes to the spare worker"));
}

TEST(Recovery, AWorkerKilledWhileNothingRunsIsReplaced) {
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(Options(2)));
  const Answer wanted = Read(serve.get(), Request(3, 20), nullptr);
  serve->KillWorker(0);
  // Noticed without any request.
  while (serve->Counter("recoveries") == 0) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_OK(serve->WaitState("READY", absl::Seconds(60)));
  ExpectEqual({Read(serve.get(), Request(3, 20), nullptr)}, {wanted});
  EXPECT_THAT(serve->log(), HasSubstr("ended with signal 9"));
}

TEST(Recovery, ARequestThatKillsWorkersFailsAloneAndItsNeighboursFinish) {
  ServeProcess::Options options = Options(2);
  // Id 299 is in no other prompt, and hardly ever sampled by these.
  options.faults = {{}, {"--fault-token", "299=abort"}};
  ASSERT_OK_AND_ASSIGN(auto serve, ServeProcess::Start(options));
  constexpr int kStreams = 4, kTokens = 120;
  std::vector<Answer> wanted = ReadAll(serve.get(), kStreams, kTokens, 0, nullptr);
  ASSERT_EQ(serve->Counter("recoveries"), 0);
  Answer poisoned;
  const std::vector<Answer> found = ReadAll(serve.get(), kStreams, kTokens, 20, [&] {
    GenerateRequest poison = Request(5, 50);
    poison.mutable_token_ids()->add_ids(299);
    poisoned = Read(serve.get(), poison, nullptr);
  });
  EXPECT_EQ(poisoned.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(ReasonOf(poisoned.status), "POISON_REQUEST");
  EXPECT_THAT(poisoned.status.error_message(), HasSubstr("rank 1"));
  ExpectEqual(found, wanted);
  EXPECT_EQ(serve->Counter("recoveries"), 2) << "once with its neighbours, once alone";
  EXPECT_EQ(serve->Counter("poison_requests"), 1);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
