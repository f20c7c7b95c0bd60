#include "models/qwen3_5/config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/layers/gated_mlp.h"

namespace lockstep {
namespace qwen3_5 {
namespace {

absl::StatusOr<std::vector<LayerType>> ReadLayers(const ModelConfig& model, int64_t num_layers) {
  std::vector<LayerType> layers;
  const auto it = model.text.find("layer_types");
  if (it == model.text.end() || it->is_null()) {
    const int64_t interval = model.IntOr("full_attention_interval", 4);
    if (interval < 1) return model.Refuse("full_attention_interval must be at least 1");
    for (int64_t i = 0; i < num_layers; ++i) {
      layers.push_back((i + 1) % interval == 0 ? LayerType::kFullAttention
                                               : LayerType::kLinearAttention);
    }
    return layers;
  }
  if (!it->is_array() || static_cast<int64_t>(it->size()) != num_layers) {
    return model.Refuse(absl::StrCat("layer_types must list ", num_layers, " layers"));
  }
  for (const nlohmann::json& item : *it) {
    const std::string name = item.is_string() ? item.get<std::string>() : item.dump();
    if (name == "full_attention") {
      layers.push_back(LayerType::kFullAttention);
    } else if (name == "linear_attention") {
      layers.push_back(LayerType::kLinearAttention);
    } else {
      return model.Refuse(
          absl::StrCat("layer_types has \"", name, "\"; known: full_attention, linear_attention"));
    }
  }
  return layers;
}

}  // namespace

absl::StatusOr<MixerConfig> ReadMixers(const ModelConfig& model) {
  MixerConfig c;
  ASSIGN_OR_RETURN(c.layers, ReadLayers(model, model.num_layers));
  ASSIGN_OR_RETURN(c.attention, ReadAttention(model, 0.25));
  c.attention.output_gate = model.BoolOr("attn_output_gate", true);
  c.attention.qk_norm = true;
  c.attention.norm_weight_offset = 1.0f;
  ASSIGN_OR_RETURN(c.delta_net, ReadDeltaNet(model));
  return c;
}

void AddMixerRules(const MixerConfig& c, TpRules* rules) {
  AddAttentionRules(c.attention, rules);
  AddDeltaNetRules(c.delta_net, rules);
}

absl::StatusOr<Config> ReadConfig(const ModelConfig& model) {
  Config c;
  ASSIGN_OR_RETURN(c.mixers, ReadMixers(model));
  ASSIGN_OR_RETURN(c.intermediate_size, ReadGatedMlp(model));
  return c;
}

}  // namespace qwen3_5
}  // namespace lockstep
