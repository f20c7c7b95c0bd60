// Tests of module names and patterns of quantization configs.
#include "models/quant/module_matcher.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

bool Matches(const std::string& entry, const std::string& module) {
  auto pattern = ModulePattern::Parse(entry);
  EXPECT_TRUE(pattern.ok()) << pattern.status().ToString();
  auto matches = pattern->Matches(module);
  EXPECT_TRUE(matches.ok()) << matches.status().ToString();
  return *matches;
}

TEST(ModuleMatcherTest, PrefixesAreOneModule) {
  const std::string name = "layers.0.mlp.gate_proj";
  for (const std::string prefix : {"", "model.", "model.language_model.", "language_model.model.",
                                   "backbone.", "language_model.backbone."}) {
    EXPECT_EQ(CanonicalModule(prefix + name), name);
    for (const std::string other :
         {"model.", "model.language_model.", "language_model.model.", "backbone."}) {
      EXPECT_TRUE(NamesModule(prefix + name, other + name));
    }
  }
  EXPECT_EQ(CanonicalModule("language_model.lm_head"), "lm_head");
  EXPECT_FALSE(NamesModule("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(NamesModule("model.layers.1.mlp.gate_proj", "model.layers.0.mlp.gate_proj"));
}

TEST(ModuleMatcherTest, FusedNamesCoverTheirMembers) {
  EXPECT_TRUE(NamesModule("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.v_proj"));
  EXPECT_TRUE(NamesModule("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(NamesModule("layers.0.linear_attn.in_proj_qkvz", "layers.0.linear_attn.in_proj_z"));
  EXPECT_TRUE(NamesModule("layers.0.linear_attn.in_proj_ba", "layers.0.linear_attn.in_proj_a"));
  EXPECT_FALSE(NamesModule("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"));
  EXPECT_FALSE(NamesModule("model.layers.1.mlp.gate_up_proj", "model.layers.0.mlp.up_proj"));
}

TEST(ModuleMatcherTest, Globs) {
  EXPECT_TRUE(GlobMatches("mtp*", "mtp.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(GlobMatches("mtp*", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(GlobMatches("*.conv1d", "model.layers.0.linear_attn.conv1d"));
  EXPECT_FALSE(GlobMatches("*.conv1d", "model.layers.0.linear_attn.conv1d_x"));
  EXPECT_TRUE(GlobMatches("model.layers.?.mlp*", "model.language_model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(GlobMatches("model.layers.?.mlp*", "model.layers.13.mlp.up_proj"));
  EXPECT_TRUE(GlobMatches("language_model.lm_head*", "lm_head"));
  EXPECT_TRUE(GlobMatches("*", "anything"));
}

TEST(ModuleMatcherTest, RegexIsAnchoredPrefixMatch) {
  EXPECT_TRUE(Matches("re:^mtp.*", "mtp.fc"));
  EXPECT_TRUE(Matches("re:model\\.layers\\.1", "model.layers.12.mlp.up_proj"));  // a prefix
  EXPECT_FALSE(Matches("re:mlp", "model.layers.1.mlp.up_proj"));                 // at the start
  EXPECT_TRUE(Matches("re:.*mlp\\.(gate|up|down)_proj$", "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(Matches("re:.*mlp\\.(gate|up|down)_proj$", "model.layers.1.mlp.up_proj_x"));
  EXPECT_TRUE(Matches("re:^model\\.layers\\..*", "model.language_model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(Matches("re:language_model\\.lm_head", "lm_head"));
}

TEST(ModuleMatcherTest, StarAfterUnderscoreRepeatsTheUnderscore) {
  const std::string entry = "re:.*\\.linear_attn\\.in_proj_*$";
  EXPECT_FALSE(Matches(entry, "model.layers.0.linear_attn.in_proj_qkv"));
  EXPECT_FALSE(Matches(entry, "model.layers.0.linear_attn.in_proj_a"));
  EXPECT_TRUE(Matches(entry, "model.layers.0.linear_attn.in_proj_"));
}

TEST(ModuleMatcherTest, EmptyGroupCompilesAndMatchesNoLayer) {
  EXPECT_FALSE(
      Matches("re:.*layers\\.()\\.mlp\\.(gate|up|down)_proj$", "model.layers.0.mlp.gate_proj"));
}

TEST(ModuleMatcherTest, LinearIsAClass) {
  EXPECT_TRUE(Matches("Linear", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(Matches("Linear", "lm_head"));
  for (const char* other :
       {"model.embed_tokens", "backbone.embeddings", "model.norm",
        "model.layers.0.linear_attn.conv1d", "model.layers.0.input_layernorm"}) {
    EXPECT_FALSE(Matches("Linear", other)) << other;
  }
}

TEST(ModuleMatcherTest, BadRegexesAreErrors) {
  EXPECT_THAT(ModulePattern::Parse("re:(mlp"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("(mlp"), HasSubstr("offset 4"))));
  auto slow = ModulePattern::Parse("re:(a|aa)+$");
  ASSERT_TRUE(slow.ok());
  EXPECT_THAT(slow->Matches(std::string(60, 'a') + "c"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("simplify")));
}

TEST(ExcludeListTest, ExactNamesGlobsAndLegacySubstrings) {
  const std::set<std::string> modules = {"layers.0.mlp.gate", "layers.0.mlp.gate_proj",
                                         "visual.blocks.0.fc", "layers.0.mlp.router.weight"};
  const ExcludeList list({"model.layers.0.mlp.gate", "mtp*", "visual", "router"}, modules);
  EXPECT_TRUE(list.Excludes("model.layers.0.mlp.gate"));
  EXPECT_TRUE(list.Excludes("language_model.model.layers.0.mlp.gate"));
  EXPECT_FALSE(list.Excludes("model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(list.Excludes("mtp.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(list.Excludes("model.visual.blocks.0.fc"));
  EXPECT_TRUE(list.Excludes("model.layers.3.mlp.router"));
  EXPECT_FALSE(ExcludeList().Excludes("model.layers.0.mlp.gate"));
}

}  // namespace
}  // namespace lockstep
