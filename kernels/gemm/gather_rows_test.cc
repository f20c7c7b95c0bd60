// Tests of GatherRows: rows of a packed weight, and refusals.
#include "kernels/gemm/gather_rows.h"

#include <vector>

#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/gemm/pack.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;

TEST(GatherRowsTest, RowsOfThisRankAndZeros) {
  constexpr int64_t kRows = 19, kK = 5;
  std::vector<BF16> source(kRows * kK);
  std::vector<const uint8_t*> rows;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t k = 0; k < kK; ++k) source[r * kK + k] = ToBF16(static_cast<float>(r * 8 + k));
    rows.push_back(reinterpret_cast<const uint8_t*>(&source[r * kK]));
  }
  std::vector<BF16> packed(source.size());
  PackRows(rows, kK, 2, packed.data());
  GemmWeight weight;
  weight.format = WeightFormat::kBF16;
  weight.n = kRows;
  weight.k = kK;
  weight.codes = packed.data();

  ThreadPool pool(1);
  Workspace workspace;
  ASSERT_OK(workspace.Allocate(DeviceType::kCpu, 64));
  Counters counters;
  ExecContext ctx;
  ctx.pool = &pool;
  ctx.workspace = &workspace;
  ctx.counters = &counters;

  std::vector<int32_t> tokens = {99, 100, 117, 118, 119};
  const TensorView ids(tokens.data(), DType::kI32, {5});
  std::vector<float> out(5 * kK, -1.0f);
  std::vector<BF16> out16(5 * kK);
  ASSERT_OK(GatherRows(&ctx, weight, ids, 100, TensorView(out.data(), DType::kF32, {5, kK})));
  ASSERT_OK(GatherRows(&ctx, weight, ids, 100, TensorView(out16.data(), DType::kBF16, {5, kK})));
  for (int64_t t = 0; t < 5; ++t) {
    const int64_t row = tokens[t] - 100;
    for (int64_t k = 0; k < kK; ++k) {
      const float expected = row >= 0 && row < kRows ? ToFloat(source[row * kK + k]) : 0.0f;
      EXPECT_EQ(out[t * kK + k], expected) << t << " " << k;
      EXPECT_EQ(ToFloat(out16[t * kK + k]), expected);
    }
  }

  EXPECT_THAT(GatherRows(&ctx, weight, ids, 0, ids),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("out is I32[5]")));
  EXPECT_THAT(GatherRows(&ctx, weight, TensorView(out.data(), DType::kF32, {5}), 0,
                         TensorView(out.data(), DType::kF32, {5, kK})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tokens are F32[5]")));
  weight.format = WeightFormat::kFp8;
  EXPECT_THAT(GatherRows(&ctx, weight, ids, 0, TensorView(out.data(), DType::kF32, {5, kK})),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("quantized")));
}

}  // namespace
}  // namespace lockstep
