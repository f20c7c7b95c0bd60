// Tests of WeightStore: accounting, leftovers, placement of small tensors and its errors.
#include "models/weights/weight_store.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/weights/testing/safetensors_writer.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::MakeTempDir;
using ::testing::Not;
using testing::SafetensorsWriter;
using testing::StatusIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::unique_ptr<Checkpoint> Make(const SafetensorsWriter& writer) {
  const std::string dir = MakeTempDir();
  writer.Write(dir + "/model.safetensors");
  auto checkpoint = Checkpoint::Open(dir);
  CHECK_OK(checkpoint.status());
  return std::move(checkpoint).value();
}

std::vector<float> Count(int n) {
  std::vector<float> values;
  for (int i = 0; i < n; ++i) values.push_back(static_cast<float>(i));
  return values;
}

SafetensorsWriter SmallModel() {
  SafetensorsWriter writer;
  writer.AddBF16("norm", {16}, Count(16));
  writer.AddF32("A_log", {8}, Count(8));
  writer.AddBF16("conv", {32, 1, 4}, Count(128));
  writer.AddF32("kv", {8, 4}, Count(32));
  return writer;
}

// The line of /proc/self/maps that holds `address`.
std::string MappingOf(const void* address) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    unsigned long begin = 0, end = 0;
    CHECK_EQ(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end), 2);
    const auto value = reinterpret_cast<unsigned long>(address);
    if (value >= begin && value < end) return line;
  }
  return "";
}

TEST(WeightStoreTest, MemoryIsNanUntilItIsWritten) {
  const auto checkpoint = Make(SmallModel());
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const auto fill = [](uint8_t* out) {
    std::memset(out, 0, 8);  // half of it
    return absl::OkStatus();
  };
  ASSERT_OK_AND_ASSIGN(const DeviceBuffer buffer, store.Place(16, 16, {"f32", "norm"}, fill));
  const float* values = static_cast<const float*>(buffer.data());
  EXPECT_EQ(values[1], 0.0f);
  EXPECT_TRUE(std::isnan(values[2]) && std::isnan(values[3]));
  const uint8_t* bytes = static_cast<const uint8_t*>(buffer.data());
  EXPECT_TRUE(IsE4M3Nan(bytes[8]));
  EXPECT_TRUE(std::isnan(ToFloat(static_cast<const BF16*>(buffer.data())[4])));
}

TEST(WeightStoreTest, WeightsNeverStayInTheMappedFile) {
  const auto checkpoint = Make(SmallModel());
  ASSERT_OK_AND_ASSIGN(const TensorInfo* stored, checkpoint->Get("norm"));
  ASSERT_THAT(MappingOf(stored->data), HasSubstr("model.safetensors"));
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  ASSERT_OK_AND_ASSIGN(const TensorView norm,
                       store.PlaceTensor("norm", {16}, ShardSpec::Split(16, 1), "norm"));
  ASSERT_FALSE(MappingOf(norm.data).empty());
  EXPECT_THAT(MappingOf(norm.data), Not(HasSubstr("model.safetensors")));
}

