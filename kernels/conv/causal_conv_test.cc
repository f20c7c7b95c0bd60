#include "kernels/conv/causal_conv.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::BatchBuilder;
using testing::CpuArmScope;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;
using testing::TestDevice;

constexpr int64_t kChannels = 83, kWidth = 4, kTokens = 75;

struct Caches {
  explicit Caches(DType act)
      : conv(act, {2, kWidth - 1, kChannels}), snapshot(act, {1, kWidth - 1, kChannels}) {
    conv.Set(std::vector<float>(2 * (kWidth - 1) * kChannels, 1e9f));
  }
  ConvState view() const { return {conv.view(), snapshot.view()}; }
  ArmTensor conv, snapshot;
};

TEST(CausalConv, MatchesDoublePrecisionWithAndWithoutBias) {
  for (bool with_bias : {false, true}) {
    ArmContext context;
    // Columns of a wider tensor, as a joint projection gives them.
    ArmTensor wide(DType::kF32, {kTokens, kChannels + 5},
                   RandomFloats(kTokens * (kChannels + 5), 1, 2.0f));
    ArmTensor w(DType::kBF16, {kChannels, kWidth}, RandomFloats(kChannels * kWidth, 2));
    ArmTensor bias(DType::kBF16, {kChannels}, RandomFloats(kChannels, 3));
    ArmTensor y(DType::kF32, {kTokens, kChannels});
    const Caches caches(DType::kF32);
    BatchBuilder batch({{1, 0, kTokens, {}}});
    ASSERT_OK(CausalConv(context.get(), batch.batch(), wide.view().Columns(3, kChannels), w.view(),
                         with_bias ? bias.view() : TensorView(), caches.view(), y.view()));
    EXPECT_EQ(context.op_launches(), 1);
    const auto x = wide.Get(), weight = w.Get(), b = bias.Get(), got = y.Get();
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < kChannels; ++c) {
        double sum = with_bias ? b[c] : 0.0;
        for (int64_t j = 0; j < kWidth; ++j) {
          const int64_t from = t - (kWidth - 1) + j;
          if (from >= 0) sum += double{weight[c * kWidth + j]} * x[from * (kChannels + 5) + 3 + c];
        }
        ASSERT_NEAR(got[t * kChannels + c], sum / (1 + std::exp(-sum)), 2e-6);
      }
    }
  }
}

TEST(CausalConv, ChunksMatesSnapshotsAndInstructionSetsGiveTheSameBits) {
  const CpuIsa before = GetCpuIsa();
  for (DType act : {DType::kF32, DType::kBF16}) {
    ArmTensor x(act, {kTokens, kChannels}, RandomFloats(kTokens * kChannels, 4, 2.0f));
    ArmTensor w(DType::kF32, {kChannels, kWidth}, RandomFloats(kChannels * kWidth, 5));
    ArmTensor bias(DType::kF32, {kChannels}, RandomFloats(kChannels, 6));
    ArmTensor want(act, {kTokens, kChannels});
    {
      ArmContext context(1);
      BatchBuilder batch({{0, 0, kTokens, {}}});
      ASSERT_OK(CausalConv(context.get(), batch.batch(), x.view(), w.view(), bias.view(),
                           Caches(act).view(), want.view()));
    }
    for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      if (!HasCpuIsa(isa)) continue;
      SetCpuIsa(isa);
      ArmContext context(2);
      const Caches caches(act);
      ArmTensor got(act, {kTokens, kChannels});
      int32_t start = 0;
      for (int32_t rows : {1, 2, 60, 1, 11}) {
        BatchBuilder batch({{1, start, rows, {}}}, start == 63
                                                       ? std::vector<testing::Snapshot>{{0, 64, 0}}
                                                       : std::vector<testing::Snapshot>());
        ASSERT_OK(CausalConv(context.get(), batch.batch(), x.view().Rows(start, rows), w.view(),
                             bias.view(), caches.view(), got.view().Rows(start, rows)));
        start += rows;
      }
      EXPECT_EQ(got.GetBytes(), want.GetBytes());
      // The raw inputs before the grid point.
      const auto all = x.Get(), snapshot = caches.snapshot.Get();
      EXPECT_EQ(snapshot,
                std::vector<float>(all.begin() + 61 * kChannels, all.begin() + 64 * kChannels));
    }
  }
  SetCpuIsa(before);
}

// Rows with and without states, snapshots in both, states shorter and longer than the chunk.
TEST(CausalConv, ArmsGiveTheSameBitsForEveryWidth) {
  for (int64_t width : {2, 3, 4, 8}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      const auto run = [&] {
        ArmContext context;
        const int64_t tokens = 1 + 5 + 90 + 2, channels = 300;
        BatchBuilder batch({{3, 7, 1, {}}, {0, 0, 5, {}}, {2, 62, 90, {}}, {1, 63, 2, {}}},
                           {{2, 64, 0}, {2, 128, 1}, {3, 64, 2}});
        ArmTensor x(act, {tokens, channels}, RandomFloats(tokens * channels, 7, 2.0f));
        ArmTensor w(DType::kBF16, {channels, width}, RandomFloats(channels * width, 8));
        ArmTensor bias(DType::kF32, {channels}, RandomFloats(channels, 9));
        const Shape states = {4, width - 1, channels};
        ArmTensor conv(act, states, RandomFloats(states.num_elements(), 10, 2.0f));
        ArmTensor snapshot(act, {3, width - 1, channels}), y(act, {tokens, channels});
        CHECK_OK(CausalConv(context.get(), batch.batch(), x.view(), w.view(), bias.view(),
                            {conv.view(), snapshot.view()}, y.view()));
        return std::vector<std::vector<uint8_t>>{y.GetBytes(), conv.GetBytes(),
                                                 snapshot.GetBytes()};
      };
      const auto got = run();
      const CpuArmScope cpu;
      EXPECT_EQ(got, run()) << width;
    }
  }
}

TEST(CausalConv, RefusesWrongTensorsByName) {
  ArmContext context;
  const Caches caches(DType::kF32);
  BatchBuilder batch({{0, 0, 2, {}}});
  ArmTensor x(DType::kF32, {2, kChannels}), y(DType::kF32, {2, kChannels});
  ArmTensor w(DType::kF32, {kChannels, kWidth}), narrow(DType::kF32, {2, 8});
  ArmTensor wide(DType::kF32, {kChannels, 9});
  const auto run = [&](TensorView in, TensorView weight, TensorView bias) {
    return CausalConv(context.get(), batch.batch(), in, weight, bias, caches.view(), y.view());
  };
  EXPECT_THAT(run(narrow.view(), w.view(), {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("causal_conv: x is F32[2, 8], shape [2, 83] is needed")));
  EXPECT_THAT(run(x.view(), wide.view(), {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the width is 9; 2 to 8")));
  EXPECT_THAT(run(x.view(), w.view(), w.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("bias is F32[83, 4]")));
  EXPECT_THAT(run(y.view(), w.view(), {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("x and y are one tensor")));
}

TEST(CausalConv, DryRunTouchesNothing) {
  DryRunContext context;
  BatchBuilder batch({{0, 0, 2, {}}});
  const TensorView x(nullptr, DType::kF32, {2, kChannels}, TestDevice()),
      w(nullptr, DType::kF32, {kChannels, 4}, TestDevice());
  EXPECT_OK(CausalConv(context.get(), batch.batch(), x, w, {}, Caches(DType::kF32).view(), x));
}

}  // namespace
}  // namespace lockstep
