// Tests of the mixture of experts as a block: rows do not influence each other, ranks and tensor
// layouts do not matter, missing experts are named.
#include "models/layers/moe.h"

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/comm/fake_comm_group.h"
#include "models/quant/testing/linear_test_util.h"

namespace lockstep {
namespace {

using ::lockstep::testing::FakeResolver;
using ::lockstep::testing::SafetensorsWriter;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::TestContext;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 48, kExperts = 6, kInner = 64, kShared = 32;

// V: experts alone would have 4 virtual shards, the shared expert has 2.
MoeConfig Config() {
  MoeConfig c;
  c.hidden_size = kHidden;
  c.router.num_experts = kExperts;
  c.router.top_k = 3;
  c.expert_size = kInner;
  c.shared_size = kShared;
  return c;
}

std::vector<float> Values(int64_t count, uint32_t seed, float scale = 0.3f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(static_cast<size_t>(count));
  for (float& f : v) f = ToFloat(ToBF16(scale * normal(rng)));
  return v;
}

// The same weights as one linear per expert or as stacks; without the tensor `missing`.
std::unique_ptr<Checkpoint> Write(bool stacked, const std::string& missing = "") {
  SafetensorsWriter writer;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape,
                       const std::vector<float>& values) {
    if (name != missing) writer.AddBF16(name, shape, values);
  };
  add("m.gate.weight", {kExperts, kHidden}, Values(kExperts * kHidden, 1));
  add("m.shared_expert_gate.weight", {1, kHidden}, Values(kHidden, 2));
  add("m.shared_expert.gate_proj.weight", {kShared, kHidden}, Values(kShared * kHidden, 3));
  add("m.shared_expert.up_proj.weight", {kShared, kHidden}, Values(kShared * kHidden, 4));
  add("m.shared_expert.down_proj.weight", {kHidden, kShared}, Values(kShared * kHidden, 5));
  std::vector<float> gate_up, down;
  for (uint32_t e = 0; e < kExperts; ++e) {
    const std::vector<float> g = Values(kInner * kHidden, 10 + e);
    const std::vector<float> u = Values(kInner * kHidden, 20 + e);
    const std::vector<float> d = Values(kInner * kHidden, 30 + e);
    gate_up.insert(gate_up.end(), g.begin(), g.end());
    gate_up.insert(gate_up.end(), u.begin(), u.end());
    down.insert(down.end(), d.begin(), d.end());
    if (stacked) continue;
    const std::string name = "m.experts." + std::to_string(e) + ".";
    add(name + "gate_proj.weight", {kInner, kHidden}, g);
    add(name + "up_proj.weight", {kInner, kHidden}, u);
    add(name + "down_proj.weight", {kHidden, kInner}, d);
  }
  if (stacked) {
    add("m.experts.gate_up_proj", {kExperts, 2 * kInner, kHidden}, gate_up);
    add("m.experts.down_proj", {kExperts, kHidden, kInner}, down);
  }
  const std::string path = testing::MakeTempDir() + "/model.safetensors";
  writer.Write(path);
  return Checkpoint::OpenFile(path).value();
}

struct Rank {
  Rank(const Checkpoint& checkpoint, int rank, int world)
      : resolver((LinearScheme())),
        store(&checkpoint, DeviceType::kCpu, rank, world, nullptr, nullptr) {
    loader.linear = {&store, &resolver, ActivationQuant::kNone};
    loader.activation_dtype = DType::kF32;
    loader.cache_spec = &cache_spec;
  }
  absl::StatusOr<std::vector<float>> Run(CommGroup* comm, const std::vector<float>& x) {
    absl::StatusOr<std::unique_ptr<Block>> block = MoeBlock::Load(loader, Config(), "m.");
    if (!block.ok()) return block.status();
    const int64_t tokens = static_cast<int64_t>(x.size()) / kHidden;
    std::vector<float> sum(x.size());
    ForwardBatch batch;
    batch.num_tokens = tokens;
    const absl::Status status =
        (*block)->Apply(context.ctx(), comm, batch, CacheViews(),
                        ConstTensorView(x.data(), DType::kF32, {tokens, kHidden}),
                        TensorView(sum.data(), DType::kF32, {tokens, kHidden}));
    if (!status.ok()) return status;
    return sum;
  }
  FakeResolver resolver;
  WeightStore store;
  CacheSpec cache_spec;
  BlockLoader loader;
  TestContext context;
};

TEST(MoeBlock, ARowAloneHasTheBitsOfARowAmongOthers) {
  const std::unique_ptr<Checkpoint> checkpoint = Write(false);
  Rank rank(*checkpoint, 0, 1);
  const int64_t tokens = 70;  // more than are computed at a time
  const std::vector<float> x = Values(tokens * kHidden, 7, 1.0f);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> all, rank.Run(nullptr, x));
  for (int64_t t : {0, 1, 33, 63, 64, 69}) {
    const auto row = x.begin() + t * kHidden;
    ASSERT_OK_AND_ASSIGN(const std::vector<float> one,
                         rank.Run(nullptr, std::vector<float>(row, row + kHidden)));
    EXPECT_EQ(0, std::memcmp(one.data(), all.data() + t * kHidden, kHidden * sizeof(float))) << t;
  }
}

TEST(MoeBlock, StacksAndRanksGiveTheSameBits) {
  const std::unique_ptr<Checkpoint> separate = Write(false), stacked = Write(true);
  const std::vector<float> x = Values(9 * kHidden, 8, 1.0f);
  Rank one(*separate, 0, 1);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> expected, one.Run(nullptr, x));
  const auto comms = MakeFakeCommGroups(2, /*epoch=*/1);
  std::vector<absl::StatusOr<std::vector<float>>> sums(2, absl::UnknownError(""));
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(*stacked, r, 2);
      comms[r]->BeginStep(1, 2);
      sums[r] = rank.Run(comms[r].get(), x);
    });
  }
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK(sums[r].status());
    EXPECT_EQ(0, std::memcmp(sums[r]->data(), expected.data(), expected.size() * sizeof(float)));
  }
}

TEST(MoeBlock, AMissingExpertIsNamed) {
  const std::string name = "m.experts.4.up_proj.weight";
  const std::unique_ptr<Checkpoint> checkpoint = Write(false, name);
  Rank rank(*checkpoint, 0, 1);
  EXPECT_THAT(rank.Run(nullptr, Values(kHidden, 1)).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(name)));
}

TEST(MoeBlock, MoreRanksThanTheLayersVAreRefused) {
  const std::unique_ptr<Checkpoint> checkpoint = Write(false);
  Rank rank(*checkpoint, 0, 4);
  EXPECT_THAT(rank.Run(nullptr, Values(kHidden, 1)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("m.shared_expert.down_proj: K = 32 is cut into V = 2")));
}

}  // namespace
}  // namespace lockstep
