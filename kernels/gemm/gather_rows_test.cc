// Tests of GatherRows: rows of a packed weight, and refusals.
#include "kernels/gemm/gather_rows.h"

#include <vector>

#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/gemm/pack.h"
#include "kernels/gemm/pack_fragments.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using ::lockstep::testing::ArmContext;
using ::lockstep::testing::ArmTensor;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::TestDevice;
using ::testing::HasSubstr;

TEST(GatherRowsTest, RowsOfThisRankAndZeros) {
  constexpr int64_t kRows = 19, kK = 48;
  std::vector<BF16> source(kRows * kK);
  std::vector<const uint8_t*> rows;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t k = 0; k < kK; ++k) source[r * kK + k] = ToBF16(static_cast<float>(r * 8 - k));
    rows.push_back(reinterpret_cast<const uint8_t*>(&source[r * kK]));
  }
  const bool cuda = TestDevice() == DeviceType::kCuda;
  std::vector<uint8_t> bytes(cuda ? FragmentCodeBytes(WeightFormat::kBF16, kRows, kK)
                                  : kRows * kK * 2);
  if (cuda) {
    PackFragments(nullptr, WeightFormat::kBF16, rows, kK, 3, bytes.data());
  } else {
    PackRows(rows, kK, 2, bytes.data());
  }
  ArmTensor packed(DType::kBF16, {static_cast<int64_t>(bytes.size() / 2)});
  packed.SetBytes(bytes);
  GemmWeight weight;
  weight.format = WeightFormat::kBF16;
  weight.device = TestDevice();
  weight.n = kRows;
  weight.k = kK;
  weight.codes = packed.view().data;

  ArmContext context;
  const std::vector<int32_t> tokens = {99, 100, 117, 118, 119};
  ArmTensor ids({5}, tokens);
  ArmTensor out(DType::kF32, {5, kK}, std::vector<float>(5 * kK, -1.0f));
  ArmTensor out16(DType::kBF16, {5, kK + 2});
  ASSERT_OK(GatherRows(context.get(), weight, ids.view(), 100, out.view()));
  // Rows of the output may be wider than K.
  ASSERT_OK(GatherRows(context.get(), weight, ids.view(), 100, out16.view().Columns(1, kK)));
  const std::vector<float> got = out.Get(), got16 = out16.Get();
  for (int64_t t = 0; t < 5; ++t) {
    const int64_t row = tokens[t] - 100;
    for (int64_t k = 0; k < kK; ++k) {
      const float expected = row >= 0 && row < kRows ? ToFloat(source[row * kK + k]) : 0.0f;
      EXPECT_EQ(got[t * kK + k], expected) << t << " " << k;
      EXPECT_EQ(got16[t * (kK + 2) + 1 + k], expected);
    }
    EXPECT_EQ(got16[t * (kK + 2)], 0.0f);
    EXPECT_EQ(got16[t * (kK + 2) + 1 + kK], 0.0f);
  }

  EXPECT_THAT(GatherRows(context.get(), weight, ids.view(), 0, ids.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("out is I32[5]")));
  EXPECT_THAT(GatherRows(context.get(), weight, ArmTensor(DType::kF32, {5}).view(), 0, out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tokens are F32[5]")));
  weight.format = WeightFormat::kFp8;
  EXPECT_THAT(GatherRows(context.get(), weight, ids.view(), 0, out.view()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("quantized")));
}

}  // namespace
}  // namespace lockstep
