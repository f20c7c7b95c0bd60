// Tests of what the architectures read from config.json: legal tensor-parallel sizes with reasons,
// refusals of impossible and unsupported values.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/layers/rope.h"
#include "models/model.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::StatusIs;

ModelConfig Make(const std::string& type, nlohmann::json text) {
  ModelConfig c;
  c.directory = "dir";
  c.model_type = type;
  c.root = text;
  c.text = std::move(text);
  c.vocab_size = 320;
  c.hidden_size = 128;
  c.num_layers = 4;
  return c;
}

nlohmann::json Dense() {
  return {{"num_attention_heads", 8},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"intermediate_size", 384}};
}

nlohmann::json Moe() {
  nlohmann::json j = Dense();
  j["head_dim"] = 64;
  j["linear_num_key_heads"] = 8;
  j["linear_num_value_heads"] = 8;
  j["linear_key_head_dim"] = 32;
  j["linear_value_head_dim"] = 32;
  j["num_experts"] = 8;
  j["num_experts_per_tok"] = 3;
  j["moe_intermediate_size"] = 128;
  j["shared_expert_intermediate_size"] = 128;
  return j;
}

nlohmann::json With(nlohmann::json j, const std::string& key, nlohmann::json value) {
  j[key] = std::move(value);
  return j;
}

void Refused(const std::string& type, const nlohmann::json& text, absl::StatusCode code,
             const std::string& message) {
  EXPECT_THAT(LegalTpSizes(Make(type, text)).status(), StatusIs(code, HasSubstr(message)));
}

std::vector<int> Legal(const std::string& type, const nlohmann::json& text, int refused = 0,
                       const std::string& reason = "") {
  const auto legality = LegalTpSizes(Make(type, text));
  EXPECT_OK(legality.status());
  if (refused != 0) {
    EXPECT_THAT(legality->Check(refused),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(reason)));
  }
  return legality->legal;
}

TEST(LegalTp, KeyValueHeadsAreReplicatedEvenly) {
  EXPECT_THAT(Legal("llama", Dense()), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(
      Legal("llama", With(With(Dense(), "num_attention_heads", 24), "num_key_value_heads", 3), 2,
            "3 key/value heads cannot be split 2 ways"),
      ElementsAre(1));
}

TEST(LegalTp, HeadsOfSmolLm2AllowOneRankOnly) {
  const nlohmann::json j = With(With(Dense(), "num_attention_heads", 9), "num_key_value_heads", 3);
  for (int tp : {2, 4, 8}) {
    EXPECT_THAT(Legal("llama", j, tp, "9 attention heads cannot be split"), ElementsAre(1));
  }
  EXPECT_THAT(Legal("llama", j, 3, "powers of two"), ElementsAre(1));
}

TEST(LegalTp, VirtualShardsOfTheMlpLimitTheSize) {
  EXPECT_THAT(Legal("qwen3", With(Dense(), "intermediate_size", 352), 4,
                    "K = 352 is cut into V = 2 virtual shards"),
              ElementsAre(1, 2));
}

TEST(LegalTp, ExpertsHaveOneVPerLayer) {
  EXPECT_THAT(Legal("qwen3_5_moe", Moe()), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(Legal("qwen3_5_moe_text", With(Moe(), "shared_expert_intermediate_size", 64), 8,
                    "mlp.experts.*.down_proj: K = 128 is cut into V = 4"),
              ElementsAre(1, 2, 4));
}

TEST(LegalTp, UnknownArchitecturesListTheKnownOnes) {
  Refused("gpt", Dense(), absl::StatusCode::kUnimplemented,
          "\"gpt\" is not supported; supported: llama, qwen3, qwen3_5_text");
}

TEST(Config, ImpossibleValuesNameTheKey) {
  const auto bad = absl::StatusCode::kInvalidArgument;
  Refused("llama", With(Dense(), "num_attention_heads", 0), bad,
          "num_attention_heads is 0, must be in [1, 2^20] (model_type llama)");
  Refused("llama", With(Dense(), "num_key_value_heads", 3), bad, "no multiple of");
  Refused("llama", With(Dense(), "intermediate_size", "wide"), bad, "\"intermediate_size\" is");
  Refused("qwen3", With(Dense(), "partial_rotary_factor", 0.01), bad, "rotary width of 0");
  Refused("qwen3", With(Dense(), "partial_rotary_factor", 2), bad, "must be in (0, 1]");
  Refused("llama", With(Dense(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}), bad,
          "rope_type llama3 has factor 8, low_freq_factor 0");
  Refused("qwen3_5_moe", With(Moe(), "num_experts_per_tok", 9), bad,
          "num_experts_per_tok 9 is more than num_experts 8");
  Refused("qwen3_5_moe", With(Moe(), "moe_intermediate_size", nullptr), bad,
          "\"moe_intermediate_size\" is absent");
  Refused("qwen3_5_moe", With(Moe(), "linear_num_value_heads", 12), bad, "is no multiple of");
  Refused("qwen3_5_moe", With(Moe(), "linear_conv_kernel_dim", 9), bad, "must be in [2, 8]");
  Refused("qwen3_5", With(Moe(), "layer_types", {"full_attention"}), bad, "must list 4 layers");
}

TEST(Config, UnsupportedValuesNameWhatIsSupported) {
  const auto no = absl::StatusCode::kUnimplemented;
  Refused("llama", With(Dense(), "hidden_act", "gelu"), no, "hidden_act \"gelu\"");
  Refused("llama", With(Dense(), "attention_bias", true), no, "attention_bias \"true\"");
  Refused("llama", With(Dense(), "mlp_bias", true), no, "mlp_bias \"true\"");
  Refused("llama", With(Dense(), "rope_scaling", {{"type", "yarn"}}), no,
          "rope_type \"yarn\" (model_type llama); supported: default, llama3");
  Refused("qwen3", With(Dense(), "use_sliding_window", true), no, "use_sliding_window");
  Refused("qwen3_5_moe", With(Moe(), "hidden_act", "relu2"), no, "supported: silu");
  Refused("qwen3_5", With(Moe(), "output_gate_type", "tanh"), no, "swish, silu, sigmoid");
}

TEST(Rope, Llama3KeepsShortAndStretchesLongWavelengths) {
  RopeConfig c;
  c.rotary_dim = 32;
  c.theta = 500000.0;
  RopeConfig scaled = c;
  scaled.llama3 = true;
  scaled.factor = 8.0;
  scaled.high_frequency = 4.0;
  scaled.original_positions = 64.0;
  EXPECT_EQ(RopeFrequency(scaled, 0), RopeFrequency(c, 0));
  EXPECT_DOUBLE_EQ(RopeFrequency(scaled, 15), RopeFrequency(c, 15) / 8);
  // theta^(-1/8) turns 1.98 times in 64 positions: s = (1.98 - 1) / 3.
  const double inv = RopeFrequency(c, 2), s = (64 * inv / 6.283185307179586 - 1) / 3;
  EXPECT_NEAR(RopeFrequency(scaled, 2), (1 - s) * inv / 8 + s * inv, 1e-12);
  EXPECT_GT(s, 0.3);
  EXPECT_LT(s, 0.4);
}

}  // namespace
}  // namespace lockstep
