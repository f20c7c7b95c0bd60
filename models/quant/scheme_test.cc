// Tests of SchemeResolver: the rules of each producer, the cross-check against tensors, and errors.
#include "models/quant/scheme.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/model_config.h"
#include "models/weights/testing/safetensors_writer.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::MakeTempDir;
using testing::SafetensorsWriter;
using testing::StatusIs;
using testing::WriteFile;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr int64_t kN = 160, kK = 256;

// The tensors of one [kN, kK] module in each stored form.
enum class Form { kBf16, kCtNvfp4, kMoNvfp4, kTensor, kTensorStatic, kChannel, kChannel1d, kBlock };

void AddModule(SafetensorsWriter* w, const std::string& m, Form form) {
  const auto scalar = [&](const std::string& suffix) { w->AddF32(m + "." + suffix, {}, {1}); };
  switch (form) {
    case Form::kBf16:
      w->AddFilled(m + ".weight", DType::kBF16, {kN, kK});
      return;
    case Form::kCtNvfp4:
      w->AddFilled(m + ".weight_packed", DType::kU8, {kN, kK / 2});
      w->AddFilled(m + ".weight_scale", DType::kE4M3, {kN, kK / 16});
      w->AddF32(m + ".weight_global_scale", {1}, {1}).AddF32(m + ".input_global_scale", {1}, {1});
      return;
    case Form::kMoNvfp4:
      w->AddFilled(m + ".weight", DType::kU8, {kN, kK / 2});
      w->AddFilled(m + ".weight_scale", DType::kE4M3, {kN, kK / 16});
      scalar("weight_scale_2");
      scalar("input_scale");
      return;
    case Form::kTensor:
    case Form::kTensorStatic:
      scalar("weight_scale");
      if (form == Form::kTensorStatic) scalar("input_scale");
      break;
    case Form::kChannel:
      w->AddFilled(m + ".weight_scale", DType::kBF16, {kN, 1});
      break;
    case Form::kChannel1d:
      w->AddFilled(m + ".weight_scale", DType::kF32, {kN});
      break;
    case Form::kBlock:
      w->AddFilled(m + ".weight_scale_inv", DType::kBF16, {2, 2});
      break;
  }
  w->AddFilled(m + ".weight", DType::kE4M3, {kN, kK});
}

struct Case {
  std::unique_ptr<Checkpoint> checkpoint;
  absl::StatusOr<std::unique_ptr<SchemeResolver>> resolver = absl::UnknownError("not made");

  absl::StatusOr<LinearScheme> Resolve(const std::string& module) const {
    if (!resolver.ok()) return resolver.status();
    return (*resolver)->Resolve(module, kN, kK);
  }
};

// `config` and `hf` are texts of config.json and hf_quant_config.json ("" is: no file).
Case Make(const SafetensorsWriter& writer, const std::string& config, const std::string& hf = "") {
  const std::string dir = MakeTempDir();
  writer.Write(dir + "/model.safetensors");
  WriteFile(dir + "/config.json", config);
  if (!hf.empty()) WriteFile(dir + "/hf_quant_config.json", hf);
  Case made;
  made.checkpoint = std::move(Checkpoint::Open(dir)).value();
  auto json = ParseLenientJson(config, "config.json");
  CHECK_OK(json.status());
  made.resolver = SchemeResolver::Create(*json, *made.checkpoint);
  return made;
}

Case MakeModules(const std::vector<std::pair<std::string, Form>>& modules,
                 const std::string& config, const std::string& hf = "") {
  SafetensorsWriter writer;
  for (const auto& item : modules) AddModule(&writer, item.first, item.second);
  return Make(writer, config, hf);
}

std::string Quant(const std::string& body) { return "{\"quantization_config\": " + body + "}"; }

// "nvfp4/none" or the error.
std::string Shown(const absl::StatusOr<LinearScheme>& scheme) {
  if (!scheme.ok()) return scheme.status().ToString();
  return std::string(Name(scheme->weight)) + "/" + Name(scheme->activation);
}

