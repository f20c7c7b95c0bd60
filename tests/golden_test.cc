// Golden parity: every test checkpoint, at every legal tensor-parallel size, against the outputs of
// the reference implementation, through real worker processes and the step stream.
#include "tools/eval/golden.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "coordinator/group/worker_group.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/testing/matchers.h"
#include "models/model_config.h"
#include "models/tokenizer/tokenizer.h"
#include "models/weights/checkpoint.h"
#include "nlohmann/json.hpp"
#include "tests/cluster.h"
#include "tools/eval/step_driver.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::string folder;
  int tp;
  bool f32;
  std::string set;  // of the golden file
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* folder :
       {"qwen3_5", "qwen3_5-ct-nvfp4-fp8", "qwen3_5-modelopt-mixed", "qwen3_5-fp8-block",
        "qwen3_5-ct-fp8-dynamic", "qwen3_5-multimodal-names", "qwen3_5-trained-ct-nvfp4-fp8"}) {
    for (int tp : {1, 2, 4}) {
      for (bool f32 : {true, false}) {
        if (std::string(folder) == "qwen3_5") {
          cases.push_back({folder, tp, f32, "bf16"});
          continue;
        }
        cases.push_back({folder, tp, f32, "weight_only"});
        cases.push_back({folder, tp, f32, "w8a8"});
      }
    }
  }
  // Legal sizes of the other architectures: qwen3's MLP has two virtual shards.
  const struct {
    const char* folder;
    std::vector<int> legal;
  } others[] = {{"llama-ct-nvfp4-fp8", {1, 2, 4, 8}},
                {"qwen3-fp8-block", {1, 2}},
                {"qwen3_5_moe-modelopt-mixed", {1, 2, 4}},
                {"nemotron_h-modelopt-mixed", {1, 2, 4}}};
  for (const auto& other : others) {
    for (int tp : other.legal) {
      for (bool f32 : {true, false}) {
        cases.push_back({other.folder, tp, f32, "weight_only"});
        cases.push_back({other.folder, tp, f32, "w8a8"});
      }
    }
  }
  return cases;
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return absl::StrReplaceAll(absl::StrCat(c.folder, "_tp", c.tp, c.f32 ? "_f32_" : "_bf16_", c.set),
                             {{"-", "_"}});
}

struct Group {
  Workers workers;
  std::unique_ptr<WorkerGroup> group;
  std::vector<worker::v1::LoadModelResult> loaded;
  std::unique_ptr<StepDriver> driver;
};

absl::StatusOr<Group> StartGroup(const std::string& folder, int tp, bool f32, bool w8a8) {
  Group g;
  ASSIGN_OR_RETURN(g.workers, Workers::Start(tp));
  WorkerGroupOptions options;
  options.addresses = g.workers.addresses;
  options.model_path = TestModel(folder);
  options.activation_dtype = f32 ? worker::v1::ACTIVATION_F32 : worker::v1::ACTIVATION_BF16;
  options.activation_quant =
      w8a8 ? worker::v1::ACTIVATION_QUANT_CHECKPOINT : worker::v1::ACTIVATION_QUANT_NONE;
  g.group = std::make_unique<WorkerGroup>(options);
  ASSIGN_OR_RETURN(g.loaded, g.group->Load(1, nullptr));
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(40);
  limits.set_slots(1);
  limits.set_snapshots(0);
  limits.set_max_batch_tokens(256);
  limits.set_max_batch_sequences(1);
  limits.set_max_logit_rows(256);
  limits.set_max_sequence_blocks(40);
  ASSIGN_OR_RETURN(const StepEpoch epoch, g.group->Join(1, limits));
  g.driver = std::make_unique<StepDriver>(g.group.get(), epoch);
  return g;
}

class GoldenTest : public ::testing::TestWithParam<Case> {};

