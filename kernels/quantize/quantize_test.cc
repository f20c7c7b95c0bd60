// Tests of activation quantization: formulas, floors, groups, refusals.
#include "kernels/quantize/quantize.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::CpuArmScope;
using testing::DryRunContext;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

class QuantizeTest : public ::testing::Test {
 protected:
  void Dynamic(const std::vector<float>& x, int64_t rows, ActScaleRule rule, ActGroups groups,
               DType dtype = DType::kF32) {
    Run(x, rows, groups, dtype,
        [&](ExecContext* ctx, TensorView x_view, TensorView codes, TensorView scales) {
          return QuantizeDynamic(ctx, x_view, rule, groups, codes, scales);
        });
  }
  void Static(const std::vector<float>& x, int64_t rows, float scale, ActGroups groups,
              DType dtype = DType::kF32) {
    Run(x, rows, groups, dtype,
        [&](ExecContext* ctx, TensorView x_view, TensorView codes, TensorView scales) {
          return QuantizeStatic(ctx, x_view, scale, groups, codes, scales);
        });
  }

  std::vector<uint8_t> codes_;
  std::vector<float> scales_;

 private:
  template <typename Fn>
  void Run(const std::vector<float>& x, int64_t rows, ActGroups groups, DType dtype, Fn quantize) {
    const int64_t k = static_cast<int64_t>(x.size()) / rows;
    ArmContext context;
    ArmTensor x_tensor(dtype, {rows, k}, x);
    ArmTensor codes(DType::kU8, {rows, k});
    codes.SetBytes(std::vector<uint8_t>(x.size(), 0xaa));
    ArmTensor scales(DType::kF32, {rows, groups.Count(k)},
                     std::vector<float>(static_cast<size_t>(rows * groups.Count(k)), -1.0f));
    ASSERT_OK(quantize(context.get(), x_tensor.view(), codes.view(), scales.view()));
    codes_ = codes.GetBytes();
    scales_ = scales.Get();
    EXPECT_EQ(context.op_launches(), 1);
  }
};

TEST_F(QuantizeTest, PerTokenVector) {
  Dynamic({0.1f, -0.25f, 0.5f, 1.0f}, 1, ActScaleRule::kPerToken, {4, 4});
  EXPECT_THAT(codes_, ElementsAre(0x63, 0xee, 0x76, 0x7e));
  EXPECT_THAT(scales_, ElementsAre(1.0f / 448.0f));
}

// 3 * f32(1 / 448) is not the float nearest to 3 / 448.
TEST_F(QuantizeTest, ScaleIsAProductWithTheReciprocal) {
  ASSERT_NE(3.0f * (1.0f / 448.0f), 3.0f / 448.0f);
  Dynamic({3.0f, 1.0f}, 1, ActScaleRule::kPerToken, {2, 2});
  EXPECT_THAT(scales_, ElementsAre(3.0f * (1.0f / 448.0f)));
  Dynamic({3.0f, 1.0f}, 1, ActScaleRule::kBlock128, {2, 2});
  EXPECT_THAT(scales_, ElementsAre(3.0f * (1.0f / 448.0f)));
}

TEST_F(QuantizeTest, ZeroRowsGiveTheFloor) {
  Dynamic({0.0f, 0.0f, 0.0f, 448.0f}, 2, ActScaleRule::kPerToken, {2, 2});
  EXPECT_THAT(codes_, ElementsAre(0, 0, 0, 0x7e));
  EXPECT_THAT(scales_, ElementsAre(1.0f / (448.0f * 512.0f), 1.0f));
  Dynamic({0.0f, 0.0f}, 1, ActScaleRule::kBlock128, {2, 2});
  EXPECT_THAT(scales_, ElementsAre(1e-10f * (1.0f / 448.0f)));
}

TEST_F(QuantizeTest, GroupsRestartAtShards) {
  // Shards of five columns, groups of three: 3 + 2, 3 + 2.
  Dynamic({448, 1, 1, 896, 1, 1344, 1, 1, 1792, 1}, 1, ActScaleRule::kBlock128, {5, 3});
  const float r = 1.0f / 448.0f;
  EXPECT_THAT(scales_, ElementsAre(448 * r, 896 * r, 1344 * r, 1792 * r));
  EXPECT_EQ(codes_[0], 0x7e);
  EXPECT_EQ(codes_[3], 0x7e);
  EXPECT_EQ(codes_[4], FloatToE4M3(0.5f));
  EXPECT_EQ(codes_[5], 0x7e);
}

TEST_F(QuantizeTest, NanStaysNan) {
  Dynamic({std::numeric_limits<float>::quiet_NaN(), 448.0f}, 1, ActScaleRule::kPerToken, {2, 2});
  EXPECT_THAT(codes_, ElementsAre(0x7f, 0x7e));
}

TEST_F(QuantizeTest, StaticSaturatesAndFillsEveryScale) {
  Static({1000.0f, -1.0f, 0.25f, -0.0f}, 1, 0.5f, {2, 2}, DType::kBF16);
  EXPECT_THAT(codes_, ElementsAre(0x7e, FloatToE4M3(-2.0f), FloatToE4M3(0.5f), 0x80));
  EXPECT_THAT(scales_, ElementsAre(0.5f, 0.5f));
}

// Every arm encodes as FloatToE4M3 does: all codes, the midpoints between them, and their
// neighbours.
TEST_F(QuantizeTest, EveryArmEncodesAsTheDefinition) {
  std::vector<float> x = {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::denorm_min(),
                          464.0f,
                          1e30f};
  for (int code = 0; code < 0x7f; ++code) {
    const float low = E4M3ToFloat(static_cast<uint8_t>(code));
    const float high = code == 0x7e ? 480.0f : E4M3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = low + (high - low) / 2;
    for (float f : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f),
                    std::nextafter(low, 1e9f)}) {
      x.push_back(f);
      x.push_back(-f);
    }
  }
  const int64_t k = static_cast<int64_t>(x.size());
  const CpuIsa best = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    Static(x, 1, 1.0f, {k, k});
    for (int64_t i = 0; i < k; ++i) {
      EXPECT_EQ(codes_[i], FloatToE4M3(x[i])) << Name(isa) << " " << x[i];
    }
  }
  SetCpuIsa(best);
}