constexpr const char* kFp8Channel =
    R"("weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true},
       "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true})";
constexpr const char* kNvfp4 =
    R"("weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                   "symmetric": true, "actorder": "static"},
       "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"})";

// The mixed compressed-tensors rules of section 5.5; `last_layers` are those with FP8 MLPs.
std::string MixedRules(const std::string& last_layers, const std::string& ignore) {
  return Quant(R"({"quant_method": "compressed-tensors", "format": "mixed-precision",
      "ignore": [)" +
               ignore + R"(], "config_groups": {
      "group_0": {"targets": ["re:.*self_attn\\.(q|k|v|o)_proj$",
          "re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$", "lm_head",
          "re:.*layers\\.()" +
               last_layers + R"()\\.mlp\\.(gate|up|down)_proj$"], )" + kFp8Channel +
               R"(}, "group_1": {"targets": ["re:.*mlp\\.(gate|up|down)_proj$"], )" + kNvfp4 +
               "}}}");
}

TEST(SchemeTest, WithoutConfigEverythingIsBf16) {
  const Case c = MakeModules({{"model.layers.0.mlp.up_proj", Form::kBf16}}, "{}");
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.mlp.up_proj")), "bf16/none");
  EXPECT_EQ((*c.resolver)->Summary(), "bf16");
  const Case null = MakeModules({{"a", Form::kBf16}}, R"({"quantization_config": null})");
  EXPECT_EQ(Shown(null.Resolve("a")), "bf16/none");
}

TEST(SchemeTest, MixedCompressedTensorsTakesTheFirstGroup) {
  const std::string p = "model.language_model.layers.";
  const Case c = MakeModules({{p + "55.mlp.gate_proj", Form::kCtNvfp4},
                              {p + "56.mlp.gate_proj", Form::kChannel},
                              {p + "55.linear_attn.in_proj_qkv", Form::kChannel},
                              {p + "55.linear_attn.in_proj_a", Form::kBf16},
                              {p + "55.self_attn.q_proj", Form::kChannel},
                              {"mtp.layers.0.mlp.gate_proj", Form::kBf16},
                              {"lm_head", Form::kChannel}},
                             MixedRules("56|57|58|59|60|61|62|63", R"("re:^mtp.*")"));
  EXPECT_EQ(Shown(c.Resolve(p + "55.mlp.gate_proj")), "nvfp4/none");
  EXPECT_EQ(Shown(c.Resolve(p + "56.mlp.gate_proj")), "fp8_channel/fp8_per_token");
  EXPECT_EQ(Shown(c.Resolve(p + "55.linear_attn.in_proj_qkv")), "fp8_channel/fp8_per_token");
  EXPECT_EQ(Shown(c.Resolve(p + "55.linear_attn.in_proj_a")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve(p + "55.self_attn.q_proj")), "fp8_channel/fp8_per_token");
  EXPECT_EQ(Shown(c.Resolve("mtp.layers.0.mlp.gate_proj")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve("lm_head")), "fp8_channel/fp8_per_token");
  EXPECT_EQ((*c.resolver)->Summary(), "compressed-tensors: nvfp4 + fp8_channel");
  ASSERT_OK_AND_ASSIGN(const LinearScheme nvfp4, c.Resolve(p + "55.mlp.gate_proj"));
  EXPECT_TRUE(nvfp4.global_is_divisor);
  EXPECT_EQ(nvfp4.codes, "weight_packed");
  EXPECT_EQ(nvfp4.scale, "weight_scale");
  EXPECT_EQ(nvfp4.global_scale, "weight_global_scale");
  EXPECT_EQ(nvfp4.input_scale, "");
  ASSERT_OK_AND_ASSIGN(const LinearScheme channel, c.Resolve("lm_head"));
  EXPECT_EQ(channel.codes, "weight");
  EXPECT_EQ(channel.scale, "weight_scale");
  EXPECT_EQ(channel.global_scale, "");
}

