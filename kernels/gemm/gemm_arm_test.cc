// Tests of Gemm on every arm: close to the exact product, and equal bit for bit over numbers of
// tokens, rows of the weight, and ranks that share the virtual shards.
#include <cmath>
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/testing/gemm_problem.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::DryRunContext;
using testing::Exact;
using testing::ExactElement;
using testing::GemmCase;
using testing::GemmCases;
using ::testing::HasSubstr;
using testing::PackedPart;
using testing::RunGemm;
using testing::StatusIs;
using testing::TestDevice;
using testing::TestInput;
using testing::TestWeight;

class GemmArmTest : public ::testing::TestWithParam<GemmCase> {};

bool SameBits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof *a) == 0;
}

TEST_P(GemmArmTest, IsCloseToTheExactProduct) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const TestInput x(c, 3);
  const std::vector<float> out = RunGemm(PackedPart(w, 0, c.n, 0, 1), x.Rows(0, 3));
  // One rounding or truncation per k16 step at the magnitude of the sum, a few more at the end.
  const double bound = std::ldexp(static_cast<double>(c.k) / 16 + 16, -23);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t n = 0; n < c.n; ++n) {
      const Exact e = ExactElement(w, x, t, n);
      ASSERT_NEAR(out[t * c.n + n], e.value, bound * e.magnitude) << t << " " << n;
    }
  }
}

TEST_P(GemmArmTest, ARowIsTheSameInEveryBatch) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  constexpr int64_t kTokens = 200;
  const TestInput x(c, kTokens);
  const std::vector<float> all = RunGemm(part, x.Rows(0, kTokens));
  for (int64_t m : {1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 128, 129}) {
    const std::vector<float> out = RunGemm(part, x.Rows(0, m));
    ASSERT_TRUE(SameBits(out.data(), all.data(), out.size())) << m << " tokens";
  }
  for (int64_t t : {41, 199}) {
    const std::vector<float> alone = RunGemm(part, x.Rows(t, 1));
    EXPECT_TRUE(SameBits(alone.data(), &all[t * c.n], alone.size())) << "token " << t;
  }
  // Rows of x need no alignment.
  const std::vector<float> padded = RunGemm(part, x.Rows(0, 5, 0, 1, 3));
  EXPECT_TRUE(SameBits(padded.data(), all.data(), padded.size()));
}

TEST_P(GemmArmTest, RowsOfTheWeightAreIndependent) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const TestInput x(c, 9);
  const std::vector<float> all = RunGemm(PackedPart(w, 0, c.n, 0, 1), x.Rows(0, 9));
  for (const int64_t begin : {c.n / 2, c.n / 4, c.n - 1}) {
    const int64_t rows = c.n - begin;
    const std::vector<float> out = RunGemm(PackedPart(w, begin, rows, 0, 1), x.Rows(0, 9));
    for (int64_t t = 0; t < 9; ++t) {
      ASSERT_TRUE(SameBits(&out[t * rows], &all[t * c.n + begin], rows)) << begin << " " << t;
    }
  }
}

TEST_P(GemmArmTest, RanksJoinToTheSameBits) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const TestInput x(c, 3);
  const std::vector<float> whole = RunGemm(PackedPart(w, 0, c.n, 0, 1), x.Rows(0, 3));
  for (int world = 2; world <= c.shards; world *= 2) {
    std::vector<std::vector<float>> parts;
    for (int rank = 0; rank < world; ++rank) {
      parts.push_back(RunGemm(PackedPart(w, 0, c.n, rank, world), x.Rows(0, 3, rank, world)));
    }
    for (int width = 1; width < world; width *= 2) {
      for (int r = 0; r + width < world; r += 2 * width) {
        for (size_t i = 0; i < whole.size(); ++i) parts[r][i] += parts[r + width][i];
      }
    }
    EXPECT_TRUE(SameBits(parts[0].data(), whole.data(), whole.size())) << world;
  }
}

TEST_P(GemmArmTest, ShardsAreTheSumsBeforeTheTree) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  const TestInput x(c, 10);
  const TestInput::Part input = x.Rows(0, 10);
  const std::vector<float> whole = RunGemm(part, input);
  ArmContext context;
  // The stride between shards exceeds a shard.
  ArmTensor out(DType::kF32, {c.shards, 10 * c.n + 5});
  TensorView view = out.view();
  view.shape = Shape{c.shards, 10, c.n};
  ConstTensorView scales;
  if (input.scales != nullptr) scales = input.scales->view();
  ASSERT_OK(GemmShards(context.get(), part.weight(), input.view,
                       input.scales == nullptr ? nullptr : &scales, view));
  std::vector<float> sums = out.Get();
  const size_t stride = static_cast<size_t>(10 * c.n + 5);
  for (int64_t s = 0; s < c.shards; ++s) {
    EXPECT_EQ(sums[s * stride + stride - 1], 0.0f);
  }
  for (int64_t width = 1; width < c.shards; width *= 2) {
    for (int64_t s = 0; s + width < c.shards; s += 2 * width) {
      for (size_t i = 0; i < whole.size(); ++i) {
        sums[s * stride + i] += sums[(s + width) * stride + i];
      }
    }
  }
  EXPECT_TRUE(SameBits(sums.data(), whole.data(), whole.size()));
}