TEST(WeightStoreTest, PlacesSlicesAndAccountsThem) {
  const auto checkpoint = Make(SmallModel());
  Counters counters;
  std::vector<LoadProgress> progress;
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 1, 2, &counters,
                    [&progress](const LoadProgress& p) { progress.push_back(p); });
  store.SetExpectedBytes(160);
  ASSERT_OK_AND_ASSIGN(
      const TensorView conv,
      store.PlaceTensor("conv", {32, 1, 4}, ShardSpec::Split({{4, 2}, {4, 2}, {4, 4}}), "conv"));
  EXPECT_EQ(conv.ToString(), "BF16[16, 4]");
  EXPECT_EQ(ToFloat(conv.row<BF16>(0)[0]), 4 * 4.0f);    // first segment: rows 4..7
  EXPECT_EQ(ToFloat(conv.row<BF16>(4)[1]), 12 * 4 + 1);  // second: rows 12..15
  EXPECT_EQ(ToFloat(conv.row<BF16>(8)[0]), 24 * 4);      // third: rows 24..31
  ASSERT_OK_AND_ASSIGN(const TensorView a_log,
                       store.PlaceTensor("A_log", {8}, ShardSpec::Split(8, 1), "delta_net"));
  EXPECT_EQ(a_log.ToString(), "F32[4]");
  EXPECT_EQ(a_log.row<float>(0)[0], 4.0f);
  EXPECT_EQ(store.total().resident, 128 + 16);
  EXPECT_EQ(store.total().checkpoint, 128 + 16);
  const WeightClass conv_class{"bf16", "conv"};
  ASSERT_EQ(store.bytes_by_class().count(conv_class), 1u);
  EXPECT_EQ(store.bytes_by_class().at(conv_class).resident, 128);
  EXPECT_EQ(counters.Get(Traffic::kWeightsToDevice), 144);
  ASSERT_EQ(progress.size(), 2u);
  EXPECT_EQ(progress[1].bytes_done, 144);
  EXPECT_EQ(progress[1].bytes_total, 160);
  EXPECT_EQ(progress[1].tensors_done, 2);
  EXPECT_EQ(progress[1].current, "A_log");
}

TEST(WeightStoreTest, SharesOfAllRanksAreTheCheckpointPlusItsReplicas) {
  const auto checkpoint = Make(SmallModel());
  for (int world : {1, 2, 4, 8}) {
    int64_t sum = 0;
    for (int rank = 0; rank < world; ++rank) {
      WeightStore store(checkpoint.get(), DeviceType::kCpu, rank, world, nullptr, nullptr);
      ASSERT_THAT(store.PlaceTensor("norm", {16}, ShardSpec::Replicated(16), "norm"), IsOk());
      ASSERT_THAT(store.PlaceTensor("A_log", {8}, ShardSpec::Split(8, 1), "x"), IsOk());
      ASSERT_THAT(store.PlaceTensor("conv", {32, 1, 4}, ShardSpec::Split({{8, 2}, {8, 2}}), "x"),
                  IsOk());
      ASSERT_THAT(store.PlaceTensor("kv", {8, 4}, ShardSpec::Split({{2, 4, true}}), "x"), IsOk());
      EXPECT_THAT(store.CheckLeftovers(), IsOk());
      EXPECT_THAT(store.PlacedTwice(), IsEmpty());
      sum += store.total().checkpoint;
    }
    const int64_t norm_replicas = (world - 1) * checkpoint->Find("norm")->bytes;
    const int64_t kv_replicas = world > 2 ? (world / 2 - 1) * checkpoint->Find("kv")->bytes : 0;
    EXPECT_EQ(sum - norm_replicas - kv_replicas, checkpoint->total_bytes()) << world;
  }
}