TEST(SchemeTest, EmptyRegexGroupIsAccepted) {
  const Case c = MakeModules({{"model.layers.0.mlp.up_proj", Form::kCtNvfp4}}, MixedRules("", ""));
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.mlp.up_proj")), "nvfp4/none");
}

TEST(SchemeTest, InProjStarDoesNotMatchInProjQkv) {
  const std::string m = "model.layers.0.linear_attn.in_proj_qkv";
  const std::string config = Quant(R"({"quant_method": "compressed-tensors",
      "ignore": ["re:.*\\.linear_attn\\.in_proj_*$"],
      "config_groups": {"group_0": {"targets": ["Linear"], )" +
                                   std::string(kNvfp4) + "}}}");
  EXPECT_EQ(Shown(MakeModules({{m, Form::kCtNvfp4}}, config).Resolve(m)), "nvfp4/none");
  // The tensors decide when nothing else names the module.
  EXPECT_EQ(Shown(MakeModules({{m, Form::kBf16}}, config).Resolve(m)), "bf16/none");
}

TEST(SchemeTest, GroupsAreTriedInFileOrder) {
  const auto config = [](const std::string& first, const std::string& second) {
    return Quant(R"({"quant_method": "compressed-tensors", "config_groups": {")" + first +
                 R"(": {"targets": ["Linear"], )" + kFp8Channel + "}, \"" + second +
                 R"(": {"targets": ["Linear"], )" + kNvfp4 + "}}}");
  };
  const std::string m = "model.layers.0.mlp.up_proj";
  for (const auto& names : {std::make_pair("group_1", "group_0"), std::make_pair("z", "a"),
                            std::make_pair("group_10", "group_2")}) {
    const Case c = MakeModules({{m, Form::kChannel}}, config(names.first, names.second));
    EXPECT_EQ(Shown(c.Resolve(m)), "fp8_channel/fp8_per_token") << names.first;
  }
}

TEST(SchemeTest, IgnoreBeatsTargets) {
  const std::string config = Quant(R"({"quant_method": "compressed-tensors", "ignore": ["lm_head"],
      "config_groups": {"group_0": {"targets": ["Linear", "lm_head"], )" +
                                   std::string(kFp8Channel) + "}}}");
  const Case c = MakeModules(
      {{"lm_head", Form::kBf16}, {"model.layers.0.mlp.up_proj", Form::kChannel}}, config);
  EXPECT_EQ(Shown(c.Resolve("lm_head")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.mlp.up_proj")), "fp8_channel/fp8_per_token");
}

TEST(SchemeTest, CompressedTensorsFp8Variants) {
  const auto config = [](const std::string& strategy, const std::string& activations) {
    return Quant(R"({"quant_method": "compressed-tensors", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": ")" +
                 strategy + R"("}, "input_activations": )" + activations + "}}}");
  };
  const std::string token = R"({"num_bits": 8, "type": "float", "dynamic": true,
                                "strategy": "token"})";
  const std::string fixed = R"({"num_bits": 8, "type": "float", "dynamic": false,
                                "strategy": "tensor"})";
  const std::string group = R"({"num_bits": 8, "type": "float", "dynamic": true,
                                "strategy": "group", "group_size": 128})";
  const auto shown = [&](Form form, const std::string& text) {
    return Shown(MakeModules({{"m", form}}, text).Resolve("m"));
  };
  EXPECT_EQ(shown(Form::kChannel, config("channel", "null")), "fp8_channel/none");
  EXPECT_EQ(shown(Form::kTensor, config("tensor", token)), "fp8_tensor/fp8_per_token");
  EXPECT_EQ(shown(Form::kTensorStatic, config("tensor", fixed)), "fp8_tensor/fp8_static");
  EXPECT_EQ(shown(Form::kBlock, config("block", group)), "fp8_block/fp8_block128");
  EXPECT_THAT(shown(Form::kTensor, config("tensor", fixed)),
              HasSubstr("tensor m.input_scale is missing"));
  EXPECT_THAT(shown(Form::kChannel, config("channel", group)), HasSubstr("UNIMPLEMENTED"));
}

