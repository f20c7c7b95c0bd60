#include "kernels/embedding/embedding.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::CpuArmScope;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

TEST(Embedding, LookupThenSelectOverRanksGivesTheWholeTableBitForBit) {
  const int64_t world = 4, rows = 8, dim = 20, num_tokens = 6;
  for (DType table_dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> values = testing::Rounded(RandomFloats(world * rows * dim, 1), table_dtype);
    values[static_cast<size_t>(9 * dim)] = -0.0f;  // a sum over ranks would lose this sign
    ArmTensor table(table_dtype, {world * rows, dim}, values);
    ArmTensor tokens({num_tokens}, {9, 0, 31, 7, 8, 9});
    const DType act = table_dtype;
    ArmContext context;
    ArmTensor whole(act, {num_tokens, dim}), selected(act, {num_tokens, dim});
    ArmTensor gathered(act, {world, num_tokens, dim});
    ASSERT_OK(EmbeddingLookup(context.get(), tokens.view(), table.view(), 0, whole.view()));
    for (int64_t r = 0; r < world; ++r) {
      TensorView part(gathered.view().Rows(r, 1).data, act, {num_tokens, dim},
                      testing::TestDevice());
      ASSERT_OK(EmbeddingLookup(context.get(), tokens.view(), table.view().Rows(r * rows, rows),
                                r * rows, part));
    }
    ASSERT_OK(
        EmbeddingSelect(context.get(), tokens.view(), gathered.view(), rows, selected.view()));
    EXPECT_EQ(whole.GetBytes(), selected.GetBytes());
    const std::vector<float> got = whole.Get();
    EXPECT_TRUE(std::signbit(got[0]));
    for (int64_t i = 0; i < dim; ++i) {
      EXPECT_EQ(got[static_cast<size_t>(2 * dim + i)], values[static_cast<size_t>(31 * dim + i)]);
    }
    EXPECT_EQ(context.op_launches(), world + 2);
  }
}

TEST(Embedding, RowsOfOtherRanksAreZero) {
  ArmContext context;
  ArmTensor table(DType::kBF16, {2, 4}, RandomFloats(8, 2));
  ArmTensor tokens({3}, {1, 3, 4});
  ArmTensor out(DType::kF32, {3, 4}, std::vector<float>(12, 7.0f));
  ASSERT_OK(EmbeddingLookup(context.get(), tokens.view(), table.view(), 2, out.view()));
  const std::vector<float> got = out.Get();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(got[i], 0.0f);
    EXPECT_EQ(got[4 + i], table.Get()[4 + i]);
    EXPECT_EQ(got[8 + i], 0.0f);
  }
}

TEST(Embedding, RefusesWrongTensorsAndTokens) {
  ArmContext context;
  ArmTensor table(DType::kBF16, {2, 4}), tokens({3}, {0, 1, 9}), out(DType::kF32, {3, 5});
  EXPECT_THAT(EmbeddingLookup(context.get(), tokens.view(), table.view(), 0, out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("embedding_lookup: out is F32[3, 5], shape [3, 4] is needed")));
  ArmTensor gathered(DType::kF32, {2, 3, 5});
  EXPECT_THAT(EmbeddingSelect(context.get(), tokens.view(), gathered.view(), 0, out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rows_per_rank is 0")));
  CpuArmScope cpu;
  ArmContext cpu_context;
  ArmTensor cpu_tokens({3}, {0, 1, 9}), cpu_gathered(DType::kF32, {2, 3, 5}),
      cpu_out(DType::kF32, {3, 5});
  EXPECT_THAT(
      EmbeddingSelect(cpu_context.get(), cpu_tokens.view(), cpu_gathered.view(), 4, cpu_out.view()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("token 9 of row 2 is outside [0, 8)")));
}

TEST(Embedding, OnADeviceATokenOfNoRankGivesNan) {
  if (testing::TestDevice() == DeviceType::kCpu) return;
  ArmContext context;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    ArmTensor tokens({3}, {8, 1, -1}), out(dtype, {3, 5});
    ArmTensor gathered(dtype, {2, 3, 5}, RandomFloats(30, 4));
    ASSERT_OK(EmbeddingSelect(context.get(), tokens.view(), gathered.view(), 4, out.view()));
    const std::vector<float> got = out.Get();
    for (size_t i = 0; i < 15; ++i) EXPECT_EQ(std::isnan(got[i]), i / 5 != 1) << i;
  }
}

// Every pair of dtypes, rows of any alignment, and a table whose bits include NaN and zeros.
TEST(Embedding, LookupBitsAreThoseOfTheReferenceArm) {
  for (int64_t dim : {5, 64, 1000}) {
    std::vector<float> values = RandomFloats(7 * dim, 5);
    values[3] = -0.0f;
    values[4] = -std::nanf("5");
    for (DType from : {DType::kF32, DType::kBF16}) {
      for (DType to : {DType::kF32, DType::kBF16}) {
        const auto run = [&] {
          ArmContext context;
          ArmTensor tokens({4}, {10, 12, 16, 17}), table(from, {7, dim}, values);
          ArmTensor out(to, {4, dim + 3});
          EXPECT_OK(EmbeddingLookup(context.get(), tokens.view(), table.view(), 10,
                                    out.view().Columns(2, dim)));
          return out.GetBytes();
        };
        const std::vector<uint8_t> got = run();
        CpuArmScope cpu;
        EXPECT_EQ(got, run());
      }
    }
  }
}

TEST(Embedding, DryRunTouchesNothing) {
  DryRunContext context;
  const DeviceType device = testing::TestDevice();
  const TensorView tokens(nullptr, DType::kI32, {2}, device);
  const TensorView x(nullptr, DType::kF32, {2, 32}, device);
  const TensorView gathered(nullptr, DType::kF32, {1, 2, 32}, device);
  EXPECT_OK(EmbeddingLookup(context.get(), tokens, x, 0, x));
  EXPECT_OK(EmbeddingSelect(context.get(), tokens, gathered, 2, x));
}

}  // namespace
}  // namespace lockstep
