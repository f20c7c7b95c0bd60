#include "kernels/norm/rms_norm.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::Rounded;
using testing::StatusIs;

std::vector<double> Reference(const std::vector<float>& x, const std::vector<float>& w, float eps,
                              float offset) {
  const size_t dim = w.size();
  std::vector<double> y(x.size());
  for (size_t r = 0; r < x.size() / dim; ++r) {
    double sum = 0;
    for (size_t i = 0; i < dim; ++i) sum += double{x[r * dim + i]} * x[r * dim + i];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(dim) + eps);
    for (size_t i = 0; i < dim; ++i) {
      y[r * dim + i] = x[r * dim + i] * scale * (double{offset} + w[i]);
    }
  }
  return y;
}

struct Case {
  DType act;
  DType weight;
  int64_t rows;
  int64_t dim;
  float offset;
};

class RmsNormTest : public ::testing::TestWithParam<Case> {};

TEST_P(RmsNormTest, MatchesDoublePrecision) {
  const Case c = GetParam();
  ArmContext context;
  const std::vector<float> x = Rounded(RandomFloats(c.rows * c.dim, 1, 3.0f), c.act);
  const std::vector<float> w = Rounded(RandomFloats(c.dim, 2), c.weight);
  ArmTensor x_tensor(c.act, {c.rows, c.dim}, x);
  ArmTensor w_tensor(c.weight, {c.dim}, w);
  ArmTensor y(c.act, {c.rows, c.dim});
  ASSERT_OK(RmsNorm(context.get(), x_tensor.view(), w_tensor.view(), {1e-6f, c.offset}, y.view()));
  const std::vector<double> want = Reference(x, w, 1e-6f, c.offset);
  const std::vector<float> got = y.Get();
  // A BF16 result is within half a unit of 2^-8 of the exact one, an F32 result within a few 2^-24.
  const double relative = c.act == DType::kBF16 ? 0.00392 : 1e-6;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], relative * std::fabs(want[i]) + 1e-30) << i;
  }
  EXPECT_EQ(context.op_launches(), 1);
}

TEST_P(RmsNormTest, AddRoundsTheResidualAndNormalizesTheRoundedValue) {
  const Case c = GetParam();
  ArmContext context;
  const std::vector<float> residual = Rounded(RandomFloats(c.rows * c.dim, 3), c.act);
  const std::vector<float> delta = RandomFloats(c.rows * c.dim, 4);
  ArmTensor residual_tensor(c.act, {c.rows, c.dim}, residual);
  ArmTensor delta_tensor(DType::kF32, {c.rows, c.dim}, delta);
  ArmTensor w_tensor(c.weight, {c.dim}, RandomFloats(c.dim, 5));
  ArmTensor fused(c.act, {c.rows, c.dim});
  ArmTensor separate(c.act, {c.rows, c.dim});
  const RmsNormParams params{1e-5f, c.offset};
  ASSERT_OK(AddRmsNorm(context.get(), residual_tensor.view(), delta_tensor.view(), w_tensor.view(),
                       params, fused.view()));
  std::vector<float> sum(residual.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = residual[i] + delta[i];
  EXPECT_EQ(residual_tensor.Get(), Rounded(sum, c.act));
  ASSERT_OK(
      RmsNorm(context.get(), residual_tensor.view(), w_tensor.view(), params, separate.view()));
  EXPECT_EQ(fused.GetBytes(), separate.GetBytes());
}

INSTANTIATE_TEST_SUITE_P(All, RmsNormTest,
                         ::testing::Values(Case{DType::kF32, DType::kF32, 3, 256, 0.0f},
                                           Case{DType::kF32, DType::kBF16, 1, 5120, 1.0f},
                                           Case{DType::kBF16, DType::kBF16, 17, 64, 1.0f},
                                           Case{DType::kBF16, DType::kF32, 2, 1003, 0.0f},
                                           Case{DType::kF32, DType::kF32, 5, 7, 0.0f}));

TEST(RmsNorm, RowsDoNotDependOnTheirNumberNorOnThreads) {
  const int64_t rows = 37, dim = 320;
  const std::vector<float> x = RandomFloats(rows * dim, 6);
  ArmTensor w(DType::kF32, {dim}, RandomFloats(dim, 7));
  ArmTensor x_tensor(DType::kF32, {rows, dim}, x);
  ArmTensor y(DType::kF32, {rows, dim});
  ArmContext two(2);
  ASSERT_OK(RmsNorm(two.get(), x_tensor.view(), w.view(), {}, y.view()));
  ArmContext one(1);
  ArmTensor alone(DType::kF32, {rows, dim});
  for (int64_t r = 0; r < rows; ++r) {
    ASSERT_OK(
        RmsNorm(one.get(), x_tensor.view().Rows(r, 1), w.view(), {}, alone.view().Rows(r, 1)));
  }
  EXPECT_EQ(y.GetBytes(), alone.GetBytes());
  EXPECT_EQ(two.op_launches(), 1);
}

TEST(RmsNorm, MayWriteOverItsInput) {
  ArmContext context;
  const std::vector<float> x = RandomFloats(4 * 96, 8);
  ArmTensor w(DType::kF32, {96}, RandomFloats(96, 9));
  ArmTensor x_tensor(DType::kF32, {4, 96}, x);
  ArmTensor y(DType::kF32, {4, 96});
  ASSERT_OK(RmsNorm(context.get(), x_tensor.view(), w.view(), {}, y.view()));
  ASSERT_OK(RmsNorm(context.get(), x_tensor.view(), w.view(), {}, x_tensor.view()));
  EXPECT_EQ(x_tensor.GetBytes(), y.GetBytes());
}

TEST(RmsNorm, RefusesWrongTensorsByName) {
  ArmContext context;
  ArmTensor x(DType::kF32, {2, 32}), w(DType::kF32, {16}), y(DType::kBF16, {2, 32});
  EXPECT_THAT(RmsNorm(context.get(), x.view(), w.view(), {}, x.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rms_norm: weight is F32[16], shape [32] is needed")));
  ArmTensor right(DType::kF32, {32});
  EXPECT_THAT(RmsNorm(context.get(), x.view(), right.view(), {}, y.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("y is BF16[2, 32]")));
  EXPECT_THAT(RmsNorm(context.get(), right.view(), right.view(), {}, right.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank 2 is needed")));
  EXPECT_THAT(AddRmsNorm(context.get(), x.view(), y.view(), right.view(), {}, x.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("add_rms_norm: delta")));
}

TEST(RmsNorm, DryRunTouchesNothing) {
  DryRunContext context;
  const TensorView x(nullptr, DType::kF32, {2, 32}, testing::TestDevice());
  const TensorView w(nullptr, DType::kF32, {32}, testing::TestDevice());
  EXPECT_OK(RmsNorm(context.get(), x, w, {}, x));
  EXPECT_OK(AddRmsNorm(context.get(), x, x, w, {}, x));
}

}  // namespace
}  // namespace lockstep
