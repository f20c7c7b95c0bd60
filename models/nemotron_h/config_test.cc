#include "models/nemotron_h/config.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/testing/matchers.h"
#include "models/weights/testing/safetensors_writer.h"

namespace lockstep {
namespace nemotron_h {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::MakeTempDir;
using testing::StatusIs;
using testing::WriteFile;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr LayerType kM = LayerType::kMamba, kA = LayerType::kAttention, kD = LayerType::kMlp,
                    kE = LayerType::kMoe;

absl::StatusOr<Config> ReadText(const std::string& text) {
  const std::string dir = MakeTempDir();
  WriteFile(dir + "/config.json", text);
  ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(dir));
  return ReadConfig(model);
}

nlohmann::json Base() {
  return {{"model_type", "nemotron_h"},
          {"vocab_size", 320},
          {"hidden_size", 128},
          {"max_position_embeddings", 4096},
          {"layers_block_type", {"mamba", "moe", "attention", "mlp"}},
          {"mamba_num_heads", 16},
          {"mamba_head_dim", 16},
          {"ssm_state_size", 32},
          {"n_groups", 4},
          {"conv_kernel", 4},
          {"num_attention_heads", 8},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"intermediate_size", 256},
          {"layer_norm_epsilon", 1e-5},
          {"n_routed_experts", 8},
          {"num_experts_per_tok", 3},
          {"moe_intermediate_size", 128},
          {"moe_shared_expert_intermediate_size", 128},
          {"routed_scaling_factor", 2.5}};
}

absl::StatusOr<Config> Read(const nlohmann::json& json) { return ReadText(json.dump()); }

absl::StatusOr<Config> ReadWith(const std::string& key, const nlohmann::json& value) {
  nlohmann::json json = Base();
  if (value.is_null()) {
    json.erase(key);
  } else {
    json[key] = value;
  }
  return Read(json);
}

TEST(NemotronHConfig, ReadsEveryNumber) {
  ASSERT_OK_AND_ASSIGN(const Config c, Read(Base()));
  EXPECT_THAT(c.layers, ElementsAre(kM, kE, kA, kD));
  EXPECT_THAT(c.intermediate_size, ElementsAre(0, 0, 0, 256));
  EXPECT_EQ(c.mamba_inner(), 256);
  EXPECT_EQ(c.state_dim, 32);
  EXPECT_EQ(c.num_groups, 4);
  EXPECT_EQ(c.conv_width, 4);
  EXPECT_TRUE(c.conv_bias);
  EXPECT_EQ(c.attention.num_q_heads, 8);
  EXPECT_EQ(c.attention.num_kv_heads, 2);
  EXPECT_EQ(c.attention.head_dim, 32);
  EXPECT_EQ(c.num_experts, 8);
  EXPECT_EQ(c.experts_per_token, 3);
  EXPECT_EQ(c.expert_size, 128);
  EXPECT_EQ(c.shared_size, 128);
  EXPECT_EQ(c.latent_size, 0);
  EXPECT_TRUE(c.normalize_weights);
  EXPECT_EQ(c.routed_scale, 2.5f);
  EXPECT_EQ(c.norm_eps, 1e-5f);
}

// A published file in one: the bare token Infinity, a key twice (the last value holds), and the
// pattern of letters without num_hidden_layers.
TEST(NemotronHConfig, ReadsInfinityDuplicateKeysAndThePattern) {
  const char* text = R"({"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688,
    "max_position_embeddings": 262144, "hybrid_override_pattern": "ME*-",
    "n_groups": 1, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "expand": 2,
    "time_step_limit": [0.0, Infinity], "n_groups": 8, "conv_kernel": 4, "use_conv_bias": true,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 1856, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    "n_group": 1, "topk_group": 1, "layer_norm_epsilon": 1e-05, "moe_latent_size": null})";
  ASSERT_OK_AND_ASSIGN(const Config c, ReadText(text));
  EXPECT_THAT(c.layers, ElementsAre(kM, kE, kA, kD));
  EXPECT_EQ(c.num_groups, 8);
  EXPECT_EQ(c.mamba_inner(), 4096);  // not expand * hidden_size
  EXPECT_EQ(c.latent_size, 0);
}

TEST(NemotronHConfig, TheVocabulariesOfBlockTypesMeanTheSame) {
  nlohmann::json json = Base();
  json["layers_block_type"] = {"linear_attention", "moe", "full_attention", "mlp", "mamba"};
  json["time_step_limit"] = {0.0, {{"__float__", "Infinity"}}};
  ASSERT_OK_AND_ASSIGN(const Config words, Read(json));
  json.erase("layers_block_type");
  json["hybrid_override_pattern"] = "ME*-M";
  ASSERT_OK_AND_ASSIGN(const Config letters, Read(json));
  EXPECT_EQ(words.layers, letters.layers);
  EXPECT_THAT(words.layers, ElementsAre(kM, kE, kA, kD, kM));
}

TEST(NemotronHConfig, OldNamesAreKnown) {
  nlohmann::json json = Base();
  json.erase("n_groups");
  json.erase("conv_kernel");
  json["mamba_n_groups"] = 8;
  json["mamba_d_conv"] = 3;
  json["mamba_conv_bias"] = false;
  json["mamba_expand"] = 2;
  json["mamba_chunk_size"] = 128;
  json["mamba_dt_min"] = 0.001;
  ASSERT_OK_AND_ASSIGN(const Config c, Read(json));
  EXPECT_EQ(c.num_groups, 8);
  EXPECT_EQ(c.conv_width, 3);
  EXPECT_FALSE(c.conv_bias);
}