TEST(SchemeTest, ModelOptMixedPrecision) {
  const std::string config = Quant(R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
      "quantized_layers": {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "language_model.model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.up_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "model.layers.2.mlp.up_proj": {"quant_algo": "FP8_PB_WO"},
        "mtp.fc": {"quant_algo": "FP8"}},
      "ignore": ["mtp*"]})");
  const std::string p = "model.language_model.layers.";
  const Case c = MakeModules({{"lm_head", Form::kMoNvfp4},
                              {p + "0.self_attn.q_proj", Form::kTensorStatic},
                              {p + "0.mlp.experts.3.up_proj", Form::kMoNvfp4},
                              {p + "0.mlp.gate", Form::kBf16},
                              {p + "1.mlp.up_proj", Form::kChannel1d},
                              {p + "2.mlp.up_proj", Form::kBlock},
                              {"mtp.fc", Form::kBf16}},
                             config);
  EXPECT_EQ(Shown(c.Resolve("lm_head")), "nvfp4/none");
  EXPECT_EQ(Shown(c.Resolve(p + "0.self_attn.q_proj")), "fp8_tensor/fp8_static");
  EXPECT_EQ(Shown(c.Resolve(p + "0.mlp.experts.3.up_proj")), "nvfp4/none");
  EXPECT_EQ(Shown(c.Resolve(p + "0.mlp.gate")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve(p + "1.mlp.up_proj")), "fp8_channel/fp8_per_token");
  EXPECT_EQ(Shown(c.Resolve(p + "2.mlp.up_proj")), "fp8_block/none");
  EXPECT_EQ(Shown(c.Resolve("mtp.fc")), "bf16/none");
  EXPECT_EQ((*c.resolver)->Summary(), "modelopt: nvfp4 + fp8_tensor + fp8_channel + fp8_block");
  ASSERT_OK_AND_ASSIGN(const LinearScheme head, c.Resolve("lm_head"));
  EXPECT_FALSE(head.global_is_divisor);
  EXPECT_EQ(head.codes, "weight");
  EXPECT_EQ(head.global_scale, "weight_scale_2");
  ASSERT_OK_AND_ASSIGN(const LinearScheme q, c.Resolve(p + "0.self_attn.q_proj"));
  EXPECT_EQ(q.input_scale, "input_scale");
}

TEST(SchemeTest, ModelOptUniformWithExclusions) {
  const std::string hf = R"({"producer": {"name": "modelopt"}, "quantization": {
      "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
      "exclude_modules": ["lm_head", "model.layers.0.mlp.gate", "*.linear_attn*"]}})";
  const Case c = MakeModules({{"lm_head", Form::kBf16},
                              {"model.layers.0.mlp.gate", Form::kBf16},
                              {"model.layers.0.mlp.gate_proj", Form::kMoNvfp4},
                              {"model.layers.0.linear_attn.out_proj", Form::kBf16}},
                             "{}", hf);
  EXPECT_EQ(Shown(c.Resolve("lm_head")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.mlp.gate")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.mlp.gate_proj")), "nvfp4/none");
  EXPECT_EQ(Shown(c.Resolve("model.layers.0.linear_attn.out_proj")), "bf16/none");
}

TEST(SchemeTest, HfQuantConfigMustAgree) {
  const std::string config = Quant(R"({"quant_method": "modelopt", "quant_algo": "FP8"})");
  const auto shown = [&config](const std::string& hf) {
    return Shown(MakeModules({{"m", Form::kTensorStatic}}, config, hf).Resolve("m"));
  };
  EXPECT_EQ(shown(R"({"quantization": {"quant_algo": "FP8"}})"), "fp8_tensor/fp8_static");
  EXPECT_EQ(shown(R"({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}})"),
            "fp8_tensor/fp8_static");
  EXPECT_THAT(shown(R"({"quantization": {"quant_algo": "NVFP4"}})"),
              AllOf(HasSubstr("module m"), HasSubstr("config.json says fp8_tensor"),
                    HasSubstr("hf_quant_config.json says nvfp4")));
  EXPECT_THAT(shown("{"), HasSubstr("DATA_LOSS"));
}

