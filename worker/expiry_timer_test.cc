#include "worker/expiry_timer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace lockstep {
namespace {

TEST(ExpiryTimer, ExpiresOnceAfterTheDeadline) {
  std::atomic<int> calls{0};
  std::promise<void> called;
  const auto start = ExpiryTimer::Clock::now();
  ExpiryTimer timer([&] {
    if (++calls == 1) called.set_value();
  });
  EXPECT_FALSE(timer.armed());
  timer.Arm(absl::Milliseconds(20));
  EXPECT_TRUE(timer.armed());
  called.get_future().wait();
  EXPECT_GE(ExpiryTimer::Clock::now() - start, std::chrono::milliseconds(20));
  EXPECT_FALSE(timer.armed());
  EXPECT_EQ(calls, 1);
}

TEST(ExpiryTimer, TheLastDeadlineCounts) {
  std::promise<ExpiryTimer::Clock::time_point> called;
  ExpiryTimer timer([&] { called.set_value(ExpiryTimer::Clock::now()); });
  timer.Arm(absl::Hours(1));
  timer.Arm(absl::Milliseconds(400));  // earlier: wakes the thread
  const auto start = ExpiryTimer::Clock::now();
  timer.Arm(absl::Milliseconds(600));
  EXPECT_GE(called.get_future().get() - start, std::chrono::milliseconds(600));
}

TEST(ExpiryTimer, ADisarmedOneNeverCalls) {
  ExpiryTimer never([] { ADD_FAILURE() << "it was disarmed"; });
  never.Arm(absl::Milliseconds(400));
  never.Disarm();
  std::promise<void> later;
  ExpiryTimer timer([&] { later.set_value(); });
  timer.Arm(absl::Milliseconds(600));
  later.get_future().wait();
}

TEST(ExpiryTimer, ItsFunctionMayArmItAgain) {
  std::promise<void> twice;
  int calls = 0;
  ExpiryTimer* self = nullptr;
  ExpiryTimer timer([&] {
    if (++calls == 2) {
      twice.set_value();
    } else {
      self->Arm(absl::ZeroDuration());
    }
  });
  self = &timer;
  timer.Arm(absl::ZeroDuration());
  twice.get_future().wait();
}

}  // namespace
}  // namespace lockstep
