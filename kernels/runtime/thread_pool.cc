#include "kernels/runtime/thread_pool.h"

#include "kernels/base/check.h"

namespace lockstep {
namespace {

// About 20 us on current machines: longer than the gap between two ops of a step, short enough to
// leave the core to another rank's thread.
constexpr int kSpins = 4000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { Run(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
    generation_.fetch_add(1);
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

void ThreadPool::Run(int) {
  uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen;
         ++spin) {
      Pause();
    }
    {
      std::unique_lock<std::mutex> lock(mu_);
      start_.wait(lock, [&] { return generation_.load() != seen; });
      seen = generation_.load();
      if (stop_) return;
    }
    Work();
    if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mu_);
      done_.notify_one();
    }
  }
}

void ThreadPool::ParallelFor(int64_t count, const std::function<void(int64_t)>& fn) {
  if (count <= 0) return;
  if (threads_.empty() || count == 1) {
    for (int64_t i = 0; i < count; ++i) fn(i);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    fn_ = &fn;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    active_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }
  start_.notify_all();
  Work();
  for (int spin = 0; spin < kSpins && active_.load(std::memory_order_acquire) != 0; ++spin) Pause();
  std::unique_lock<std::mutex> lock(mu_);
  done_.wait(lock, [&] { return active_.load(std::memory_order_acquire) == 0; });
}

}  // namespace lockstep
