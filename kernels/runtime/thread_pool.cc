#include "kernels/runtime/thread_pool.h"

#include <sched.h>

#include "kernels/base/check.h"

namespace lockstep {
namespace {

// A wait of some microseconds is spun away. One of up to some hundred, such as that between two
// steps, also lets other threads run on the core, which a coordinator or another rank may need.
constexpr int kSpins = 200;
constexpr int kYields = 200;
constexpr int kSpinsPerYield = 16;

// region_ = number << 16 | open << 15 | threads that have joined.
constexpr uint64_t kOpen = 1 << 15;
constexpr uint64_t kJoined = kOpen - 1;
constexpr int kNumberShift = 16;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits for ready() for a while. Whether it came.
template <typename Ready>
bool SpinUntil(const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    for (int j = 0; j < kSpinsPerYield; ++j) {
      if (ready()) return true;
      Pause();
    }
  }
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK(num_threads >= 1 && num_threads <= static_cast<int>(kJoined)) << num_threads << " threads ";
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_.store(true);
  }
  start_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ThreadPool::Work() {
  for (;;) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= count_) return;
    (*fn_)(i);
  }
}

void ThreadPool::Join(uint64_t region) {
  const uint64_t number = region >> kNumberShift;
  // Joining and closing change one word: who has joined is waited for, who has not touches nothing.
  while ((region & kOpen) != 0 && region >> kNumberShift == number) {
    if (!region_.compare_exchange_weak(region, region + 1, std::memory_order_acquire)) continue;
    Work();
    left_.fetch_add(1);
    if (caller_sleeps_.load()) {
      std::lock_guard<std::mutex> lock(mu_);
      done_.notify_one();
    }
    return;
  }
}

void ThreadPool::Run() {
  uint64_t seen = 0;
  const auto ready = [&] { return region_.load() >> kNumberShift != seen || stop_.load(); };
  for (;;) {
    if (!SpinUntil(ready)) {
      // The caller opens a region, then looks for sleepers; a thread counts itself, then looks for
      // a region: one of them sees the other.
      std::unique_lock<std::mutex> lock(mu_);
      sleepers_.fetch_add(1);
      start_.wait(lock, ready);
      sleepers_.fetch_sub(1);
    }
    if (stop_.load()) return;
    const uint64_t region = region_.load(std::memory_order_acquire);
    seen = region >> kNumberShift;
    Join(region);
  }
}

void ThreadPool::ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> fn) {
  if (count <= 0) return;
  if (threads_.empty() || count == 1) {
    for (int64_t i = 0; i < count; ++i) fn(i);
    return;
  }
  fn_ = &fn;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  left_.store(0, std::memory_order_relaxed);
  const uint64_t number = (region_.load(std::memory_order_relaxed) >> kNumberShift) + 1;
  region_.store(number << kNumberShift | kOpen);
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mu_); }
    start_.notify_all();
  }
  Work();
  const uint64_t joined = region_.fetch_and(~kOpen, std::memory_order_acq_rel) & kJoined;
  const auto all_left = [&] { return left_.load() == joined; };
  if (SpinUntil(all_left)) return;
  std::unique_lock<std::mutex> lock(mu_);
  caller_sleeps_.store(true);
  done_.wait(lock, all_left);
  caller_sleeps_.store(false);
}

}  // namespace lockstep
