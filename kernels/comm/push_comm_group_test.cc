#include "kernels/comm/push_comm_group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>

#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/comm/comm_self_test.h"
#include "kernels/comm/tree_sum.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/device_stream.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;

constexpr DeviceType kCuda = DeviceType::kCuda;
constexpr uint64_t kEpoch = 5;

// The ranks of a group, each with a stream of its own, driven by one thread: launches do not wait.
class Ranks {
 public:
  explicit Ranks(int world, PushOptions options = {}) {
    auto groups = MakeLocalPushCommGroups(world, kEpoch, options);
    CHECK_OK(groups.status());
    groups_ = *std::move(groups);
    for (int r = 0; r < world; ++r) {
      auto stream = DeviceStream::Create(kCuda);
      CHECK_OK(stream.status());
      streams_.push_back(*std::move(stream));
      counters_.push_back(std::make_unique<Counters>());
      workspaces_.push_back(std::make_unique<Workspace>());
      CHECK_OK(workspaces_.back()->Allocate(kCuda, 1 << 20));
      groups_[static_cast<size_t>(r)]->BeginStep(1, 77);
    }
  }

  int world() const { return static_cast<int>(groups_.size()); }
  CommGroup* group(int r) { return groups_[static_cast<size_t>(r)].get(); }
  DeviceStream* stream(int r) { return streams_[static_cast<size_t>(r)].get(); }
  ExecContext context(int r) {
    ExecContext ctx;
    ctx.device = kCuda;
    ctx.stream = stream(r)->handle();
    ctx.workspace = workspaces_[static_cast<size_t>(r)].get();
    ctx.counters = counters_[static_cast<size_t>(r)].get();
    return ctx;
  }
  void Synchronize() {
    for (int r = 0; r < world(); ++r) ASSERT_OK(stream(r)->Synchronize());
  }
  void ExpectOk() {
    for (int r = 0; r < world(); ++r) EXPECT_OK(group(r)->Check());
  }

 private:
  std::vector<std::unique_ptr<Workspace>> workspaces_;
  std::vector<std::unique_ptr<Counters>> counters_;
  std::vector<std::unique_ptr<DeviceStream>> streams_;
  std::vector<std::unique_ptr<CommGroup>> groups_;
};

// 16 binades and the values that break careless sums.
std::vector<float> Values(int rank, int64_t n, bool special) {
  std::vector<float> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t h = Mix64(static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(i));
    float x = static_cast<float>((h >> 8) & 0xffffff) * (1.0f / 16777216.0f) *
              static_cast<float>(1 << ((h >> 40) & 15));
    if (special && h % 7 == 0) {
      const float odd[] = {0.0f, -0.0f, std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::denorm_min(),
                           std::numeric_limits<float>::max()};
      x = odd[(h >> 20) % 5];
    }
    v[static_cast<size_t>(i)] = (h & 1) != 0 ? -x : x;
  }
  return v;
}

DeviceBuffer OnDevice(const void* data, int64_t bytes) {
  auto buffer = DeviceBuffer::Allocate(kCuda, bytes);
  CHECK_OK(buffer.status());
  CHECK_OK(CopyBytes(kCuda, buffer->data(), DeviceType::kCpu, data, bytes));
  return *std::move(buffer);
}

std::vector<uint32_t> Bits(const DeviceBuffer& buffer, int64_t words) {
  std::vector<uint32_t> v(static_cast<size_t>(words));
  CHECK_OK(CopyBytes(DeviceType::kCpu, v.data(), kCuda, buffer.data(), words * 4));
  return v;
}

class PushWorlds : public ::testing::TestWithParam<int> {};

