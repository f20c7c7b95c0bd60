// Tests of activation quantization: formulas, floors, groups, refusals.
#include "kernels/quantize/quantize.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/cpu_isa.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class QuantizeTest : public ::testing::Test {
 protected:
  QuantizeTest() {
    CHECK_OK(workspace_.Allocate(DeviceType::kCpu, 64));
    ctx_.pool = &pool_;
    ctx_.workspace = &workspace_;
    ctx_.counters = &counters_;
  }
  void Dynamic(std::vector<float> x, int64_t rows, ActScaleRule rule, ActGroups groups) {
    const int64_t k = static_cast<int64_t>(x.size()) / rows;
    codes_.assign(x.size(), 0xaa);
    scales_.assign(rows * groups.Count(k), -1.0f);
    ASSERT_OK(QuantizeDynamic(&ctx_, TensorView(x.data(), DType::kF32, {rows, k}), rule, groups,
                              TensorView(codes_.data(), DType::kU8, {rows, k}),
                              TensorView(scales_.data(), DType::kF32, {rows, groups.Count(k)})));
  }

  ThreadPool pool_{2};
  Workspace workspace_;
  Counters counters_;
  ExecContext ctx_;
  std::vector<uint8_t> codes_;
  std::vector<float> scales_;
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
  std::vector<BF16> x = {ToBF16(1000.0f), ToBF16(-1.0f), ToBF16(0.25f), ToBF16(-0.0f)};
  codes_.resize(4);
  scales_.resize(2);
  ASSERT_OK(QuantizeStatic(&ctx_, TensorView(x.data(), DType::kBF16, {1, 4}), 0.5f, {2, 2},
                           TensorView(codes_.data(), DType::kU8, {1, 4}),
                           TensorView(scales_.data(), DType::kF32, {1, 2})));
  EXPECT_THAT(codes_, ElementsAre(0x7e, FloatToE4M3(-2.0f), FloatToE4M3(0.5f), 0x80));
  EXPECT_THAT(scales_, ElementsAre(0.5f, 0.5f));
  EXPECT_EQ(counters_.op_launches, 1);
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
    codes_.assign(x.size(), 0xaa);
    scales_.resize(1);
    ASSERT_OK(QuantizeStatic(&ctx_, TensorView(x.data(), DType::kF32, {1, k}), 1.0f, {k, k},
                             TensorView(codes_.data(), DType::kU8, {1, k}),
                             TensorView(scales_.data(), DType::kF32, {1, 1})));
    for (int64_t i = 0; i < k; ++i) {
      EXPECT_EQ(codes_[i], FloatToE4M3(x[i])) << Name(isa) << " " << x[i];
    }
  }
  SetCpuIsa(best);
}

TEST_F(QuantizeTest, RefusesWrongOperands) {
  float x[4] = {};
  uint8_t codes[4];
  float scales[2];
  const TensorView vx(x, DType::kF32, {1, 4}), vc(codes, DType::kU8, {1, 4}),
      vs(scales, DType::kF32, {1, 2});
  const auto code = absl::StatusCode::kInvalidArgument;
  const auto run = [&](TensorView a, ActGroups g, TensorView b, TensorView c) {
    return QuantizeDynamic(&ctx_, a, ActScaleRule::kPerToken, g, b, c);
  };
  EXPECT_THAT(run(vc, {2, 2}, vc, vs), StatusIs(code, HasSubstr("x is U8[1, 4]")));
  EXPECT_THAT(run(vx, {3, 3}, vc, vs), StatusIs(code, HasSubstr("shards of 3 do not cut 4")));
  EXPECT_THAT(run(vx, {2, 2}, vs, vs), StatusIs(code, HasSubstr("codes are F32[1, 2]")));
  EXPECT_THAT(run(vx, {4, 4}, vc, vs), StatusIs(code, HasSubstr("expected F32[1, 1]")));
  for (float scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity()}) {
    EXPECT_THAT(QuantizeStatic(&ctx_, vx, scale, {2, 2}, vc, vs),
                StatusIs(code, HasSubstr("static scale is")));
  }
}

}  // namespace
}  // namespace lockstep
