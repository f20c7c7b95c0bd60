// Tests of the linears of models: loading through a resolver, reduction over ranks, refusals.
#include "models/layers/linear.h"

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/comm/fake_comm_group.h"
#include "models/quant/testing/linear_test_util.h"

namespace lockstep {
namespace {

using ::lockstep::testing::FakeResolver;
using ::lockstep::testing::MakeStoredLinear;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::StoredLinear;
using ::lockstep::testing::TestContext;
using ::testing::HasSubstr;

struct Rank {
  Rank(const Checkpoint& checkpoint, const SchemeResolver& resolver, int rank, int world)
      : store(&checkpoint, DeviceType::kCpu, rank, world, nullptr, nullptr) {
    loader.store = &store;
    loader.resolver = &resolver;
    loader.activation_quant = ActivationQuant::kCheckpoint;
  }
  WeightStore store;
  LinearLoader loader;
  TestContext context;
};

std::vector<float> Ramp(int64_t size) {
  std::vector<float> x(size);
  for (int64_t i = 0; i < size; ++i) x[i] = 0.01f * static_cast<float>(i % 97) - 0.4f;
  return x;
}

TEST(LinearTest, ReduceGivesEveryRankTheBitsOfOneRank) {
  StoredLinear s = MakeStoredLinear(WeightScheme::kFp8Channel, 24, 384, DType::kBF16);
  s.scheme.activation = ActivationScheme::kFp8PerToken;
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  const FakeResolver resolver(s.scheme);
  std::vector<float> x = Ramp(3 * s.k), expected(3 * s.n);
  const TensorView xv(x.data(), DType::kF32, {3, s.k});
  {
    Rank rank(*checkpoint, resolver, 0, 1);
    ASSERT_OK_AND_ASSIGN(const Linear linear,
                         Linear::RowParallel(rank.loader, "m", "mlp", s.n, s.k));
    LinearInput input(xv);
    ASSERT_OK(linear.ApplyReduce(rank.context.ctx(), nullptr, &input,
                                 TensorView(expected.data(), DType::kF32, {3, s.n})));
  }
  constexpr int kWorld = 4;
  const auto comms = MakeFakeCommGroups(kWorld, /*epoch=*/1);
  std::vector<std::vector<float>> sums(kWorld, std::vector<float>(3 * s.n));
  std::vector<absl::Status> statuses(kWorld);
  std::vector<std::thread> threads;
  for (int r = 0; r < kWorld; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(*checkpoint, resolver, r, kWorld);
      comms[r]->BeginStep(1, 2);
      absl::StatusOr<Linear> linear = Linear::RowParallel(rank.loader, "m", "mlp", s.n, s.k);
      statuses[r] = linear.status();
      if (!linear.ok()) return;
      LinearInput input(xv.Columns(r * s.k / kWorld, s.k / kWorld));
      statuses[r] = linear->ApplyReduce(rank.context.ctx(), comms[r].get(), &input,
                                        TensorView(sums[r].data(), DType::kF32, {3, s.n}));
    });
  }
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < kWorld; ++r) {
    ASSERT_OK(statuses[r]);
    EXPECT_EQ(0, std::memcmp(sums[r].data(), expected.data(), expected.size() * 4)) << r;
  }
}

TEST(LinearTest, ColumnParallelHoldsItsRowsAndRoundsOnce) {
  const StoredLinear s = MakeStoredLinear(WeightScheme::kNvfp4, 96, 64);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  const FakeResolver resolver(s.scheme);
  std::vector<float> x = Ramp(2 * s.k), whole(2 * s.n);
  const TensorView xv(x.data(), DType::kF32, {2, s.k});
  Rank one(*checkpoint, resolver, 0, 1);
  const ShardSpec rows = ShardSpec::Split({{4, 8, false}, {8, 8, false}});
  ASSERT_OK_AND_ASSIGN(const Linear all,
                       Linear::ColumnParallel(one.loader, "m", "mlp", s.n, s.k, rows));
  LinearInput all_input(xv);
  ASSERT_OK(
      all.Apply(one.context.ctx(), &all_input, TensorView(whole.data(), DType::kF32, {2, s.n})));
  for (int r = 0; r < 2; ++r) {
    Rank rank(*checkpoint, resolver, r, 2);
    ASSERT_OK_AND_ASSIGN(const Linear linear,
                         Linear::ColumnParallel(rank.loader, "m", "mlp", s.n, s.k, rows));
    ASSERT_EQ(linear.local_n(), 48);
    std::vector<BF16> out(2 * 48);
    LinearInput input(xv);
    ASSERT_OK(
        linear.Apply(rank.context.ctx(), &input, TensorView(out.data(), DType::kBF16, {2, 48})));
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t i = 0; i < 48; ++i) {
        const int64_t n = i < 16 ? r * 16 + i : 32 + r * 32 + (i - 16);
        EXPECT_EQ(out[t * 48 + i].bits, ToBF16(whole[t * s.n + n]).bits) << r << " " << i;
      }
    }
  }
}