TEST_P(GemmArmTest, BF16OutputIsTheSumRoundedOnce) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  const TestInput x(c, 18);
  const TestInput::Part input = x.Rows(0, 18);
  const std::vector<float> sum = RunGemm(part, input);
  ArmContext context;
  // Rows of the output may be wider than N.
  ArmTensor out(DType::kBF16, {18, c.n + 3});
  ConstTensorView scales;
  if (input.scales != nullptr) scales = input.scales->view();
  ASSERT_OK(Gemm(context.get(), part.weight(), input.view,
                 input.scales == nullptr ? nullptr : &scales, out.view().Columns(1, c.n)));
  const std::vector<float> got = out.Get();
  for (int64_t t = 0; t < 18; ++t) {
    const float* row = &got[t * (c.n + 3)];
    ASSERT_EQ(row[0], 0.0f);
    ASSERT_EQ(row[c.n + 1], 0.0f);
    for (int64_t n = 0; n < c.n; ++n) {
      ASSERT_EQ(row[1 + n], ToFloat(ToBF16(sum[t * c.n + n]))) << t << " " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GemmArmTest, ::testing::ValuesIn(GemmCases()),
                         [](const auto& info) { return info.param.name; });

// With a single one among zeros the product is the code's value: decoding is exact.
TEST(GemmDecodeArmTest, EveryCode) {
  ArmContext context;
  for (const WeightFormat format : {WeightFormat::kFp8, WeightFormat::kNvfp4}) {
    GemmCase c;
    c.format = format;
    c.scaling = WeightScaling::kTensor;
    c.n = 256;
    c.k = 256;
    TestWeight w(c);
    w.tensor_scale = 1.0f;
    for (int64_t n = 0; n < 256; ++n) {
      for (int64_t k = 0; k < 256; ++k) {
        // FP8: each row is another permutation of the codes, without NaN.
        const int64_t code = (n + k) % 256;
        if (format == WeightFormat::kFp8) {
          w.codes[n * 256 + k] = static_cast<uint8_t>(code % 128 == 127 ? 0 : code);
        } else if (k % 2 == 0) {
          w.codes[(n * 256 + k) / 2] = static_cast<uint8_t>(n + k * 3);
        }
      }
    }
    for (size_t i = 0; i < w.block16.size(); ++i) w.block16[i] = static_cast<uint8_t>(i % 127);
    const PackedPart part(w, 0, 256, 0, 1);
    std::vector<float> identity(256 * 256);
    for (int64_t t = 0; t < 256; ++t) identity[t * 257] = 1.0f;
    ArmTensor x(DType::kBF16, {256, 256}, identity);
    ArmTensor out(DType::kF32, {256, 256});
    ASSERT_OK(Gemm(context.get(), part.weight(), x.view(), nullptr, out.view()));
    const std::vector<float> got = out.Get();
    for (int64_t n = 0; n < 256; ++n) {
      for (int64_t k = 0; k < 256; ++k) ASSERT_EQ(got[k * 256 + n], w.Value(n, k)) << n << " " << k;
    }
  }
}

TEST(GemmEntryArmTest, ANanStaysInItsRow) {
  GemmCase c;
  c.format = WeightFormat::kFp8;
  c.scaling = WeightScaling::kTensor;
  c.n = 20;
  c.k = 64;
  c.act_group = 64;
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  ArmContext context;
  ArmTensor x(DType::kU8, {4, 64}), scales(DType::kF32, {4, 1}, {1, 1, 1, 1});
  std::vector<uint8_t> codes(4 * 64, 0x38);
  codes[64 + 13] = 0x7f;
  codes[3 * 64 + 2] = 0xff;
  x.SetBytes(codes);
  ArmTensor out(DType::kF32, {4, 20});
  const ConstTensorView act = scales.view();
  ASSERT_OK(Gemm(context.get(), part.weight(), x.view(), &act, out.view()));
  const std::vector<float> got = out.Get();
  for (int64_t i = 0; i < 4 * 20; ++i) EXPECT_EQ(std::isnan(got[i]), i / 20 % 2 == 1) << i;
}

TEST(GemmEntryArmTest, NoTokensAndDryRuns) {
  GemmCase c;
  c.n = 20;
  c.k = 64;
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  ArmContext context;
  const ConstTensorView none(TensorView(nullptr, DType::kBF16, {0, 64}));
  ASSERT_OK(
      Gemm(context.get(), part.weight(), none, nullptr, TensorView(nullptr, DType::kF32, {0, 20})));
  EXPECT_EQ(context.op_launches(), 1);
  DryRunContext dry;
  ASSERT_OK(Gemm(dry.get(), part.weight(), TensorView(nullptr, DType::kBF16, {7, 64}), nullptr,
                 TensorView(nullptr, DType::kF32, {7, 20})));
}

TEST(GemmEntryArmTest, TheCudaArmSaysWhatItCannotRun) {
  if (TestDevice() != DeviceType::kCuda) return;
  GemmCase c;
  c.n = 20;
  c.k = 64;
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  ArmContext context;
  ArmTensor x(DType::kF32, {2, 64}), out(DType::kF32, {2, 20});
  const auto code = absl::StatusCode::kFailedPrecondition;
  EXPECT_THAT(Gemm(context.get(), part.weight(), x.view(), nullptr, out.view()),
              StatusIs(code, HasSubstr("cuda: activations are F32")));
  GemmWeight weight = part.weight();
  weight.format = WeightFormat::kF32;
  EXPECT_THAT(Gemm(context.get(), weight, x.view(), nullptr, out.view()),
              StatusIs(code, HasSubstr("cuda: weights are F32")));
  weight = part.weight();
  weight.block_rows.resize(9);
  ArmTensor half(DType::kBF16, {2, 64});
  EXPECT_THAT(Gemm(context.get(), weight, half.view(), nullptr, out.view()),
              StatusIs(code, HasSubstr("more than 8 ranges")));
  weight = part.weight();
  weight.splits = 8;
  EXPECT_THAT(Gemm(context.get(), weight, half.view(), nullptr, out.view()),
              StatusIs(code, HasSubstr("not a multiple of 16")));
}

}  // namespace
}  // namespace lockstep
