#include "coordinator/admission.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

const absl::Time kStart = absl::UnixEpoch();

absl::Duration RetryAfter(const absl::Status& status) {
  google::rpc::Status details;
  google::rpc::RetryInfo retry;
  if (!details.ParseFromString(DetailsOf(status))) return absl::ZeroDuration();
  for (const auto& any : details.details()) {
    if (any.UnpackTo(&retry)) {
      return absl::Seconds(retry.retry_delay().seconds()) +
             absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  return absl::ZeroDuration();
}

TEST(AdmissionTest, BoundsRequestsAndTokens) {
  Admission admission(2, 100);
  EXPECT_OK(admission.Check(1000, absl::InfiniteFuture(), kStart)) << "the queue is empty";
  admission.OnQueued(60, kStart);
  EXPECT_OK(admission.Check(40, absl::InfiniteFuture(), kStart));
  const absl::Status tokens = admission.Check(41, absl::InfiniteFuture(), kStart);
  EXPECT_EQ(ReasonOf(tokens), "QUEUE_FULL");
  EXPECT_GE(RetryAfter(tokens), absl::Seconds(1));
  admission.OnQueued(1, kStart);
  EXPECT_EQ(ReasonOf(admission.Check(1, absl::InfiniteFuture(), kStart)), "QUEUE_FULL");
  admission.OnRemoved(60, kStart);
  EXPECT_OK(admission.Check(1, absl::InfiniteFuture(), kStart));
  EXPECT_EQ(admission.requests(), 1);
  EXPECT_EQ(admission.tokens(), 1);
}

TEST(AdmissionTest, PredictsFromHowTheQueueMoved) {
  Admission admission(1000, 1 << 20);
  // 100 requests of 10 tokens; 20 of them leave, one each 100 ms: 100 tokens a second.
  for (int i = 0; i < 100; ++i) admission.OnQueued(10, kStart);
  absl::Time now = kStart;
  for (int i = 0; i < 20; ++i) {
    now += absl::Milliseconds(100);
    admission.OnScheduled(10, now);
  }
  EXPECT_EQ(admission.PredictedWait(now), absl::Seconds(8));
  EXPECT_OK(admission.Check(10, now + absl::Seconds(9), now));
  const absl::Status late = admission.Check(10, now + absl::Seconds(6), now);
  EXPECT_TRUE(absl::IsResourceExhausted(late)) << late;
  EXPECT_EQ(ReasonOf(late), "DEADLINE_UNMEETABLE");
  EXPECT_EQ(RetryAfter(late), absl::Seconds(2));
  EXPECT_THAT(std::string(late.message()), ::testing::HasSubstr("takes about 8s"));
  EXPECT_OK(admission.Check(10, absl::InfiniteFuture(), now));
  // A removed request says nothing about speed: 79 are left.
  admission.OnRemoved(10, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 7.9, 1e-6);
}

TEST(AdmissionTest, OnlyTheLastWindowCounts) {
  Admission admission(1000, 1 << 20);
  absl::Time now = kStart;
  for (int i = 0; i < 50; ++i) admission.OnQueued(10, now);
  for (int i = 0; i < 20; ++i) {  // slow: 10 tokens a second
    now += absl::Seconds(1);
    admission.OnScheduled(10, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 300 / 10.0, 4);
  for (int i = 0; i < 25; ++i) {  // and then fast: 25 tokens a second
    now += absl::Milliseconds(400);
    admission.OnScheduled(10, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 50 / 25.0, 0.2);
}

TEST(AdmissionTest, TimeWithoutAQueueDoesNotCount) {
  Admission admission(10, 1000);
  absl::Time now = kStart;
  for (int i = 0; i < 9; ++i) {  // each waits 100 ms, with pauses between
    admission.OnQueued(10, now);
    now += absl::Milliseconds(100);
    admission.OnScheduled(10, now);
    now += absl::Milliseconds(900);
  }
  admission.OnQueued(50, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 0.5, 1e-6);
}

TEST(AdmissionTest, AStuckQueueIsExpectedToStayStuck) {
  Admission admission(10, 1000);
  admission.OnQueued(10, kStart);
  EXPECT_EQ(admission.PredictedWait(kStart + Admission::kLeastEvidence / 2), absl::ZeroDuration());
  const absl::Time later = kStart + absl::Seconds(3);
  EXPECT_EQ(admission.PredictedWait(later), absl::Seconds(3));
  EXPECT_EQ(ReasonOf(admission.Check(1, later + absl::Seconds(2), later)), "DEADLINE_UNMEETABLE");
  EXPECT_OK(admission.Check(1, later + absl::Seconds(4), later));
  // And an empty one is no reason to refuse anything.
  admission.OnRemoved(10, later);
  EXPECT_OK(admission.Check(1, later + absl::Nanoseconds(1), later));
}

// However many arrive at once, the queue never holds more than its cap.
TEST(AdmissionTest, AThousandArrivalsAtOnceNeverExceedTheCap) {
  EngineOptions options = testing::SmallEngine();
  options.max_queued_requests = 64;
  testing::EngineFixture fixture(options);
  std::atomic<int> arrived{0}, admitted{0}, refused{0};
  std::atomic<int64_t> most_queued{0};
  std::vector<std::thread> threads;
  std::vector<std::vector<std::shared_ptr<testing::RecordingSink>>> sinks(20);
  for (size_t t = 0; t < sinks.size(); ++t) {
    threads.emplace_back([&, t]() {
      ++arrived;
      while (arrived < static_cast<int>(sinks.size())) std::this_thread::yield();
      for (int i = 0; i < 50; ++i) {
        auto sink = std::make_shared<testing::RecordingSink>();
        const absl::Status status = fixture.engine.Submit(
            testing::MakeSpec(absl::StrCat(t, "-", i), testing::MakePrompt(20, t), 4), sink);
        if (status.ok()) {
          ++admitted;
          sinks[t].push_back(sink);
        } else {
          EXPECT_EQ(ReasonOf(status), "QUEUE_FULL") << status;
          EXPECT_GE(RetryAfter(status), absl::Seconds(1));
          ++refused;
        }
        const int64_t queued = fixture.engine.stats().requests_queued;
        int64_t most = most_queued;
        while (queued > most && !most_queued.compare_exchange_weak(most, queued)) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted + refused, 1000);
  EXPECT_GT(refused, 0);
  EXPECT_LE(most_queued, 64);
  for (const auto& mine : sinks) {
    for (const auto& sink : mine) EXPECT_TRUE(sink->WaitDone());
  }
  EXPECT_EQ(fixture.engine.stats().counters["requests_finished"], admitted);
}

// While nothing runs, exactly the cap is admitted.
TEST(AdmissionTest, AnEngineThatDoesNotRunAdmitsExactlyTheCap) {
  EngineOptions options = testing::SmallEngine();
  options.max_queued_requests = 64;
  FakeStepOptions steps;
  steps.kv_blocks = options.kv_blocks;
  steps.slots = options.slots;
  FakeStepTransport transport(steps);
  Engine engine(options, &transport, nullptr);  // not started
  std::atomic<int> admitted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 20; ++t) {
    threads.emplace_back([&, t]() {
      for (int i = 0; i < 50; ++i) {
        const absl::Status status =
            engine.Submit(testing::MakeSpec(absl::StrCat(t, "-", i), testing::MakePrompt(20, 1), 4),
                          std::make_shared<testing::RecordingSink>());
        if (status.ok()) ++admitted;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted, 64);
  EXPECT_EQ(engine.stats().requests_queued, 64);
}

}  // namespace
}  // namespace lockstep