TEST(LinearTest, ShardsKeptApartJoinToTheSum) {
  StoredLinear s = MakeStoredLinear(WeightScheme::kFp8Block, 24, 384);
  s.scheme.activation = ActivationScheme::kFp8Block128;
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  const FakeResolver resolver(s.scheme);
  std::vector<float> x = Ramp(3 * s.k), sum(3 * s.n);
  const TensorView xv(x.data(), DType::kF32, {3, s.k});
  Rank rank(*checkpoint, resolver, 0, 1);
  const VirtualShards four = {4, 96};  // fewer than K alone allows; they cut 128-blocks
  ASSERT_OK_AND_ASSIGN(const Linear linear,
                       Linear::RowParallel(rank.loader, "m", "experts", s.n, s.k, four, {}));
  LinearInput input(xv);
  ASSERT_OK(linear.ApplyReduce(rank.context.ctx(), nullptr, &input,
                               TensorView(sum.data(), DType::kF32, {3, s.n})));
  // Shards lie in a larger buffer.
  const int64_t stride = 5 * s.n;
  std::vector<float> shards(4 * stride, -1.0f);
  TensorView out(shards.data(), DType::kF32, {4, 3, s.n});
  out.row_stride = stride;
  ASSERT_OK(linear.ApplyShards(rank.context.ctx(), &input, out));
  for (int64_t i = 0; i < 3 * s.n; ++i) {
    const float left = shards[i] + shards[stride + i];
    const float right = shards[2 * stride + i] + shards[3 * stride + i];
    EXPECT_EQ(left + right, sum[i]) << i;
  }
  EXPECT_EQ(shards[3 * s.n], -1.0f);
  const TensorView wrong(shards.data(), DType::kF32, {2, 3, s.n});
  EXPECT_THAT(linear.ApplyShards(rank.context.ctx(), &input, wrong),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected F32[4, 3, 24]")));
}

// A checkpoint with the tensor "experts" [2, 6, 32] (BF16), and its values.
struct Stack {
  Stack() : values(Ramp(2 * 6 * 32)) {
    for (float& f : values) f = ToFloat(ToBF16(f));
    const std::string path = testing::MakeTempDir() + "/model.safetensors";
    testing::SafetensorsWriter().AddBF16("experts", {2, 6, 32}, values).Write(path);
    checkpoint = Checkpoint::OpenFile(path).value();
  }
  std::vector<float> values;
  std::unique_ptr<Checkpoint> checkpoint;
};

TEST(LinearTest, AMatrixOfAStackIsReadInPlace) {
  const Stack stack;
  const FakeResolver resolver((LinearScheme()));
  // A one-hot input picks column 5.
  std::vector<float> x(32, 0.0f);
  x[5] = 1.0f;
  for (int r = 0; r < 2; ++r) {
    Rank rank(*stack.checkpoint, resolver, r, 2);
    // Rows 2..5 of matrix 1, of which each rank holds two.
    ASSERT_OK_AND_ASSIGN(const Linear up,
                         Linear::StackedColumnParallel(rank.loader, "experts.1.up", "experts", 6,
                                                       32, {2, 4}, {"experts", 1, 2}));
    std::vector<float> out(2);
    LinearInput input(TensorView(x.data(), DType::kF32, {1, 32}));
    ASSERT_OK(up.Apply(rank.context.ctx(), &input, TensorView(out.data(), DType::kF32, {1, 2})));
    for (int i = 0; i < 2; ++i) EXPECT_EQ(out[i], stack.values[(6 + 2 + r * 2 + i) * 32 + 5]);
  }
  Rank rank(*stack.checkpoint, resolver, 0, 1);
  EXPECT_THAT(Linear::RowParallel(rank.loader, "experts.0.down", "experts", 6, 32,
                                  VirtualShardsOf(32), {"experts", 0, 3})
                  .status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected [3, 6, 32]")));
}

TEST(LinearTest, RefusalsNameTheModule) {
  const auto code = absl::StatusCode::kInvalidArgument;
  EXPECT_OK(Linear::ValidateRowParallel("m", 384, 8));
  // 352 = 2 x 176: two virtual shards only.
  EXPECT_THAT(Linear::ValidateRowParallel("a.down_proj", 352, 4),
              StatusIs(code, HasSubstr("a.down_proj: K = 352 is cut into V = 2")));
  EXPECT_THAT(Linear::ValidateRowParallel("m", 384, 3), StatusIs(code, HasSubstr("3 ranks")));

  const StoredLinear s = MakeStoredLinear(WeightScheme::kBF16, 20, 352);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  const FakeResolver resolver(s.scheme);
  Rank rank(*checkpoint, resolver, 0, 8);
  EXPECT_THAT(Linear::RowParallel(rank.loader, "m", "mlp", s.n, s.k).status(),
              StatusIs(code, HasSubstr("m: K = 352")));
  EXPECT_THAT(
      Linear::ColumnParallel(rank.loader, "m", "mlp", s.n, s.k, ShardSpec::Split(20, 1)).status(),
      StatusIs(code, HasSubstr("m: ")));
  EXPECT_THAT(
      Linear::ColumnParallel(rank.loader, "other", "mlp", s.n, s.k, ShardSpec::Replicated(20))
          .status(),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("other.weight")));
}

}  // namespace
}  // namespace lockstep
