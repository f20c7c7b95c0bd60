#include "kernels/pointwise/pointwise.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/cpu_isa.h"
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

TEST(AddResidual, RoundsOnceToTheDtypeOfTheResidual) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const std::vector<float> residual = Rounded(RandomFloats(9 * 33, 1), dtype);
    const std::vector<float> delta = RandomFloats(9 * 33, 2);
    ArmTensor r(dtype, {9, 33}, residual), d(DType::kF32, {9, 33}, delta);
    ASSERT_OK(AddResidual(context.get(), r.view(), d.view()));
    std::vector<float> want(residual.size());
    for (size_t i = 0; i < want.size(); ++i) want[i] = residual[i] + delta[i];
    EXPECT_EQ(r.Get(), Rounded(want, dtype));
    EXPECT_EQ(context.op_launches(), 1);
  }
}

TEST(SwiGlu, MatchesDoublePrecision) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const int64_t rows = 11, dim = 75;
    const std::vector<float> gate = RandomFloats(rows * dim, 3, 12.0f);
    const std::vector<float> up = RandomFloats(rows * dim, 4, 2.0f);
    ArmTensor g(DType::kF32, {rows, dim}, gate), u(DType::kF32, {rows, dim}, up);
    ArmTensor out(dtype, {rows, dim});
    ASSERT_OK(SwiGlu(context.get(), g.view(), u.view(), out.view()));
    const std::vector<float> got = out.Get();
    const double relative = dtype == DType::kBF16 ? 0.00392 : 1e-6;
    for (size_t i = 0; i < got.size(); ++i) {
      const double want = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
      ASSERT_NEAR(got[i], want, relative * std::fabs(want) + 1e-30) << i;
    }
  }
}

TEST(SwiGlu, RowsOfAWiderTensorGiveTheSameBits) {
  ArmContext context;
  const int64_t rows = 5, dim = 48;
  // gate and up side by side, as one projection gives them.
  ArmTensor both(DType::kF32, {rows, 2 * dim}, RandomFloats(rows * 2 * dim, 5, 4.0f));
  ArmTensor out(DType::kBF16, {rows, dim}), alone(DType::kBF16, {rows, dim});
  const TensorView gate = both.view().Columns(0, dim), up = both.view().Columns(dim, dim);
  ASSERT_OK(SwiGlu(context.get(), gate, up, out.view()));
  for (int64_t r = 0; r < rows; ++r) {
    ASSERT_OK(SwiGlu(context.get(), gate.Rows(r, 1), up.Rows(r, 1), alone.view().Rows(r, 1)));
  }
  EXPECT_EQ(out.GetBytes(), alone.GetBytes());
}

TEST(SwiGlu, EveryInstructionSetGivesTheSameBits) {
  const CpuIsa before = GetCpuIsa();
  const int64_t rows = 3, dim = 1000;
  ArmTensor g(DType::kF32, {rows, dim}, RandomFloats(rows * dim, 6, 100.0f));
  ArmTensor u(DType::kF32, {rows, dim}, RandomFloats(rows * dim, 7));
  std::vector<std::vector<uint8_t>> results;
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    ArmContext context;
    ArmTensor out(DType::kF32, {rows, dim});
    ASSERT_OK(SwiGlu(context.get(), g.view(), u.view(), out.view()));
    results.push_back(out.GetBytes());
  }
  SetCpuIsa(before);
  for (const auto& r : results) EXPECT_EQ(r, results[0]);
}

TEST(Relu2, RoundsOnceAndKeepsNan) {
  if (testing::TestDevice() != DeviceType::kCpu) return;  // the op has a CPU arm only
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const int64_t rows = 9, dim = 37;
    // Columns of a wider tensor.
    std::vector<float> x = RandomFloats(rows * 40, 8, 3.0f);
    x[1] = -0.0f;
    x[2] = __builtin_nanf("");
    ArmTensor in(DType::kF32, {rows, 40}, x), out(dtype, {rows, dim});
    ASSERT_OK(Relu2(context.get(), in.view().Columns(0, dim), out.view()));
    EXPECT_EQ(context.op_launches(), 1);
    const std::vector<float> got = out.Get();
    EXPECT_TRUE(std::isnan(got[2]));
    EXPECT_EQ(FloatToBits(got[1]), 0u);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < dim; ++c) {
        const float v = x[static_cast<size_t>(r * 40 + c)];
        if (v != v) continue;
        const float want = Rounded({v > 0 ? v * v : 0.0f}, dtype)[0];
        ASSERT_EQ(got[static_cast<size_t>(r * dim + c)], want);
      }
    }
  }
}

TEST(Pointwise, RefuseWrongTensorsByName) {
  ArmContext context;
  ArmTensor a(DType::kF32, {2, 16}), b(DType::kF32, {2, 8}), c(DType::kBF16, {2, 16});
  EXPECT_THAT(AddResidual(context.get(), a.view(), b.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("add_residual: delta is F32[2, 8], shape [2, 16] is needed")));
  EXPECT_THAT(SwiGlu(context.get(), a.view(), c.view(), a.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("swiglu: up is BF16[2, 16], dtype F32 is needed")));
  if (testing::TestDevice() != DeviceType::kCpu) return;
  EXPECT_THAT(Relu2(context.get(), a.view(), b.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("relu2: out is F32[2, 8], shape [2, 16] is needed")));
}

TEST(Pointwise, DryRunTouchesNothing) {
  DryRunContext context;
  const TensorView x(nullptr, DType::kF32, {2, 32}, testing::TestDevice());
  EXPECT_OK(AddResidual(context.get(), x, x));
  EXPECT_OK(SwiGlu(context.get(), x, x, x));
}

}  // namespace
}  // namespace lockstep
