// Linears of every format, loaded from a checkpoint to the device under test and applied there.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/testing/arm_test.h"
#include "models/quant/linear_method.h"
#include "models/quant/testing/linear_test_util.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::MakeStoredLinear;
using testing::RandomFloats;
using testing::Rounded;
using testing::RowParallelShard;
using testing::StoredLinear;
using testing::TestDevice;
using testing::WholeShard;

class LinearArmTest : public ::testing::TestWithParam<WeightScheme> {};

// Applies the shard to its columns of x [3, k] of BF16 values and compares with the exact product.
void Check(const StoredLinear& s, const LinearShard& shard) {
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), TestDevice(), 0, 1, nullptr, nullptr);
  auto linear =
      LinearMethodFor(s.scheme.weight).Prepare(s.scheme, shard, ActivationQuant::kNone, &store);
  ASSERT_OK(linear.status());
  // The share of the checkpoint is what is stored, whatever the device makes of it.
  int64_t stored = 0;
  for (const auto& t : s.tensors) stored += static_cast<int64_t>(t.second.bytes.size());
  if (shard.rows[0].size == s.n && !shard.row_parallel) {
    EXPECT_EQ(store.total().checkpoint, stored);
  }
  EXPECT_GE(store.total().resident, store.total().checkpoint);

  const int64_t k = shard.columns.size, n = shard.local_n();
  const std::vector<float> x = Rounded(RandomFloats(3 * k, 5), DType::kBF16);
  ArmContext context;
  ArmTensor xt(DType::kBF16, {3, k}, x), out(DType::kF32, {3, n});
  LinearInput input(xt.view());
  ASSERT_OK((*linear)->Apply(context.get(), &input, out.view()));
  const std::vector<float> got = out.Get();
  int64_t i = 0;
  for (const Range& rows : shard.rows) {
    for (int64_t r = rows.begin; r < rows.begin + rows.size; ++r, ++i) {
      for (int64_t t = 0; t < 3; ++t) {
        double sum = 0, magnitude = 0;
        for (int64_t c = 0; c < k; ++c) {
          const double term =
              double{x[t * k + c]} * s.dequantized[r * s.k + shard.columns.begin + c];
          sum += term;
          magnitude += std::fabs(term);
        }
        ASSERT_NEAR(got[t * n + i], sum, 2e-5 * magnitude) << t << " " << r;
      }
    }
  }
}

TEST_P(LinearArmTest, AllColumns) {
  const StoredLinear s = MakeStoredLinear(GetParam(), 150, 1152);
  Check(s, WholeShard(s));
  LinearShard shard = WholeShard(s);
  shard.rows = {{3, 20}, {100, 45}};
  Check(s, shard);
}

TEST_P(LinearArmTest, VirtualShards) {
  const StoredLinear s = MakeStoredLinear(GetParam(), 36, 640);
  for (int rank : {0, 1}) Check(s, RowParallelShard(s, rank, 2));
}

INSTANTIATE_TEST_SUITE_P(Formats, LinearArmTest,
                         ::testing::Values(WeightScheme::kBF16, WeightScheme::kNvfp4,
                                           WeightScheme::kFp8Tensor, WeightScheme::kFp8Channel,
                                           WeightScheme::kFp8Block));

// Small tensors go to the device as they are.
TEST(PlaceTensorArmTest, SlicesOfATensor) {
  StoredLinear s;
  std::vector<float> values(6 * 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  s.AddFloats("weight", DType::kBF16, {6, 4}, values);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), TestDevice(), 1, 2, nullptr, nullptr);
  auto placed = store.PlaceTensor("m.weight", {6, 4}, ShardSpec::Split(6, 1), "norm");
  ASSERT_OK(placed.status());
  EXPECT_EQ(placed->device, TestDevice());
  std::vector<BF16> got(3 * 4);
  ASSERT_OK(CopyBytes(DeviceType::kCpu, got.data(), TestDevice(), placed->data, 3 * 4 * 2));
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(ToFloat(got[i]), values[12 + i]);
}

// A tied head gives its rows back.
TEST(LinearRowsArmTest, RowsOfATiedHead) {
  const StoredLinear s = MakeStoredLinear(WeightScheme::kBF16, 20, 2048);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), TestDevice(), 0, 1, nullptr, nullptr);
  auto linear = LinearMethodFor(WeightScheme::kBF16)
                    .Prepare(s.scheme, WholeShard(s), ActivationQuant::kNone, &store);
  ASSERT_OK(linear.status());
  ArmContext context;
  ArmTensor ids({3}, std::vector<int32_t>{7, 99, 0}), out(DType::kBF16, {3, s.k});
  ASSERT_OK((*linear)->GatherRows(context.get(), ids.view(), 0, out.view()));
  const std::vector<float> got = out.Get();
  for (int64_t c = 0; c < s.k; ++c) {
    ASSERT_EQ(got[c], s.dequantized[7 * s.k + c]);
    ASSERT_EQ(got[s.k + c], 0.0f);
    ASSERT_EQ(got[2 * s.k + c], s.dequantized[c]);
  }
}

}  // namespace
}  // namespace lockstep