TEST(NemotronHConfig, IntermediateSizeMayBeAListOfTheMlpLayers) {
  nlohmann::json json = Base();
  json["layers_block_type"] = {"mlp", "mamba", "mlp"};
  json["intermediate_size"] = {64, 128};
  ASSERT_OK_AND_ASSIGN(const Config c, Read(json));
  EXPECT_THAT(c.intermediate_size, ElementsAre(64, 0, 128));
  // Numbers of absent layer types are not asked for.
  for (const char* key : {"n_routed_experts", "num_attention_heads"}) json.erase(key);
  EXPECT_THAT(Read(json), IsOk());
  json["intermediate_size"] = {64};
  EXPECT_THAT(Read(json), StatusIs(kInvalid, HasSubstr("lists 1 sizes for 2 MLP layers")));
}

TEST(NemotronHConfig, ImpossibleValuesAreNamed) {
  const struct {
    const char* key;
    nlohmann::json value;
    absl::StatusCode code;
    const char* message;
  } rows[] = {
      {"layers_block_type", {"mamba", "conv"}, kInvalid, "layers_block_type has \"conv\"; known:"},
      {"layers_block_type", {"M"}, kInvalid, "layers_block_type has \"M\"; known:"},
      {"num_hidden_layers", 5, kInvalid, "has 4 layers, num_hidden_layers is 5"},
      {"mamba_num_heads", 0, kInvalid, "mamba_num_heads is 0, must be in [1, 2^20]"},
      {"mamba_num_heads", nullptr, kInvalid, "\"mamba_num_heads\" is absent"},
      {"n_groups", 3, kInvalid, "mamba_num_heads 16 is no multiple of n_groups 3"},
      {"conv_kernel", 9, kInvalid, "conv_kernel is 9, must be in [2, 8]"},
      {"num_key_value_heads", 3, kInvalid, "8 is no multiple of num_key_value_heads 3"},
      {"intermediate_size", 0, kInvalid, "intermediate_size of layer 3 is 0"},
      {"n_group", 3, kInvalid, "n_group is 3; a divisor of 8 experts is needed"},
      {"topk_group", 2, kInvalid, "topk_group is 2, must be in [1, n_group = 1]"},
      {"num_experts_per_tok", 9, kInvalid, "num_experts_per_tok is 9, only 8 experts"},
      {"n_shared_experts", 2, kUnimplemented,
       "n_shared_experts \"2\" (model_type nemotron_h); supported: 0, 1"},
      {"mlp_hidden_act", "silu", kUnimplemented,
       "mlp_hidden_act \"silu\" (model_type nemotron_h); supported: relu2"},
      {"mamba_hidden_act", "gelu", kUnimplemented,
       "mamba_hidden_act \"gelu\" (model_type nemotron_h); supported: silu"},
      {"use_bias", true, kUnimplemented,
       "use_bias \"true\" (model_type nemotron_h); supported: false"},
      {"sliding_window", 4096, kUnimplemented,
       "sliding_window \"4096\" (model_type nemotron_h); supported: null"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(ReadWith(row.key, row.value), StatusIs(row.code, HasSubstr(row.message)))
        << row.key;
  }
  nlohmann::json json = Base();
  json.erase("layers_block_type");
  json["hybrid_override_pattern"] = "MX";
  EXPECT_THAT(Read(json), StatusIs(kInvalid, HasSubstr("has \"X\"; known: M, *, -, E")));
  json["hybrid_override_pattern"] = {"M"};
  json["num_hidden_layers"] = 1;
  EXPECT_THAT(Read(json), StatusIs(kInvalid, HasSubstr("one entry per layer")));
}

TEST(NemotronHConfig, LegalTpSizesAndTheReasons) {
  const auto reasons = [](const std::string& key, const nlohmann::json& value) {
    return LegalTp(ReadWith(key, value).value());
  };
  const TpLegality base = reasons("expand", 2);
  EXPECT_THAT(base.legal, ElementsAre(1, 2, 4));
  EXPECT_THAT(base.reasons, ElementsAre(HasSubstr("8: 4 Mamba groups")));
  EXPECT_THAT(reasons("n_groups", 8).legal, ElementsAre(1, 2, 4, 8));
  // One group over several ranks would need a norm across ranks.
  EXPECT_THAT(reasons("n_groups", 1).legal, ElementsAre(1));
  EXPECT_THAT(reasons("n_groups", 1).reasons[0],
              HasSubstr("2: 1 Mamba groups (a group's norm stays on one rank) cannot be split"));
  EXPECT_THAT(reasons("num_attention_heads", 2).reasons,
              ElementsAre(HasSubstr("4: 2 attention heads"), HasSubstr("8: 2 attention heads")));
  EXPECT_THAT(reasons("intermediate_size", 48).reasons,
              ElementsAre(HasSubstr("2: mixer.down_proj: K = 48"), HasSubstr("4: mixer.down_proj"),
                          HasSubstr("8: 4 Mamba groups")));
  // 1856 = 116 * 16: four virtual shards of 464, eight would not be multiples of 16.
  nlohmann::json json = Base();
  json["n_groups"] = 8;
  json["moe_intermediate_size"] = 1856;
  ASSERT_OK_AND_ASSIGN(const Config nano, Read(json));
  EXPECT_THAT(LegalTp(nano).legal, ElementsAre(1, 2, 4));
  EXPECT_THAT(LegalTp(nano).reasons,
              ElementsAre(HasSubstr("8: mixer.experts.down_proj: K = 1856 is cut into V = 4")));
}

}  // namespace
}  // namespace nemotron_h
}  // namespace lockstep
