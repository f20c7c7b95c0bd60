// Corrupt values in a checkpoint: each is DataLoss with the tensor's name and the index.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "models/quant/testing/linear_test_util.h"

namespace lockstep {
namespace {

using ::lockstep::testing::MakeStoredLinear;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::StoredLinear;
using ::lockstep::testing::WholeShard;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

absl::Status Load(const StoredLinear& s, const LinearShard& shard) {
  const std::unique_ptr<Checkpoint> checkpoint = s.Write();
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  return LinearMethodFor(s.scheme.weight)
      .Prepare(s.scheme, shard, ActivationQuant::kCheckpoint, &store)
      .status();
}

struct Corruption {
  std::string name;
  WeightScheme weight;
  std::string tensor;
  std::string what;
  std::function<void(StoredLinear*)> apply;
};

std::vector<Corruption> Corruptions() {
  const auto byte = [](const std::string& suffix, size_t at, uint8_t value) {
    return [=](StoredLinear* s) { s->tensors[suffix].bytes[at] = value; };
  };
  const auto f32 = [](const std::string& suffix, size_t at, float value) {
    return [=](StoredLinear* s) {
      std::memcpy(&s->tensors[suffix].bytes[at * 4], &value, sizeof value);
    };
  };
  using W = WeightScheme;
  return {
      {"bf16_infinity", W::kBF16, "weight", "index 70 is a weight that is not finite",
       [](StoredLinear* s) {
         s->tensors["weight"].bytes[140] = 0x80;
         s->tensors["weight"].bytes[141] = 0x7f;
       }},
      {"fp8_nan", W::kFp8Channel, "weight", "index 67 is a NaN code", byte("weight", 67, 0x7f)},
      {"fp8_negative_nan", W::kFp8Block, "weight", "index 5 is a NaN code",
       byte("weight", 5, 0xff)},
      {"channel_nan", W::kFp8Channel, "weight_scale", "index 3 is the scale",
       f32("weight_scale", 3, kNan)},
      {"channel_negative", W::kFp8Channel, "weight_scale", "index 3 is the scale -1",
       f32("weight_scale", 3, -1.0f)},
      {"channel_zero", W::kFp8Channel, "weight_scale", "index 3 is the zero scale of row 3",
       f32("weight_scale", 3, 0.0f)},
      {"block_zero", W::kFp8Block, "weight_scale_inv", "index 0 is the zero scale of row 0",
       f32("weight_scale_inv", 0, 0.0f)},
      {"block_infinite", W::kFp8Block, "weight_scale_inv", "index 0 is the scale inf",
       f32("weight_scale_inv", 0, kInf)},
      {"block_negative", W::kFp8Block, "weight_scale_inv", "index 0 is the scale -2",
       f32("weight_scale_inv", 0, -2.0f)},
      {"tensor_nan", W::kFp8Tensor, "weight_scale", "index 0 is the scale",
       f32("weight_scale", 0, kNan)},
      {"tensor_zero", W::kFp8Tensor, "weight_scale", "the scale is zero",
       f32("weight_scale", 0, 0.0f)},
      {"nvfp4_block_nan", W::kNvfp4, "weight_scale", "index 6 is a NaN or a negative block scale",
       byte("weight_scale", 6, 0x7f)},
      {"nvfp4_block_negative", W::kNvfp4, "weight_scale",
       "index 6 is a NaN or a negative block scale", byte("weight_scale", 6, 0x81)},
      {"nvfp4_global_nan", W::kNvfp4, "weight_scale_2", "index 0 is the scale",
       f32("weight_scale_2", 0, kNan)},
      {"nvfp4_global_infinite", W::kNvfp4, "weight_scale_2", "index 0 is the scale inf",
       f32("weight_scale_2", 0, kInf)},
      {"nvfp4_global_zero", W::kNvfp4, "weight_scale_2", "the global scale is zero",
       f32("weight_scale_2", 0, 0.0f)},
      {"nvfp4_divisor_tiny", W::kNvfp4, "weight_scale_2", "has no reciprocal",
       [=](StoredLinear* s) {
         s->scheme.global_is_divisor = true;
         f32("weight_scale_2", 0, 1e-40f)(s);
       }},
      {"static_zero", W::kFp8Tensor, "input_scale", "a zero activation scale",
       [](StoredLinear* s) {
         s->scheme.activation = ActivationScheme::kFp8Static;
         s->scheme.input_scale = "input_scale";
         s->AddFloats("input_scale", DType::kF32, {}, {0.0f});
       }},
  };
}

class CorruptWeightsTest : public ::testing::TestWithParam<Corruption> {};

TEST_P(CorruptWeightsTest, IsDataLossWithTheTensorsName) {
  const Corruption& c = GetParam();
  StoredLinear s = MakeStoredLinear(c.weight, 20, 64);
  ASSERT_OK(Load(s, WholeShard(s)));
  c.apply(&s);
  EXPECT_THAT(Load(s, WholeShard(s)),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("tensor m." + c.tensor + " in "), HasSubstr(c.what))));
}

