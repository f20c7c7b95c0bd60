// More requests at once than there is room for: what is admitted is bounded, what is refused says
// when to come back.
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace testing {
namespace {

bool HasRetryInfo(const absl::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(DetailsOf(status)));
  for (const auto& detail : details.details()) {
    if (detail.Is<google::rpc::RetryInfo>()) return true;
  }
  return false;
}

TEST(EngineOverloadTest, AThousandArrivalsAdmitNoMoreThanTheCap) {
  constexpr int kThreads = 8, kArrivals = 1000, kCap = 64;
  EngineOptions options = SmallEngine();
  options.max_queued_requests = kCap - options.slots;
  EngineFixture fixture(options);
  fixture.transport.Pause();
  std::mutex mu;
  std::vector<std::shared_ptr<RecordingSink>> accepted;
  std::atomic<int> next{0}, refused{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < kThreads; ++t) {
    clients.emplace_back([&] {
      for (int i = next++; i < kArrivals; i = next++) {
        auto sink = std::make_shared<RecordingSink>();
        const absl::Status status = fixture.engine.Submit(
            MakeSpec(absl::StrCat("r", i), MakePrompt(10, static_cast<uint64_t>(i)), 2), sink);
        if (status.ok()) {
          std::lock_guard<std::mutex> lock(mu);
          accepted.push_back(sink);
          continue;
        }
        ++refused;
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted));
        EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
        EXPECT_TRUE(HasRetryInfo(status));
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(accepted.size() + static_cast<size_t>(refused), static_cast<size_t>(kArrivals));
  EXPECT_LE(accepted.size(), static_cast<size_t>(kCap));
  EXPECT_GE(accepted.size(), static_cast<size_t>(options.max_queued_requests));
  const EngineStats stats = fixture.engine.stats();
  EXPECT_EQ(stats.requests_running + stats.requests_queued, static_cast<int64_t>(accepted.size()));
  fixture.transport.Resume();
  for (const auto& sink : accepted) {
    ASSERT_TRUE(sink->WaitDone());
    EXPECT_OK(sink->status());
    EXPECT_EQ(sink->breach(), "");
  }
  EXPECT_TRUE(fixture.WaitIdle());
  EXPECT_EQ(Leaks(fixture.engine), "");
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