TEST_P(GoldenTest, MatchesTheReference) {
  const Case& c = GetParam();
  ASSERT_OK_AND_ASSIGN(const auto golden,
                       Checkpoint::OpenFile(TestModel(c.folder) + "/golden.safetensors"));
  const GoldenSet* set = nullptr;
  const std::vector<GoldenSet> sets = GoldenSets(*golden);
  for (const GoldenSet& s : sets) {
    if (s.name == c.set) set = &s;
  }
  ASSERT_NE(set, nullptr) << c.folder << " has no " << c.set;
  ASSERT_OK_AND_ASSIGN(Group g, StartGroup(c.folder, c.tp, c.f32, c.set == "w8a8"));
  ASSERT_OK_AND_ASSIGN(const bool routed, IsRouted(TestModel(c.folder)));
  // Residency: what a rank holds is its share of the checkpoint, in the stored form.
  for (const worker::v1::LoadModelResult& rank : g.loaded) {
    EXPECT_LE(static_cast<double>(rank.resident_bytes()),
              1.05 * static_cast<double>(rank.checkpoint_bytes()));
  }
  ASSERT_OK_AND_ASSIGN(
      const GoldenReport report,
      EvalGolden(*golden, *set, BoundsOf(c.set, c.f32, routed), g.driver.get(), g.group.get()));
  EXPECT_EQ(report.prompts.size(), 4u);
  for (const GoldenPrompt& p : report.prompts) {
    std::printf("%-30s tp %d %s %-11s prompt %d: %2lld rows, worst %.2e, tokens %lld/%lld\n",
                c.folder.c_str(), c.tp, c.f32 ? "f32 " : "bf16", c.set.c_str(), p.index,
                static_cast<long long>(p.rows), p.worst, static_cast<long long>(p.tokens_agreed),
                static_cast<long long>(p.tokens_compared));
    EXPECT_GT(p.rows, 8);
  }
  if (c.set == "w8a8") {
    EXPECT_GT(report.linears.size(), 10u);
    // Nothing on the way from the stored input to the bytes depends on the activations' dtype.
    double worst = 0;
    for (const GoldenLinear& l : report.linears) worst = std::max(worst, l.worst);
    std::printf("%-30s tp %d %s w8a8 %zu linears bit-equal inputs, worst output %.2e\n",
                c.folder.c_str(), c.tp, c.f32 ? "f32 " : "bf16", report.linears.size(), worst);
  }
  EXPECT_TRUE(report.failures.empty()) << absl::StrJoin(report.failures, "\n");
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, ::testing::ValuesIn(Cases()), CaseName);

TEST(Perplexity, OfTheEvalTextIsTheReferences) {
  ASSERT_OK_AND_ASSIGN(
      const nlohmann::json reference,
      ParseLenientJson(ReadFile(TestModel("qwen3_5-trained-text") + "/perplexity.json"),
                       "perplexity.json"));
  const nlohmann::json& row = reference["ct-nvfp4-fp8 weight_only"];
  const std::string folder = "qwen3_5-trained-ct-nvfp4-fp8";
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, Tokenizer::Load(TestModel(folder)));
  ASSERT_OK_AND_ASSIGN(
      std::vector<int32_t> ids,
      tokenizer->Encode(ReadFile(TestModel("qwen3_5-trained-text") + "/eval.txt")));
  ids.resize(row["first_tokens"].get<size_t>());
  ASSERT_OK_AND_ASSIGN(Group g, StartGroup(folder, 2, true, false));
  ASSERT_OK_AND_ASSIGN(const double perplexity, EvalPerplexity(ids, 256, g.driver.get()));
  const double expected = row["perplexity"].get<double>();
  std::printf("perplexity %.6f, reference %.6f\n", perplexity, expected);
  EXPECT_NEAR(perplexity / expected, 1.0, 1e-3);
}

TEST(IllegalTp, NamesTheLegalSizesAndTheReason) {
  for (int tp : {8}) {
    auto group = StartGroup("qwen3_5", tp, true, false);
    ASSERT_FALSE(group.ok());
    EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(group.status().message()), HasSubstr("legal: 1, 2, 4"));
    EXPECT_THAT(std::string(group.status().message()), HasSubstr("4 linear-attention key heads"));
  }
  auto moe = StartGroup("qwen3_5_moe-modelopt-mixed", 8, true, false);
  ASSERT_FALSE(moe.ok());
  EXPECT_THAT(std::string(moe.status().message()), HasSubstr("4 linear-attention key heads"));
  auto nemotron = StartGroup("nemotron_h-modelopt-mixed", 8, true, false);
  ASSERT_FALSE(nemotron.ok());
  EXPECT_THAT(std::string(nemotron.status().message()), HasSubstr("4 Mamba groups"));
  auto qwen3 = StartGroup("qwen3-fp8-block", 4, true, false);
  ASSERT_FALSE(qwen3.ok());
  EXPECT_THAT(std::string(qwen3.status().message()), HasSubstr("V = 2 virtual shards"));
  auto three = StartGroup("qwen3_5", 3, true, false);
  ASSERT_FALSE(three.ok());
  EXPECT_THAT(std::string(three.status().message()), HasSubstr("powers of two"));
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