TEST_P(PushWorlds, SumsAreTheTreeOfTheRanksBitForBit) {
  PushOptions options;
  options.message_bytes = 64 << 10;  // the largest sizes go in pieces
  Ranks ranks(GetParam(), options);
  const int64_t sizes[] = {1, 2, 3, 17, 1023, 1024, 1025, 5120, 8192, 8193, 40000, 65536, 200001};
  for (const int64_t n : sizes) {
    for (const bool special : {false, true}) {
      std::vector<std::vector<float>> values;
      std::vector<const float*> parts;
      std::vector<DeviceBuffer> buffers;
      constexpr uint32_t kCanary = 0xabadcafe;
      for (int r = 0; r < ranks.world(); ++r) {
        values.push_back(Values(r, n, special));
        std::vector<float> padded = values.back();
        for (int i = 0; i < 4; ++i) {
          float canary;
          std::memcpy(&canary, &kCanary, 4);
          padded.push_back(canary);
        }
        buffers.push_back(OnDevice(padded.data(), (n + 4) * 4));
      }
      for (const auto& v : values) parts.push_back(v.data());
      std::vector<float> expected(static_cast<size_t>(n));
      TreeSum(nullptr, parts, n, expected.data());
      for (int r = 0; r < ranks.world(); ++r) {
        ExecContext ctx = ranks.context(r);
        ASSERT_OK(ranks.group(r)->AllReduce(
            &ctx, buffers[static_cast<size_t>(r)].View(DType::kF32, Shape{n})));
      }
      ranks.Synchronize();
      ranks.ExpectOk();
      for (int r = 0; r < ranks.world(); ++r) {
        const std::vector<uint32_t> bits = Bits(buffers[static_cast<size_t>(r)], n + 4);
        int64_t wrong = 0;
        for (int64_t i = 0; i < n; ++i) {
          float found;
          std::memcpy(&found, &bits[static_cast<size_t>(i)], 4);
          const float want = expected[static_cast<size_t>(i)];
          const bool both_nan = found != found && want != want;
          if (std::memcmp(&found, &want, 4) != 0 && !both_nan) ++wrong;
        }
        EXPECT_EQ(wrong, 0) << n << " values, rank " << r;
        for (int i = 0; i < 4; ++i) EXPECT_EQ(bits[static_cast<size_t>(n + i)], kCanary);
      }
    }
  }
}