INSTANTIATE_TEST_SUITE_P(Values, CorruptWeightsTest, ::testing::ValuesIn(Corruptions()),
                         [](const auto& info) { return info.param.name; });

TEST(ZeroWeightsTest, AZeroGlobalOfZeroCodesIsFine) {
  for (WeightScheme weight : {WeightScheme::kNvfp4, WeightScheme::kFp8Tensor}) {
    StoredLinear s = MakeStoredLinear(weight, 20, 64);
    for (uint8_t& byte : s.tensors["weight"].bytes) byte = 0x80;  // zeros, some negative
    const std::string scale = s.scheme.global_scale.empty() ? "weight_scale" : "weight_scale_2";
    s.AddFloats(scale, DType::kF32, {}, {0.0f});
    s.scheme.global_is_divisor = true;
    EXPECT_OK(Load(s, WholeShard(s)));
  }
}

// Rows and blocks of zeros have no largest value to make a scale of.
TEST(ZeroWeightsTest, AZeroScaleOfARowOrBlockOfZerosIsFine) {
  StoredLinear channel = MakeStoredLinear(WeightScheme::kFp8Channel, 20, 64);
  const float zero = 0.0f;
  std::memcpy(&channel.tensors["weight_scale"].bytes[3 * 4], &zero, sizeof zero);
  for (size_t i = 3 * 64; i < 4 * 64; ++i) channel.tensors["weight"].bytes[i] = 0x80;
  EXPECT_OK(Load(channel, WholeShard(channel)));
  StoredLinear block = MakeStoredLinear(WeightScheme::kFp8Block, 150, 140);
  // The block at the lower right: rows 128 to 149, columns 128 to 139.
  std::memcpy(&block.tensors["weight_scale_inv"].bytes[3 * 4], &zero, sizeof zero);
  for (size_t row = 128; row < 150; ++row) {
    for (size_t column = 128; column < 140; ++column) {
      block.tensors["weight"].bytes[row * 140 + column] = 0;
    }
  }
  EXPECT_OK(Load(block, WholeShard(block)));
  block.tensors["weight"].bytes[149 * 140 + 139] = 1;
  EXPECT_THAT(
      Load(block, WholeShard(block)),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("index 3 is the zero scale of row 149")));
}

// Files hold whatever an activation that was never calibrated left behind.
TEST(UnusedScalesTest, ValuesThatNoComputationUsesAreNotChecked) {
  for (const char* name : {"input_global_scale", "input_scale"}) {
    StoredLinear s = MakeStoredLinear(WeightScheme::kNvfp4, 20, 64);
    s.AddFloats(name, DType::kF32, {1}, {kNan});
    EXPECT_OK(Load(s, WholeShard(s))) << name;
  }
}

TEST(ForeignRowsTest, OnlyTheRanksOwnPartIsRead) {
  StoredLinear s = MakeStoredLinear(WeightScheme::kFp8Channel, 20, 64);
  s.tensors["weight"].bytes[19 * 64] = 0x7f;
  LinearShard shard = WholeShard(s);
  shard.rows = {{0, 19}};
  EXPECT_OK(Load(s, shard));
  shard.rows = {{19, 1}};
  EXPECT_THAT(Load(s, shard), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("index 1216")));
}

}  // namespace
}  // namespace lockstep