TEST(SchemeTest, Fp8Block) {
  const std::string config = R"({"text_config": {"quantization_config": {"quant_method": "fp8",
      "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
      "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
      "ignored_layers": ["model.layers.0.linear_attn.in_proj_ba"]}}})";
  const std::string p = "model.language_model.layers.0.";
  const Case c = MakeModules({{p + "mlp.gate_proj", Form::kBlock},
                              {p + "mlp.gate", Form::kBf16},
                              {p + "linear_attn.in_proj_a", Form::kBf16},
                              {"lm_head", Form::kBf16}},
                             config);
  EXPECT_EQ(Shown(c.Resolve(p + "mlp.gate_proj")), "fp8_block/fp8_block128");
  EXPECT_EQ(Shown(c.Resolve(p + "mlp.gate")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve(p + "linear_attn.in_proj_a")), "bf16/none");
  EXPECT_EQ(Shown(c.Resolve("lm_head")), "bf16/none");
  ASSERT_OK_AND_ASSIGN(const LinearScheme scheme, c.Resolve(p + "mlp.gate_proj"));
  EXPECT_EQ(scheme.scale, "weight_scale_inv");
  EXPECT_EQ((*c.resolver)->Summary(), "fp8: fp8_block");
}

TEST(SchemeTest, Fp8PerTensor) {
  const std::string m = "model.layers.0.mlp.up_proj";
  EXPECT_EQ(Shown(MakeModules({{m, Form::kTensorStatic}},
                              Quant(R"({"quant_method": "fp8", "activation_scheme": "static"})"))
                      .Resolve(m)),
            "fp8_tensor/fp8_static");
  EXPECT_EQ(
      Shown(MakeModules({{m, Form::kTensor}}, Quant(R"({"quant_method": "fp8"})")).Resolve(m)),
      "fp8_tensor/fp8_per_token");
}

TEST(SchemeTest, SmallMatricesAreReadAsDeclared) {
  // One block and one row: [1, 1] is per channel, per block, as the config says; else ambiguous.
  SafetensorsWriter writer;
  writer.AddFilled("m.weight", DType::kE4M3, {1, 64})
      .AddFilled("m.weight_scale", DType::kF32, {1, 1});
  const Case channel = Make(writer, Quant(R"({"quant_method": "modelopt",
                                              "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"})"));
  EXPECT_EQ(Shown((*channel.resolver)->Resolve("m", 1, 64)), "fp8_channel/fp8_per_token");
  const Case block =
      Make(writer, Quant(R"({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"})"));
  EXPECT_EQ(Shown((*block.resolver)->Resolve("m", 1, 64)), "fp8_block/none");
  const Case none = Make(writer, "{}");
  EXPECT_THAT((*none.resolver)->Resolve("m", 1, 64), StatusIs(kInvalid, HasSubstr("ambiguous")));
}

TEST(SchemeTest, TensorsWinForQuantizedOrNot) {
  for (const auto& row : {std::make_pair(Form::kChannel, "fp8_channel/none"),
                          std::make_pair(Form::kCtNvfp4, "nvfp4/none"),
                          std::make_pair(Form::kBlock, "fp8_block/none")}) {
    EXPECT_EQ(Shown(MakeModules({{"m", row.first}}, "{}").Resolve("m")), row.second);
  }
  EXPECT_EQ(Shown(MakeModules({{"m", Form::kBf16}}, MixedRules("1", "")).Resolve("m")),
            "bf16/none");
}

