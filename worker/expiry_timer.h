// ExpiryTimer: calls a function once when a deadline passes that nobody moved. The function runs on
// the timer's own thread, which touches no device. Time is monotonic and runs on while the process
// is stopped: a deadline that passed meanwhile expires as soon as the process goes on.
//
// Thread safe. Arm and Disarm never wait for the function.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "absl/time/time.h"

namespace lockstep {

class ExpiryTimer {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ExpiryTimer(std::function<void()> expired);
  // Waits for the function when it runs.
  ~ExpiryTimer();

  // From now on: the deadline is `after` from now, earlier or later than the one before.
  void Arm(absl::Duration after);
  void Disarm();
  bool armed();

 private:
  void Loop();

  const std::function<void()> expired_;
  std::mutex mu_;
  std::condition_variable changed_;
  Clock::time_point deadline_ = Clock::time_point::max();  // guarded by mu_; max: none
  bool stop_ = false;                                      // guarded by mu_
  std::thread thread_;
};

}  // namespace lockstep