TEST_P(PushWorlds, GathersAreInRankOrder) {
  PushOptions options;
  options.message_bytes = 16 << 10;
  Ranks ranks(GetParam(), options);
  for (const int64_t n : {2, 6, 4096, 30002}) {  // BF16 elements
    std::vector<DeviceBuffer> locals;
    std::vector<DeviceBuffer> outs;
    std::vector<uint32_t> all;
    for (int r = 0; r < ranks.world(); ++r) {
      const std::vector<float> v = Values(r, n / 2, true);
      locals.push_back(OnDevice(v.data(), n * 2));
      const std::vector<uint32_t> bits = Bits(locals.back(), n / 2);
      all.insert(all.end(), bits.begin(), bits.end());
    }
    for (int r = 0; r < ranks.world(); ++r) {
      const std::vector<uint32_t> zeros(all.size(), 0);
      outs.push_back(OnDevice(zeros.data(), static_cast<int64_t>(zeros.size()) * 4));
    }
    for (int r = 0; r < ranks.world(); ++r) {
      ExecContext ctx = ranks.context(r);
      ASSERT_OK(ranks.group(r)->AllGather(
          &ctx, locals[static_cast<size_t>(r)].View(DType::kBF16, Shape{n}),
          outs[static_cast<size_t>(r)].View(DType::kBF16, Shape{ranks.world(), n})));
    }
    ranks.Synchronize();
    ranks.ExpectOk();
    for (const DeviceBuffer& out : outs) {
      EXPECT_EQ(Bits(out, static_cast<int64_t>(all.size())), all) << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PushWorlds, ::testing::Values(2, 4));

// Ranks run ahead of each other in a random way, in a captured graph, ten thousand times.
TEST(PushCommGroup, TenThousandSkewedReplaysHaveNoError) {
  constexpr int64_t kN = 1300;
  constexpr int kReplays = 10000;
  Ranks ranks(2);
  std::vector<DeviceBuffer> data;
  std::vector<DeviceGraph> graphs;
  // Each replay adds the ranks' numbers. They start as 1 and -1 on odd places, 0 elsewhere, so that
  // every later sum is 0; a packet of another collective would bring a 1 back.
  std::vector<float> ones(static_cast<size_t>(kN), 0.0f);
  for (int r = 0; r < 2; ++r) {
    for (int64_t i = 0; i < kN; ++i)
      ones[static_cast<size_t>(i)] = i % 2 == 0 ? 0.0f : r == 0 ? 1.0f : -1.0f;
    data.push_back(OnDevice(ones.data(), kN * 4));
  }
  for (int r = 0; r < 2; ++r) {
    ExecContext ctx = ranks.context(r);
    ASSERT_OK(ranks.stream(r)->BeginCapture());
    ASSERT_OK(
        ranks.group(r)->AllReduce(&ctx, data[static_cast<size_t>(r)].View(DType::kF32, Shape{kN})));
    ASSERT_OK_AND_ASSIGN(DeviceGraph graph, ranks.stream(r)->EndCapture());
    graphs.push_back(std::move(graph));
  }
  const auto run = [&](int r) {
    for (int i = 0; i < kReplays; ++i) {
      const uint64_t h = Mix64(static_cast<uint64_t>(i) * 2 + static_cast<uint64_t>(r));
      if (h % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(h % 200));
      CHECK_OK(ranks.stream(r)->Launch(graphs[static_cast<size_t>(r)]));
      if (h % 97 == 0) CHECK_OK(ranks.stream(r)->Synchronize());
    }
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  ranks.Synchronize();
  ranks.ExpectOk();
  for (const DeviceBuffer& buffer : data) {
    EXPECT_EQ(Bits(buffer, kN), std::vector<uint32_t>(static_cast<size_t>(kN), 0u));
  }
}

TEST(PushCommGroup, TheSelfTestPasses) {
  Ranks ranks(2);
  absl::StatusOr<uint64_t> digests[2] = {absl::UnknownError(""), absl::UnknownError("")};
  const auto run = [&](int r) {
    ExecContext ctx = ranks.context(r);
    digests[r] = RunCommSelfTest(&ctx, ranks.group(r));
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  ASSERT_OK(digests[0].status());
  ASSERT_OK(digests[1].status());
  EXPECT_EQ(*digests[0], *digests[1]);
}

TEST(PushCommGroup, RanksOfDifferentStepsAreToldSo) {
  Ranks ranks(2);
  ranks.group(0)->BeginStep(2, 100);
  ranks.group(1)->BeginStep(2, 101);
  for (int r = 0; r < 2; ++r) {
    ExecContext ctx = ranks.context(r);
    ASSERT_OK(ranks.group(r)->Barrier(&ctx));
  }
  ranks.Synchronize();
  EXPECT_THAT(ranks.group(0)->Check(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                                HasSubstr("do not run the same step")));
  EXPECT_THAT(ranks.group(1)->Check(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("at rank 0")));
  // Later collectives end at once, with the first error.
  DeviceBuffer data = OnDevice(Values(0, 64, false).data(), 256);
  ExecContext ctx = ranks.context(0);
  EXPECT_THAT(ranks.group(0)->AllReduce(&ctx, data.View(DType::kF32, Shape{64})),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("same step")));
}

TEST(PushCommGroup, APeerThatStaysAwayEndsInTheTimeBound) {
  PushOptions options;
  options.timeout = absl::Milliseconds(200);
  Ranks ranks(2, options);
  DeviceBuffer data = OnDevice(Values(0, 5000, false).data(), 20000);
  ExecContext ctx = ranks.context(0);
  ASSERT_OK(ranks.group(0)->AllReduce(&ctx, data.View(DType::kF32, Shape{5000})));
  ASSERT_OK(ranks.stream(0)->Synchronize());
  EXPECT_THAT(ranks.group(0)->Check(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 sent nothing")));
}

TEST(PushCommGroup, AbortEndsAWaitWithItsReason) {
  PushOptions options;
  options.timeout = absl::Seconds(60);
  Ranks ranks(2, options);
  DeviceBuffer data = OnDevice(Values(0, 5000, false).data(), 20000);
  ExecContext ctx = ranks.context(0);
  ASSERT_OK(ranks.group(0)->AllReduce(&ctx, data.View(DType::kF32, Shape{5000})));
  ranks.group(0)->Abort("rank 1 is gone");
  ASSERT_OK(ranks.stream(0)->Synchronize());
  EXPECT_THAT(ranks.group(0)->Check(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("rank 1 is gone")));
  EXPECT_THAT(ranks.group(0)->Barrier(&ctx),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("rank 1 is gone")));
}

}  // namespace
}  // namespace lockstep
