// Tests of ModelConfig and of the lenient JSON reader.
#include "models/model_config.h"

#include <cmath>
#include <string>

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
using testing::StatusIs;
using testing::WriteFile;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

nlohmann::json Base() {
  return {{"model_type", "qwen3_5_text"}, {"vocab_size", 320},   {"hidden_size", 128},
          {"num_hidden_layers", 4},       {"eos_token_id", 319}, {"max_position_embeddings", 4096}};
}

absl::StatusOr<ModelConfig> LoadText(const std::string& config,
                                     const std::string& generation = "") {
  const std::string dir = MakeTempDir();
  WriteFile(dir + "/config.json", config);
  if (!generation.empty()) WriteFile(dir + "/generation_config.json", generation);
  return LoadModelConfig(dir);
}

absl::StatusOr<ModelConfig> Load(const nlohmann::json& config, const std::string& generation = "") {
  return LoadText(config.dump(), generation);
}

TEST(ModelConfigTest, ReadsAFlatConfig) {
  ASSERT_OK_AND_ASSIGN(const ModelConfig config, Load(Base()));
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.vocab_size, 320);
  EXPECT_EQ(config.hidden_size, 128);
  EXPECT_EQ(config.num_layers, 4);
  EXPECT_EQ(config.max_position_embeddings, 4096);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(319));
}

TEST(ModelConfigTest, ReadsANestedConfig) {
  nlohmann::json root = {{"model_type", "qwen3_5"},
                         {"tie_word_embeddings", true},
                         {"eos_token_id", 7},
                         {"quantization_config", {{"quant_method", "fp8"}}},
                         {"text_config", Base()}};
  ASSERT_OK_AND_ASSIGN(const ModelConfig config, Load(root));
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.text["hidden_size"], 128);
  EXPECT_EQ(config.root["quantization_config"]["quant_method"], "fp8");
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(7, 319));
  root["text_config"]["tie_word_embeddings"] = false;
  ASSERT_OK_AND_ASSIGN(const ModelConfig own, Load(root));
  EXPECT_FALSE(own.tie_word_embeddings);
}

TEST(ModelConfigTest, EosIdsAreMergedAndChecked) {
  nlohmann::json json = Base();
  json["eos_token_id"] = {5, 3};
  ASSERT_OK_AND_ASSIGN(const ModelConfig config, Load(json, R"({"eos_token_id": [3, 9]})"));
  EXPECT_THAT(config.eos_token_ids, ElementsAre(3, 5, 9));
  json["eos_token_id"] = nullptr;
  ASSERT_OK_AND_ASSIGN(const ModelConfig one, Load(json, R"({"eos_token_id": 2})"));
  EXPECT_THAT(one.eos_token_ids, ElementsAre(2));
  ASSERT_OK_AND_ASSIGN(const ModelConfig none, Load(json));
  EXPECT_THAT(none.eos_token_ids, IsEmpty());
  EXPECT_THAT(Load(json, R"({"eos_token_id": 320})"),
              StatusIs(kInvalid, AllOf(HasSubstr("generation_config.json"), HasSubstr("320"),
                                       HasSubstr("0 to 319"))));
  EXPECT_THAT(Load(json, R"({"eos_token_id": [1, "x"]})"), StatusIs(kInvalid, HasSubstr("\"x\"")));
  EXPECT_THAT(Load(json, "[]"), StatusIs(kDataLoss, HasSubstr("not a JSON object")));
  EXPECT_THAT(Load(json, "{"), StatusIs(kDataLoss, HasSubstr("generation_config.json")));
  json["eos_token_id"] = -1;
  EXPECT_THAT(Load(json), StatusIs(kInvalid, HasSubstr("eos_token_id")));
}