// Groups of one warp and of one block, with and without whole vectors, empty and broken values.
TEST_F(QuantizeTest, BitsAreThoseOfTheReferenceArm) {
  struct Case {
    int64_t rows, k;
    ActGroups groups;
  };
  for (const Case& c :
       {Case{3, 1280, {1280, 128}}, Case{5, 5120, {5120, 5120}}, Case{2, 2176, {272, 128}},
        Case{4, 1003, {1003, 1003}}, Case{7, 90, {45, 7}}, Case{2, 4096, {2048, 2048}}}) {
    std::vector<float> x = RandomFloats(c.rows * c.k, 3, 700.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      if (i % 97 == 0) x[i] = -0.0f;
      if (i % 5 == 0) x[i] *= 1e-5f;
    }
    x[11] = std::numeric_limits<float>::quiet_NaN();
    x[x.size() - 1] = -std::numeric_limits<float>::infinity();
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int rule = 0; rule < 3; ++rule) {
        const auto run = [&] {
          if (rule == 0) Static(x, c.rows, 0.37f, c.groups, dtype);
          if (rule == 1) Dynamic(x, c.rows, ActScaleRule::kPerToken, c.groups, dtype);
          if (rule == 2) Dynamic(x, c.rows, ActScaleRule::kBlock128, c.groups, dtype);
        };
        run();
        const std::vector<uint8_t> codes = codes_;
        const std::vector<float> scales = scales_;
        CpuArmScope cpu;
        run();
        EXPECT_EQ(codes, codes_) << c.k << " " << Name(dtype) << " rule " << rule;
        EXPECT_EQ(scales, scales_) << c.k << " " << Name(dtype) << " rule " << rule;
      }
    }
  }
}

TEST_F(QuantizeTest, HonoursStrides) {
  const int64_t rows = 3, k = 64, wide = 96;
  const std::vector<float> x = RandomFloats(rows * wide, 4, 10.0f);
  ArmContext context;
  ArmTensor in(DType::kF32, {rows, wide}, x), codes(DType::kU8, {rows, wide}),
      scales(DType::kF32, {rows, 4});
  ASSERT_OK(QuantizeDynamic(context.get(), in.view().Columns(16, k), ActScaleRule::kBlock128,
                            {32, 32}, codes.view().Columns(8, k), scales.view().Columns(1, 2)));
  std::vector<float> narrow;
  for (int64_t r = 0; r < rows; ++r) {
    narrow.insert(narrow.end(), x.begin() + r * wide + 16, x.begin() + r * wide + 16 + k);
  }
  Dynamic(narrow, rows, ActScaleRule::kBlock128, {32, 32});
  const std::vector<uint8_t> got = codes.GetBytes();
  const std::vector<float> got_scales = scales.Get();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < wide; ++c) {
      const bool inside = c >= 8 && c < 8 + k;
      EXPECT_EQ(got[static_cast<size_t>(r * wide + c)],
                inside ? codes_[static_cast<size_t>(r * k + c - 8)] : 0);
    }
    EXPECT_EQ(got_scales[static_cast<size_t>(r * 4)], 0.0f);
    EXPECT_EQ(got_scales[static_cast<size_t>(r * 4 + 1)], scales_[static_cast<size_t>(r * 2)]);
    EXPECT_EQ(got_scales[static_cast<size_t>(r * 4 + 2)], scales_[static_cast<size_t>(r * 2 + 1)]);
  }
}

TEST_F(QuantizeTest, RefusesWrongOperands) {
  ArmContext context;
  ArmTensor x(DType::kF32, {1, 4}), c(DType::kU8, {1, 4}), s(DType::kF32, {1, 2});
  const auto code = absl::StatusCode::kInvalidArgument;
  const auto run = [&](const ArmTensor& a, ActGroups g, const ArmTensor& b) {
    return QuantizeDynamic(context.get(), a.view(), ActScaleRule::kPerToken, g, b.view(), s.view());
  };
  EXPECT_THAT(run(c, {2, 2}, c), StatusIs(code, HasSubstr("x is U8[1, 4]")));
  EXPECT_THAT(run(x, {3, 3}, c), StatusIs(code, HasSubstr("shards of 3 do not cut 4")));
  EXPECT_THAT(run(x, {2, 2}, s), StatusIs(code, HasSubstr("codes is F32[1, 2]")));
  EXPECT_THAT(run(x, {4, 4}, c), StatusIs(code, HasSubstr("scales is F32[1, 2], shape [1, 1]")));
  for (float scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity()}) {
    EXPECT_THAT(QuantizeStatic(context.get(), x.view(), scale, {2, 2}, c.view(), s.view()),
                StatusIs(code, HasSubstr("static scale is")));
  }
}

TEST_F(QuantizeTest, DryRunTouchesNothing) {
  DryRunContext context;
  const TensorView x(nullptr, DType::kF32, {2, 32}, testing::TestDevice());
  const TensorView codes(nullptr, DType::kU8, {2, 32}, testing::TestDevice());
  const TensorView scales(nullptr, DType::kF32, {2, 1}, testing::TestDevice());
  EXPECT_OK(QuantizeDynamic(context.get(), x, ActScaleRule::kPerToken, {32, 32}, codes, scales));
}

}  // namespace
}  // namespace lockstep
