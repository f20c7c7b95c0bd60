// Tests of the linear methods: values, cuts into ranks, accounting, activation quantization,
// refusals.
#include "models/quant/linear_method.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/tree_sum.h"
#include "models/quant/testing/linear_test_util.h"

namespace lockstep {
namespace {

using ::lockstep::testing::MakeStoredLinear;
using ::lockstep::testing::RowParallelShard;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::StoredLinear;
using ::lockstep::testing::TestContext;
using ::lockstep::testing::WholeShard;
using ::testing::HasSubstr;

std::vector<float> RandomInput(int64_t tokens, int64_t k) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(tokens * k);
  for (float& v : x) v = normal(rng);
  return x;
}

std::unique_ptr<ResidentLinear> Prepare(const StoredLinear& stored, const LinearShard& shard,
                                        WeightStore* store,
                                        ActivationQuant quant = ActivationQuant::kCheckpoint) {
  absl::StatusOr<std::unique_ptr<ResidentLinear>> linear =
      LinearMethodFor(stored.scheme.weight).Prepare(stored.scheme, shard, quant, store);
  CHECK_OK(linear.status());
  return std::move(linear).value();
}

void ExpectEqualBits(const std::vector<float>& a, const std::vector<float>& b,
                     const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * 4)) << what;
}

struct FormatCase {
  std::string name;
  WeightScheme weight;
  ActivationScheme activation = ActivationScheme::kNone;
  DType scale_dtype = DType::kF32;
};

class LinearMethodTest : public ::testing::TestWithParam<FormatCase> {
 protected:
  StoredLinear Stored(int64_t n, int64_t k) const {
    StoredLinear s = MakeStoredLinear(GetParam().weight, n, k, GetParam().scale_dtype);
    s.scheme.activation = GetParam().activation;
    if (GetParam().activation == ActivationScheme::kFp8Static) {
      s.scheme.input_scale = "input_scale";
      s.AddFloats("input_scale", DType::kF32, {1}, {0.01f});
    }
    return s;
  }
  TestContext context_;
};

TEST_P(LinearMethodTest, MatchesTheDequantizedProduct) {
  const StoredLinear s = Stored(150, 400);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const auto linear = Prepare(s, WholeShard(s), &store, ActivationQuant::kNone);
  const std::vector<float> x = RandomInput(5, s.k);
  const std::vector<float> out = context_.Apply(*linear, x, s.k);
  double largest = 0;
  std::vector<double> expected;
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t n = 0; n < s.n; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < s.k; ++k) {
        sum += static_cast<double>(s.dequantized[n * s.k + k]) * x[t * s.k + k];
      }
      expected.push_back(sum);
      largest = std::max(largest, std::fabs(sum));
    }
  }
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 1e-5 * largest) << i;
  EXPECT_OK(store.CheckLeftovers());
}

TEST_P(LinearMethodTest, ResidentBytesAreTheStoredBytes) {
  const StoredLinear s = Stored(37, 256);
  int64_t stored_bytes = 0;
  for (const auto& item : s.tensors) stored_bytes += static_cast<int64_t>(item.second.bytes.size());
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  Counters counters;
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, &counters, nullptr);
  Prepare(s, WholeShard(s), &store);
  EXPECT_EQ(store.total().checkpoint, stored_bytes);
  EXPECT_EQ(store.total().resident, stored_bytes);
  EXPECT_EQ(counters.Get(Traffic::kWeightsToDevice), stored_bytes);
  ASSERT_EQ(store.bytes_by_class().size(), 1u);
  EXPECT_EQ(store.bytes_by_class().begin()->first.format, Name(s.scheme.weight));
  EXPECT_EQ(store.bytes_by_class().begin()->first.module_class, "mlp");
}