TEST(ModelConfigTest, ModelTypeFallsBackToArchitectures) {
  const struct {
    const char* architecture;
    const char* type;
  } kRows[] = {{"Qwen3_5ForCausalLM", "qwen3_5"},
               {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"},
               {"NemotronHForCausalLM", "nemotron_h"},
               {"LlamaForCausalLM", "llama"},
               {"Qwen3ForCausalLM", "qwen3"}};
  for (const auto& row : kRows) {
    nlohmann::json json = Base();
    json.erase("model_type");
    json["architectures"] = {row.architecture};
    ASSERT_OK_AND_ASSIGN(const ModelConfig config, Load(json));
    EXPECT_EQ(config.model_type, row.type);
  }
  nlohmann::json json = Base();
  json["model_type"] = nullptr;
  EXPECT_THAT(Load(json), StatusIs(kInvalid, HasSubstr("model_type")));
  json["model_type"] = 3;
  EXPECT_THAT(Load(json), StatusIs(kInvalid, HasSubstr("model_type")));
}

TEST(ModelConfigTest, ImpossibleSizesAreRefusedByName) {
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"}) {
    for (const char* value : {"-1", "0", "2147483648", "1e300", "99999999999999999999", "\"12\"",
                              "1.5", "null", "Infinity", "NaN", "true", "[1]"}) {
      nlohmann::json json = Base();
      json.erase(key);
      std::string text = json.dump();
      text.insert(1, std::string("\"") + key + "\": " + value + ", ");
      EXPECT_THAT(LoadText(text),
                  StatusIs(kInvalid, AllOf(HasSubstr("config.json"), HasSubstr(key))))
          << value;
    }
  }
}

TEST(ModelConfigTest, LayersMayBeGivenByTheirTypes) {
  nlohmann::json json = Base();
  json.erase("num_hidden_layers");
  json["hybrid_override_pattern"] = "M-M*E";
  ASSERT_OK_AND_ASSIGN(const ModelConfig pattern, Load(json));
  EXPECT_EQ(pattern.num_layers, 5);
  json["layers_block_type"] = {"mamba", "moe", "attention"};
  ASSERT_OK_AND_ASSIGN(const ModelConfig types, Load(json));
  EXPECT_EQ(types.num_layers, 3);
}

TEST(ModelConfigTest, FilesThatAreNoConfigs) {
  EXPECT_THAT(LoadModelConfig(MakeTempDir()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("config.json")));
  EXPECT_THAT(LoadText("[1]"), StatusIs(kDataLoss, HasSubstr("not a JSON object")));
  EXPECT_THAT(LoadText(""), StatusIs(kDataLoss, HasSubstr("byte 0")));
  EXPECT_THAT(LoadText("{\"a\": 1,}"), StatusIs(kDataLoss, HasSubstr("byte 8")));
  EXPECT_THAT(LoadText(R"({"text_config": 3})"), StatusIs(kInvalid, HasSubstr("text_config")));
}

TEST(ModelConfigTest, TypedReads) {
  nlohmann::json json = Base();
  json["f"] = 0.5;
  json["i"] = 7;
  json["whole"] = 8.0;
  json["b"] = true;
  json["s"] = "silu";
  json["nothing"] = nullptr;
  json["torch_dtype"] = "bfloat16";
  ASSERT_OK_AND_ASSIGN(const ModelConfig c, Load(json));
  ASSERT_OK_AND_ASSIGN(const int64_t i, c.Int("i"));
  EXPECT_EQ(i, 7);
  ASSERT_OK_AND_ASSIGN(const int64_t whole, c.Int("whole"));
  EXPECT_EQ(whole, 8);
  ASSERT_OK_AND_ASSIGN(const double f, c.Number("f"));
  EXPECT_EQ(f, 0.5);
  EXPECT_THAT(c.Int("f"), StatusIs(kInvalid, AllOf(HasSubstr("\"f\" is 0.5"),
                                                   HasSubstr("an integer is expected"))));
  EXPECT_THAT(c.Int("nothing"), StatusIs(kInvalid, HasSubstr("absent")));
  EXPECT_THAT(c.Number("s"), StatusIs(kInvalid, HasSubstr("a number is expected")));
  EXPECT_EQ(c.IntOr("nothing", 3), 3);
  EXPECT_EQ(c.IntOr("i", 3), 7);
  EXPECT_EQ(c.NumberOr("none", 1.5), 1.5);
  EXPECT_EQ(c.NumberOr("i", 1.5), 7.0);
  EXPECT_TRUE(c.BoolOr("b", false));
  EXPECT_TRUE(c.BoolOr("none", true));
  EXPECT_EQ(c.StringOr("s", "x"), "silu");
  EXPECT_EQ(c.StringOr("none", "x"), "x");
  EXPECT_EQ(c.StringOr("dtype", "x"), "bfloat16");
}

