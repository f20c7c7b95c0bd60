// ThreadPool: the fixed set of threads that one CPU rank computes with. Work is cut into shards
// whose number and borders depend on the problem alone, never on the number of threads, so that
// results cannot depend on it either.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

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
  // calls have returned. The calling thread takes part. Called by one thread at a time; fn must not
  // call it again. Waiting threads spin shortly, then block.
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& fn);

 private:
  void Run(int worker);
  void Work();

  std::vector<std::thread> threads_;
  std::mutex mu_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(int64_t)>* fn_ = nullptr;  // guarded by mu_ for changes
  int64_t count_ = 0;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> active_{0};
  bool stop_ = false;
};

}  // namespace lockstep