// Rows in several ranges, with borders inside 128-blocks: every row as in the whole linear.
TEST_P(LinearMethodTest, RowSlicesGiveTheRowsOfTheWhole) {
  const StoredLinear s = Stored(400, 256);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const std::vector<float> x = RandomInput(3, s.k);
  const std::vector<float> whole = context_.Apply(*Prepare(s, WholeShard(s), &store), x, s.k);
  LinearShard shard = WholeShard(s);
  shard.rows = {{5, 20}, {60, 10}, {100, 170}, {399, 1}};
  const std::vector<float> part = context_.Apply(*Prepare(s, shard, &store), x, s.k);
  std::vector<float> expected;
  for (int64_t t = 0; t < 3; ++t) {
    for (const Range& r : shard.rows) {
      for (int64_t n = r.begin; n < r.begin + r.size; ++n) expected.push_back(whole[t * s.n + n]);
    }
  }
  ExpectEqualBits(part, expected, "slices");
}

TEST_P(LinearMethodTest, RanksOfARowParallelLinearJoinToTheSameBits) {
  for (int64_t k : {256, 384, 1280}) {  // shards of 32, 48, 160: inside and across 128-blocks
    const StoredLinear s = Stored(70, k);
    const std::unique_ptr<Checkpoint> checkpoint = s.Write();
    const std::vector<float> x = RandomInput(3, k);
    std::vector<float> whole;
    for (int world : {1, 2, 4, 8}) {
      std::vector<std::vector<float>> parts;
      std::vector<const float*> pointers;
      int64_t bytes = 0;
      for (int rank = 0; rank < world; ++rank) {
        WeightStore store(checkpoint.get(), DeviceType::kCpu, rank, world, nullptr, nullptr);
        parts.push_back(
            context_.Apply(*Prepare(s, RowParallelShard(s, rank, world), &store), x, k));
        bytes += store.total().resident;
      }
      for (const auto& part : parts) pointers.push_back(part.data());
      std::vector<float> sum(parts[0].size());
      TreeSum(nullptr, pointers, static_cast<int64_t>(sum.size()), sum.data());
      if (world == 1) whole = sum;
      ExpectEqualBits(sum, whole, absl::StrCat("K ", k, ", world ", world));
      EXPECT_GE(bytes, s.n * k / 2);
    }
  }
}