TEST(WeightStoreTest, LeftoversAreListed) {
  const auto checkpoint = Make(SmallModel());
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  ASSERT_THAT(store.Use("norm"), IsOk());
  ASSERT_THAT(store.Use("norm"), IsOk());  // tied weights
  EXPECT_EQ(store.UseIfPresent("none"), nullptr);
  EXPECT_NE(store.UseIfPresent("A_log"), nullptr);
  EXPECT_THAT(store.Use("none"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  EXPECT_THAT(store.CheckLeftovers(),
              StatusIs(kInvalid, AllOf(HasSubstr("2 tensors"), HasSubstr("conv, kv"),
                                       Not(HasSubstr("norm,")))));
  store.Allow([](const std::string& name) { return absl::StartsWith(name, "conv"); });
  EXPECT_THAT(store.CheckLeftovers(), StatusIs(kInvalid, HasSubstr("1 tensors")));
  store.Allow([](const std::string&) { return true; });
  EXPECT_THAT(store.CheckLeftovers(), IsOk());
}

TEST(WeightStoreTest, LongListsOfLeftoversAreCut) {
  SafetensorsWriter writer;
  for (int i = 0; i < 50; ++i) writer.AddF32("t" + std::to_string(100 + i), {1}, {0});
  const auto checkpoint = Make(writer);
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  EXPECT_THAT(store.CheckLeftovers(),
              StatusIs(kInvalid, AllOf(HasSubstr("50 tensors"), HasSubstr("t119 and 30 more"))));
}

TEST(WeightStoreTest, RefusesWhatDoesNotFit) {
  SafetensorsWriter writer;
  writer.AddFilled("half", DType::kF16, {4}).AddF32("a", {4}, Count(4));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  writer.AddF32("nan", {4}, {0, 1, nan, 3}).AddBF16("inf", {4}, {0, 1, 2, -inf});
  const auto checkpoint = Make(writer);
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 1, 2, nullptr, nullptr);
  const ShardSpec all = ShardSpec::Replicated(4);
  EXPECT_THAT(store.PlaceTensor("half", {4}, all, "norm"),
              StatusIs(kInvalid, AllOf(HasSubstr("half is F16[4]"), HasSubstr("F32 or BF16"))));
  EXPECT_THAT(store.PlaceTensor("a", {5}, ShardSpec::Replicated(5), "norm"),
              StatusIs(kInvalid, AllOf(HasSubstr("a is F32[4]"), HasSubstr("expects [5]"))));
  EXPECT_THAT(store.PlaceTensor("a", {4}, ShardSpec::Split({{1, 4}}), "norm"),
              StatusIs(kInvalid, AllOf(HasSubstr("tensor a"), HasSubstr("cannot be split"))));
  EXPECT_THAT(store.PlaceTensor("nan", {4}, ShardSpec::Split(4, 1), "norm"),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("nan in model.safetensors"), HasSubstr("index 2"))));
  EXPECT_THAT(store.PlaceTensor("inf", {4}, all, "norm"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("index 3")));
  EXPECT_THAT(store.PlaceTensor("none", {4}, all, "norm"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
}

TEST(WeightStoreTest, ScalarsAndEmptyShares) {
  SafetensorsWriter writer;
  writer.AddF32("scalar", {}, {3}).AddBF16("vocab", {5, 2}, Count(10));
  const auto checkpoint = Make(writer);
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 1, 2, nullptr, nullptr);
  ASSERT_OK_AND_ASSIGN(const TensorView scalar,
                       store.PlaceTensor("scalar", {}, ShardSpec::Replicated(1), "norm"));
  EXPECT_EQ(scalar.row<float>(0)[0], 3.0f);
  ASSERT_OK_AND_ASSIGN(const TensorView vocab,
                       store.PlaceTensor("vocab", {5, 2}, ShardSpec::Vocab(5), "embedding"));
  EXPECT_EQ(vocab.ToString(), "BF16[0, 2]");
}

TEST(WeightStoreTest, PlacedTwiceIsSeenAndPartsAreNot) {
  const auto checkpoint = Make(SmallModel());
  WeightStore store(checkpoint.get(), DeviceType::kCpu, 0, 1, nullptr, nullptr);
  const TensorInfo* kv = checkpoint->Find("kv");
  store.Placed(*kv, kv->bytes / 2);
  store.Placed(*kv, kv->bytes / 2);
  EXPECT_THAT(store.PlacedTwice(), IsEmpty());
  store.Placed(*kv, 4);
  EXPECT_THAT(store.PlacedTwice(), ElementsAre("kv"));
}

TEST(WeightStoreTest, DigestNamesTheShard) {
  const auto checkpoint = Make(SmallModel());
  const auto digest = [&checkpoint](int rank, int64_t bytes) {
    WeightStore store(checkpoint.get(), DeviceType::kCpu, rank, 2, nullptr, nullptr);
    store.Placed(*checkpoint->Find("kv"), bytes);
    return store.shard_digest();
  };
  EXPECT_EQ(digest(0, 64), digest(0, 64));
  EXPECT_NE(digest(0, 64), digest(1, 64));
  EXPECT_NE(digest(0, 64), digest(0, 32));
}

}  // namespace
}  // namespace lockstep
