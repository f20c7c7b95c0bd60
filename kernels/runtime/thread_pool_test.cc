#include "kernels/runtime/thread_pool.h"

#include <atomic>
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

}  // namespace
}  // namespace lockstep