TEST_P(LinearMethodTest, QuantizesAnInputOncePerWay) {
  const StoredLinear s = Stored(48, 256);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const auto column = Prepare(s, WholeShard(s), &store);
  const auto row = Prepare(s, RowParallelShard(s, 0, 1), &store);
  std::vector<float> x = RandomInput(2, s.k), out(2 * s.n);
  const TensorView outv(out.data(), DType::kF32, {2, s.n});
  Workspace::Scope scope(context_.workspace());
  LinearInput input(TensorView(x.data(), DType::kF32, {2, s.k}));
  if (GetParam().activation == ActivationScheme::kNone) {
    EXPECT_THAT(column->QuantizeInput(context_.ctx(), &input),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("m does not quantize its input")));
    return;
  }
  ASSERT_OK(column->Apply(context_.ctx(), &input, outv));
  ASSERT_OK(column->Apply(context_.ctx(), &input, outv));
  EXPECT_EQ(input.quantized().size(), 1u);
  ASSERT_OK(row->Apply(context_.ctx(), &input, outv));  // other groups of columns
  EXPECT_EQ(input.quantized().size(), 2u);
  ASSERT_OK_AND_ASSIGN(const LinearInput::Quantized q, row->QuantizeInput(context_.ctx(), &input));
  EXPECT_EQ(input.quantized().size(), 2u);
  EXPECT_EQ(q.scales.shape, (Shape{2, 8}));
  EXPECT_EQ(q.codes.shape, (Shape{2, 256}));

  // Never quantized when the engine says so.
  const auto weight_only = Prepare(s, WholeShard(s), &store, ActivationQuant::kNone);
  EXPECT_THAT(weight_only->QuantizeInput(context_.ctx(), &input),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_P(LinearMethodTest, ARankWithoutRowsHoldsNoCodes) {
  const StoredLinear s = Stored(16, 128);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  LinearShard shard = WholeShard(s);
  shard.rows = {};
  const auto linear = Prepare(s, shard, &store);
  EXPECT_TRUE(context_.Apply(*linear, RandomInput(2, s.k), s.k).empty());
  EXPECT_LE(store.total().resident, 8);
}

TEST_P(LinearMethodTest, RefusesIllegalParts) {
  const StoredLinear s = Stored(32, 256);
  const LinearMethod& method = LinearMethodFor(s.scheme.weight);
  const auto code = absl::StatusCode::kInvalidArgument;
  LinearShard shard = WholeShard(s);
  shard.rows = {{16, 17}};
  EXPECT_THAT(method.Validate(s.scheme, shard), StatusIs(code, HasSubstr("rows 16+17")));
  shard = WholeShard(s);
  shard.columns = {0, 128};
  EXPECT_THAT(method.Validate(s.scheme, shard), StatusIs(code, HasSubstr("has all columns")));
  shard = RowParallelShard(s, 0, 2);
  shard.columns.begin = 16;
  EXPECT_THAT(method.Validate(s.scheme, shard), StatusIs(code, HasSubstr("no whole virtual")));
  shard.columns = {0, 96};
  EXPECT_THAT(method.Validate(s.scheme, shard), StatusIs(code, HasSubstr("a power of two")));
  shard.virtual_shards = {3, 80};
  EXPECT_THAT(method.Validate(s.scheme, shard), StatusIs(code, HasSubstr("do not cut K")));
}

TEST_P(LinearMethodTest, RefusesOtherShapes) {
  StoredLinear s = Stored(32, 256);
  for (auto& item : s.tensors) {
    StoredLinear wrong = s;
    StoredLinear::Tensor& t = wrong.tensors[item.first];
    t.shape.push_back(1);
    t.shape.push_back(1);
    t.shape.push_back(1);
    const std::unique_ptr<Checkpoint> checkpoint = wrong.Write();
    WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
    EXPECT_THAT(LinearMethodFor(s.scheme.weight)
                    .Prepare(s.scheme, WholeShard(s), ActivationQuant::kCheckpoint, &store),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tensor m." + item.first)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, LinearMethodTest,
    ::testing::Values(
        FormatCase{"bf16", WeightScheme::kBF16}, FormatCase{"nvfp4", WeightScheme::kNvfp4},
        FormatCase{"fp8_tensor", WeightScheme::kFp8Tensor},
        FormatCase{"fp8_tensor_static", WeightScheme::kFp8Tensor, ActivationScheme::kFp8Static},
        FormatCase{"fp8_channel", WeightScheme::kFp8Channel, ActivationScheme::kNone, DType::kBF16},
        FormatCase{"fp8_channel_per_token", WeightScheme::kFp8Channel,
                   ActivationScheme::kFp8PerToken},
        FormatCase{"fp8_block", WeightScheme::kFp8Block},
        FormatCase{"fp8_block_dynamic", WeightScheme::kFp8Block, ActivationScheme::kFp8Block128,
                   DType::kBF16}),
    [](const auto& info) { return info.param.name; });

// Layout variants of the same numbers.
TEST(LinearVariantsTest, ScaleShapesOfOtherExporters) {
  TestContext context;
  struct Variant {
    WeightScheme weight;
    std::vector<int64_t> shape;
  };
  for (const Variant& v :
       {Variant{WeightScheme::kFp8Tensor, {1}}, Variant{WeightScheme::kFp8Channel, {150}},
        Variant{WeightScheme::kFp8Block, {2, 1, 3, 1}}}) {
    StoredLinear s = MakeStoredLinear(v.weight, 150, 384);
    const std::vector<float> x = RandomInput(2, s.k);
    const auto run = [&] {
      const std::unique_ptr<Checkpoint> checkpoint = s.Write();
      WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
      return context.Apply(*Prepare(s, WholeShard(s), &store), x, s.k);
    };
    const std::vector<float> expected = run();
    s.tensors[s.scheme.scale].shape = v.shape;
    ExpectEqualBits(run(), expected, s.scheme.scale);
  }
}

TEST(LinearVariantsTest, F32WeightsAndTiedEmbeddingRows) {
  TestContext context;
  StoredLinear s = MakeStoredLinear(WeightScheme::kBF16, 40, 48);
  s.AddFloats("weight", DType::kF32, {40, 48}, s.dequantized);
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const auto linear = Prepare(s, WholeShard(s), &store);
  std::vector<float> unit(48, 0.0f);
  unit[7] = 1.0f;
  const std::vector<float> out = context.Apply(*linear, unit, 48);
  for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(out[n], s.dequantized[n * 48 + 7]);
  int32_t token = 11;
  std::vector<float> row(48);
  ASSERT_OK(linear->GatherRows(context.ctx(), TensorView(&token, DType::kI32, {1}), 0,
                               TensorView(row.data(), DType::kF32, {1, 48})));
  for (int64_t k = 0; k < 48; ++k) EXPECT_EQ(row[k], s.dequantized[11 * 48 + k]);

  const StoredLinear fp8 = MakeStoredLinear(WeightScheme::kFp8Tensor, 40, 48);
  const std::unique_ptr<Checkpoint> other = fp8.Write();
  WeightStore fp8_store(other.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  EXPECT_THAT(Prepare(fp8, WholeShard(fp8), &fp8_store)
                  ->GatherRows(context.ctx(), TensorView(&token, DType::kI32, {1}), 0,
                               TensorView(row.data(), DType::kF32, {1, 48})),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("m (fp8_tensor)")));
}

// The worked vector of models-*.md 5.2: codes, block scales and the stored divisor.
// compressed-tensors stores the reciprocal of what ModelOpt stores, rounded to F32.
TEST(Nvfp4VectorTest, BothConventionsOfTheGlobalAreWithinOneUlp) {
  TestContext context;
  StoredLinear multiplier = MakeStoredLinear(WeightScheme::kNvfp4, 48, 64);
  std::mt19937 rng(7);
  std::uniform_real_distribution<float> uniform(1e-4f, 1e4f);
  for (int i = 0; i < 50; ++i) {
    const float global = uniform(rng);
    multiplier.AddFloats("weight_scale_2", DType::kF32, {}, {global});
    StoredLinear divisor = multiplier;
    divisor.scheme.global_is_divisor = true;
    divisor.AddFloats("weight_scale_2", DType::kF32, {}, {1.0f / global});
    const auto apply = [&](const StoredLinear& s, std::vector<float>* out) {
      const std::unique_ptr<Checkpoint> checkpoint = s.Write();
      WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
      const auto linear = Prepare(s, WholeShard(s), &store);
      *out = context.Apply(*linear, RandomInput(2, s.k), s.k);
    };
    std::vector<float> a, b;
    apply(multiplier, &a);
    apply(divisor, &b);
    // The reciprocal of a reciprocal: the global may be its neighbour, and so may the products.
    ASSERT_EQ(a.size(), b.size());
    for (size_t j = 0; j < a.size(); ++j) {
      const float ulp = std::nextafter(std::fabs(a[j]), INFINITY) - std::fabs(a[j]);
      EXPECT_LE(std::fabs(a[j] - b[j]), 2 * ulp) << global << " at " << j;
    }
  }
}

TEST(Nvfp4VectorTest, WorkedExample) {
  TestContext context;
  StoredLinear s;
  s.scheme.weight = WeightScheme::kNvfp4;
  s.scheme.global_is_divisor = true;
  s.scheme.codes = "weight_packed";
  s.scheme.scale = "weight_scale";
  s.scheme.global_scale = "weight_global_scale";
  s.n = 1;
  s.k = 32;
  s.tensors["weight_packed"] = {DType::kU8,
                                {1, 16},
                                {0xff, 0xef, 0xee, 0xde, 0xdd, 0xcc, 0xab, 0x9a, 0x10, 0x22, 0x43,
                                 0x54, 0x65, 0x66, 0x76, 0x77}};
  s.tensors["weight_scale"] = {DType::kE4M3, {1, 2}, {0x7e, 0x7d}};
  s.AddFloats("weight_global_scale", DType::kF32, {1}, {5376.0f});
  s.AddFloats("input_global_scale", DType::kF32, {1}, {1.0f});
  const uint16_t expected[32] = {0xbf00, 0xbf00, 0xbf00, 0xbeab, 0xbeab, 0xbeab, 0xbeab, 0xbe80,
                                 0xbe80, 0xbe80, 0xbe2b, 0xbe2b, 0xbe00, 0xbdab, 0xbdab, 0xbd2b,
                                 0x0000, 0x3d1e, 0x3d9e, 0x3d9e, 0x3dee, 0x3e1e, 0x3e1e, 0x3e6e,
                                 0x3e6e, 0x3e9e, 0x3e9e, 0x3e9e, 0x3e9e, 0x3eee, 0x3eee, 0x3eee};
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const auto linear = Prepare(s, WholeShard(s), &store);
  EXPECT_OK(store.CheckLeftovers());  // the activation's global is read by nobody, and that is fine
  std::vector<float> x(32 * 32, 0.0f);
  for (int i = 0; i < 32; ++i) x[i * 32 + i] = 1.0f;
  const std::vector<float> out = context.Apply(*linear, x, 32);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(ToBF16(out[i]).bits, expected[i]) << i;
}

TEST(Nvfp4VectorTest, CutsInsideABlockAreRefused) {
  StoredLinear s = MakeStoredLinear(WeightScheme::kNvfp4, 16, 192);
  LinearShard shard = RowParallelShard(s, 0, 1);
  shard.virtual_shards = {8, 24};
  EXPECT_THAT(LinearMethodFor(WeightScheme::kNvfp4).Validate(s.scheme, shard),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("multiples of 16")));
  s.k = 200;
  EXPECT_THAT(LinearMethodFor(WeightScheme::kNvfp4).Validate(s.scheme, WholeShard(s)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("multiples of 16")));
}

// What CUDA cannot multiply is refused when it is loaded, with or without a device.
TEST(LinearVariantsTest, CudaRefusesF32AndOddColumns) {
  StoredLinear s = MakeStoredLinear(WeightScheme::kBF16, 16, 32);
  s.AddFloats("weight", DType::kF32, {16, 32}, std::vector<float>(16 * 32));
  const std::unique_ptr<Checkpoint> f32 = s.Write();
  WeightStore store(f32.get(), DeviceType::kCuda, 0, 1, nullptr, nullptr);
  const auto code = absl::StatusCode::kFailedPrecondition;
  EXPECT_THAT(LinearMethodFor(WeightScheme::kBF16)
                  .Prepare(s.scheme, WholeShard(s), ActivationQuant::kNone, &store),
              StatusIs(code, HasSubstr("m [16, 32]: on cuda weights are BF16, FP8 or NVFP4")));
  s = MakeStoredLinear(WeightScheme::kBF16, 16, 40);
  const std::unique_ptr<Checkpoint> odd = s.Write();
  WeightStore odd_store(odd.get(), DeviceType::kCuda, 0, 1, nullptr, nullptr);
  EXPECT_THAT(LinearMethodFor(WeightScheme::kBF16)
                  .Prepare(s.scheme, WholeShard(s), ActivationQuant::kNone, &odd_store),
              StatusIs(code, HasSubstr("multiples of 16, a virtual shard has 40")));
}

TEST(LinearVariantsTest, OtherDtypesAreRefused) {
  for (WeightScheme weight :
       {WeightScheme::kBF16, WeightScheme::kNvfp4, WeightScheme::kFp8Channel}) {
    StoredLinear s = MakeStoredLinear(weight, 16, 32);
    StoredLinear::Tensor& t = s.tensors["weight"];
    t.dtype = DType::kBool;
    if (weight == WeightScheme::kBF16) t.shape.push_back(2);
    const std::unique_ptr<Checkpoint> bad = s.Write();
    WeightStore store(bad.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
    EXPECT_THAT(
        LinearMethodFor(weight).Prepare(s.scheme, WholeShard(s), ActivationQuant::kNone, &store),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("m.weight")));
  }
}

}  // namespace
}  // namespace lockstep