TEST(ModelConfigTest, RopeKeysNewAndOld) {
  nlohmann::json json = Base();
  json["rope_theta"] = 10000.0;
  json["partial_rotary_factor"] = 0.5;
  json["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  ASSERT_OK_AND_ASSIGN(const ModelConfig old, Load(json));
  EXPECT_EQ(old.RopeNumberOr("rope_theta", 0), 10000.0);
  EXPECT_EQ(old.RopeNumberOr("factor", 0), 4.0);
  EXPECT_EQ(old.RopeStringOr("rope_type", "default"), "linear");
  EXPECT_EQ(old.RopeNumberOr("none", 3), 3.0);
  json["rope_parameters"] = {{"rope_theta", 5e6}, {"rope_type", "llama3"}};
  ASSERT_OK_AND_ASSIGN(const ModelConfig nested, Load(json));
  EXPECT_EQ(nested.RopeNumberOr("rope_theta", 0), 5e6);
  EXPECT_EQ(nested.RopeStringOr("rope_type", "default"), "llama3");
  EXPECT_EQ(nested.RopeNumberOr("partial_rotary_factor", 1), 0.5);
}

TEST(LenientJsonTest, NonFiniteLiteralsAreNumbers) {
  ASSERT_OK_AND_ASSIGN(
      const nlohmann::json json,
      ParseLenientJson(R"({"a": [0.0, Infinity, -Infinity, NaN], "b": {"__float__": "Infinity"},)"
                       R"( "c": "NaN, \"Infinity\"", "d": {"__float__": "-Infinity", "x": 1}})",
                       "test"));
  EXPECT_TRUE(std::isinf(json["a"][1].get<double>()));
  EXPECT_LT(json["a"][2].get<double>(), 0);
  EXPECT_TRUE(std::isnan(json["a"][3].get<double>()));
  EXPECT_GT(json["b"].get<double>(), 1e308);
  EXPECT_EQ(json["c"], "NaN, \"Infinity\"");
  EXPECT_TRUE(json["d"].is_object());
}

TEST(LenientJsonTest, LastDuplicateWins) {
  ASSERT_OK_AND_ASSIGN(
      const nlohmann::json json,
      ParseLenientJson(R"({"n_groups": 1, "x": {"y": 1}, "n_groups": 8})", "test"));
  EXPECT_EQ(json["n_groups"], 8);
}

TEST(LenientJsonTest, OrderedKeepsTheOrderOfTheText) {
  ASSERT_OK_AND_ASSIGN(const nlohmann::ordered_json json,
                       ParseLenientOrderedJson(R"({"b": 1, "a": NaN, "b": 2})", "test"));
  EXPECT_EQ(json.begin().key(), "b");
  EXPECT_EQ(json["b"], 2);
}

TEST(LenientJsonTest, ErrorsNameTheByteOfTheOriginalText) {
  const struct {
    const char* text;
    const char* what;
  } kRows[] = {{"{\"a\": Infinity, !}", "byte 16"}, {"{\"a\": Infinityx}", "byte 6"},
               {"{\"a\": +Infinity}", "byte 6"},    {"{\"a\"", "byte 4"},
               {"{\"a\": 1} x", "byte 9"},          {"{\"a\": 1e999}", "not valid JSON"}};
  for (const auto& row : kRows) {
    EXPECT_THAT(ParseLenientJson(row.text, "some.json"),
                StatusIs(kDataLoss, AllOf(HasSubstr("some.json"), HasSubstr(row.what))))
        << row.text;
  }
  EXPECT_THAT(ParseLenientJson(std::string(100000, '['), "some.json"),
              StatusIs(kDataLoss, HasSubstr("nests deeper")));
}

TEST(LenientJsonTest, AnyDamageIsReadOrRefused) {
  const std::string text = Base().dump() + " ";
  for (size_t i = 0; i < text.size(); ++i) {
    (void)LoadText(text.substr(0, i));
    for (const int flip : {0x01, 0x20, 0x80}) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      const auto config = LoadText(damaged);
      if (!config.ok()) {
        EXPECT_TRUE(config.status().code() == kDataLoss || config.status().code() == kInvalid)
            << config.status().ToString();
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