TEST(SchemeTest, ContradictionsNameModuleAndTensor) {
  const std::string m = "model.layers.0.mlp.up_proj";
  EXPECT_THAT(MakeModules({{m, Form::kChannel}}, MixedRules("7", "")).Resolve(m),
              StatusIs(kInvalid, AllOf(HasSubstr(m), HasSubstr("config says nvfp4"),
                                       HasSubstr("tensors are fp8_channel"))));
  const auto with = [&](DType codes, std::vector<int64_t> codes_shape, DType scale,
                        std::vector<int64_t> scale_shape, bool global) {
    SafetensorsWriter w;
    w.AddFilled(m + ".weight_packed", codes, codes_shape);
    w.AddFilled(m + ".weight_scale", scale, scale_shape);
    if (global) w.AddF32(m + ".weight_global_scale", {1}, {1});
    return Make(w, MixedRules("7", "")).Resolve(m);
  };
  EXPECT_THAT(with(DType::kU8, {kN, kK / 2}, DType::kE4M3, {kN, kK / 16}, true), IsOk());
  EXPECT_THAT(with(DType::kU8, {kN, kK}, DType::kE4M3, {kN, kK / 16}, true),
              StatusIs(kInvalid, AllOf(HasSubstr(m + ".weight_packed is U8[160, 256]"),
                                       HasSubstr("U8 of shape [160, 128] is expected"))));
  EXPECT_THAT(with(DType::kU8, {kN, kK / 2}, DType::kE4M3, {kN, 3}, true),
              StatusIs(kInvalid, HasSubstr("F8_E4M3[160, 3]; F8_E4M3 of shape [160, 16]")));
  EXPECT_THAT(with(DType::kU8, {kN, kK / 2}, DType::kBF16, {kN, kK / 16}, true),
              StatusIs(kInvalid, HasSubstr("weight_scale is BF16[160, 16]")));
  EXPECT_THAT(with(DType::kU8, {kN, kK / 2}, DType::kE4M3, {kN, kK / 16}, false),
              StatusIs(kInvalid, HasSubstr("weight_global_scale is missing")));
}

TEST(SchemeTest, TensorsThatMakeNoModule) {
  const auto resolve = [](const SafetensorsWriter& w) { return Make(w, "{}").Resolve("m"); };
  SafetensorsWriter none, half, both, bare, odd, wrong, permuted, twice, integer;
  none.AddF32("x.weight", {1}, {1});
  EXPECT_THAT(resolve(none), StatusIs(kInvalid, AllOf(HasSubstr("module m [160, 256]"),
                                                      HasSubstr("neither tensor m.weight"))));
  half.AddFilled("m.weight", DType::kF16, {kN, kK});
  EXPECT_THAT(resolve(half), StatusIs(kInvalid, HasSubstr("m.weight is F16[160, 256]")));
  both.AddFilled("m.weight", DType::kBF16, {kN, kK}).AddFilled("m.weight_packed", DType::kU8, {1});
  EXPECT_THAT(resolve(both), StatusIs(kInvalid, HasSubstr("ambiguous")));
  bare.AddFilled("m.weight", DType::kE4M3, {kN, kK});
  EXPECT_THAT(resolve(bare), StatusIs(kInvalid, HasSubstr("neither tensor m.weight_scale")));
  odd.AddFilled("m.weight", DType::kE4M3, {kN, kK}).AddFilled("m.weight_scale", DType::kF32, {7});
  EXPECT_THAT(resolve(odd), StatusIs(kInvalid, AllOf(HasSubstr("m.weight_scale is F32[7]"),
                                                     HasSubstr("[160, 1] (per channel)"),
                                                     HasSubstr("[2, 2] (per 128x128 block)"))));
  wrong.AddFilled("m.weight", DType::kBF16, {kK, kN});
  EXPECT_THAT(resolve(wrong), StatusIs(kInvalid, HasSubstr("BF16[256, 160]")));
  AddModule(&permuted, "m", Form::kCtNvfp4);
  permuted.AddFilled("m.weight_g_idx", DType::kI32, {kK});
  EXPECT_THAT(resolve(permuted), StatusIs(kUnimplemented, HasSubstr("m.weight_g_idx")));
  AddModule(&twice, "m", Form::kBlock);
  twice.AddFilled("m.weight_scale", DType::kF32, {kN, 1});
  EXPECT_THAT(resolve(twice), StatusIs(kInvalid, HasSubstr("ambiguous")));
  integer.AddFilled("m.weight", DType::kE4M3, {kN, kK});
  integer.AddFilled("m.weight_scale", DType::kF16, {kN, 1});
  EXPECT_THAT(resolve(integer), StatusIs(kInvalid, HasSubstr("F32 or BF16 is expected")));
}

