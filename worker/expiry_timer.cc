#include "worker/expiry_timer.h"

#include <utility>

namespace lockstep {

ExpiryTimer::ExpiryTimer(std::function<void()> expired)
    : expired_(std::move(expired)), thread_([this] { Loop(); }) {}

ExpiryTimer::~ExpiryTimer() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void ExpiryTimer::Arm(absl::Duration after) {
  const Clock::time_point deadline = Clock::now() + absl::ToChronoNanoseconds(after);
  std::lock_guard<std::mutex> lock(mu_);
  // The thread looks again when it wakes: only an earlier deadline has to wake it.
  const bool earlier = deadline < deadline_;
  deadline_ = deadline;
  if (earlier) changed_.notify_all();
}

void ExpiryTimer::Disarm() {
  std::lock_guard<std::mutex> lock(mu_);
  deadline_ = Clock::time_point::max();
}

bool ExpiryTimer::armed() {
  std::lock_guard<std::mutex> lock(mu_);
  return deadline_ != Clock::time_point::max();
}

void ExpiryTimer::Loop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stop_) {
    if (deadline_ == Clock::time_point::max()) {
      changed_.wait(lock);
    } else if (Clock::now() < deadline_) {
      changed_.wait_until(lock, deadline_);
    } else {
      deadline_ = Clock::time_point::max();
      lock.unlock();
      expired_();
      lock.lock();
    }
  }
}

}  // namespace lockstep
