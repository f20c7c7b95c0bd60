#include "kernels/runtime/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(ThreadPool, CallsEveryIndexOnceForAnyNumberOfThreads) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      pool.ParallelFor(count, [&](int64_t i) { calls[static_cast<size_t>(i)]++; });
      for (auto& c : calls) EXPECT_EQ(c.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyShortLoopsFinish) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 20000; ++i) pool.ParallelFor(5, [&](int64_t j) { sum += j; });
  EXPECT_EQ(sum.load(), 20000 * 10);
}

// Between two loops the threads have gone to sleep, are about to, or still spin.
TEST(ThreadPool, LoopsAfterPausesFinish) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 60; ++i) {
    pool.ParallelFor(7, [&](int64_t j) { sum += j; });
    std::this_thread::sleep_for(std::chrono::microseconds(20 * i));
  }
  EXPECT_EQ(sum.load(), 60 * 21);
}

// Every index has been called when the loop returns, and none of it is touched later.
TEST(ThreadPool, WhatALoopWroteIsSeenAfterIt) {
  ThreadPool pool(4);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int> values(64, -1);
    pool.ParallelFor(64, [&](int64_t j) { values[static_cast<size_t>(j)] = i; });
    EXPECT_EQ(values, std::vector<int>(64, i));
  }
}

}  // namespace
}  // namespace lockstep
