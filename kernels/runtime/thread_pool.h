// ThreadPool: the fixed set of threads that one CPU rank computes with. Work is cut into shards
// whose number and borders depend on the problem alone, never on the number of threads, so that
// results cannot depend on it either.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace lockstep {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread: 1 starts none. At least 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls fn(i) once for every i in [0, count), on any thread, in any order, and returns when all
  // calls have returned. The calling thread takes part, and never waits for a thread that has not
  // begun: one that comes late finds the region closed. Called by one thread at a time; fn must not
  // call it again. Waiting threads spin shortly, then give way to others, then block.
  void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> fn);

 private:
  void Run();
  void Work();
  // Takes part in the region that `region` shows, unless it has closed.
  void Join(uint64_t region);

  std::vector<std::thread> threads_;
  // Of the open region; written while none is open.
  const absl::FunctionRef<void(int64_t)>* fn_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  // The region: its number, whether threads may join, how many have. See thread_pool.cc.
  alignas(64) std::atomic<uint64_t> region_{0};
  alignas(64) std::atomic<uint64_t> left_{0};  // threads that have joined the region and are done
  std::atomic<int> sleepers_{0};               // threads that block on start_
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  std::mutex mu_;  // of the two conditions; guards nothing else
  std::condition_variable start_;
  std::condition_variable done_;
};

}  // namespace lockstep