TEST(SchemeTest, UnsupportedQuantizationNamesItAndTheSupportedOnes) {
  const auto group = [](const std::string& weights) {
    return R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"],
              "weights": )" +
           weights + "}}}";
  };
  const std::vector<std::pair<std::string, std::string>> kRows = {
      {R"({"quant_method": "gptq", "bits": 4})", "\"gptq\""},
      {R"({"quant_method": "modelopt", "quant_algo": "MXFP8"})", "\"MXFP8\""},
      {R"({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"})", "\"INT4_AWQ\""},
      {R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32})", "group_size 32"},
      {R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
           "quantized_layers": {"m": {"quant_algo": "W4A8_AWQ"}}})",
       "W4A8_AWQ"},
      {group(R"({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})"),
       "4-bit int group"},
      {group(R"({"num_bits": 8, "strategy": "channel"})"), "8-bit int channel"},
      {group(R"({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32})"),
       "of 32"},
      {group(R"({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": false})"),
       "asymmetric"},
      {group(R"({"num_bits": 8, "type": "float", "strategy": "block",
                 "block_structure": [64, 64]})"),
       "[64,64]"},
      {group(R"({"num_bits": 8, "type": "float", "strategy": "group"})"), "8-bit float group"},
      {group(R"({"num_bits": 8, "type": "float", "actorder": "group"})"), "actorder"},
      {R"({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}})",
       "sparse-24"},
      {R"({"quant_method": "compressed-tensors", "transform_config": {"x": 1}})", "transform"},
      {R"({"quant_method": "fp8", "fmt": "e5m2"})", "e5m2"},
      {R"({"quant_method": "fp8", "weight_block_size": [64, 128]})", "[64,128]"},
      {R"({"quant_method": "fp8", "activation_scheme": "none"})", "\"none\""},
  };
  for (const auto& row : kRows) {
    EXPECT_THAT(MakeModules({{"m", Form::kBf16}}, Quant(row.first)).resolver,
                StatusIs(kUnimplemented, AllOf(HasSubstr(row.second), HasSubstr("config.json"),
                                               HasSubstr("supported: modelopt (FP8"))))
        << row.first;
  }
}

TEST(SchemeTest, MalformedConfigsAreInvalid) {
  const std::vector<std::pair<std::string, std::string>> kRows = {
      {"3", "not an object"},
      {"{}", "quant_method"},
      {R"({"quant_method": "modelopt"})", "quant_algo"},
      {R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})", "quantized_layers"},
      {R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
           "quantized_layers": {"m": 3}})",
       "m: no quant_algo"},
      {R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
           "model.m": {"quant_algo": "FP8"}, "language_model.model.m": {"quant_algo": "NVFP4"}}})",
       "twice"},
      {R"({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"})", "not a list"},
      {R"({"quant_method": "compressed-tensors"})", "config_groups"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": 3}})", "g is not"},
      {R"({"quant_method": "compressed-tensors", "ignore": ["re:("], "config_groups": {}})",
       "regular expression"},
      {R"({"quant_method": "fp8", "ignored_layers": [3]})", "something other than names"},
  };
  for (const auto& row : kRows) {
    EXPECT_THAT(MakeModules({{"m", Form::kBf16}}, Quant(row.first)).resolver,
                StatusIs(kInvalid, HasSubstr(row.second)))
        << row.first;
  }
}

}  // namespace
}  // namespace lockstep
