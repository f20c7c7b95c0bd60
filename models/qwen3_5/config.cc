#include "models/qwen3_5/config.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/layers/linear.h"

namespace lockstep {
namespace qwen3_5 {
namespace {

absl::Status Refuse(const ModelConfig& model, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(model.directory, "/config.json: ", what,
                                                 " (model_type ", model.model_type, ")"));
}

absl::StatusOr<std::vector<LayerType>> ReadLayers(const ModelConfig& model, int64_t num_layers) {
  std::vector<LayerType> layers;
  const auto it = model.text.find("layer_types");
  if (it == model.text.end() || it->is_null()) {
    const int64_t interval = model.IntOr("full_attention_interval", 4);
    if (interval < 1) return Refuse(model, "full_attention_interval must be at least 1");
    for (int64_t i = 0; i < num_layers; ++i) {
      layers.push_back((i + 1) % interval == 0 ? LayerType::kFullAttention
                                               : LayerType::kLinearAttention);
    }
    return layers;
  }
  if (!it->is_array() || static_cast<int64_t>(it->size()) != num_layers) {
    return Refuse(model, absl::StrCat("layer_types must list ", num_layers, " layers"));
  }
  for (const nlohmann::json& item : *it) {
    const std::string name = item.is_string() ? item.get<std::string>() : item.dump();
    if (name == "full_attention") {
      layers.push_back(LayerType::kFullAttention);
    } else if (name == "linear_attention") {
      layers.push_back(LayerType::kLinearAttention);
    } else {
      return Refuse(model, absl::StrCat("layer_types has \"", name,
                                        "\"; known: full_attention, linear_attention"));
    }
  }
  return layers;
}

absl::Status CheckPositive(const ModelConfig& model, const Config& c) {
  const struct {
    const char* key;
    int64_t value;
  } rows[] = {{"intermediate_size", c.intermediate_size}, {"num_attention_heads", c.num_q_heads},
              {"num_key_value_heads", c.num_kv_heads},    {"head_dim", c.head_dim},
              {"linear_num_key_heads", c.num_k_heads},    {"linear_num_value_heads", c.num_v_heads},
              {"linear_key_head_dim", c.k_dim},           {"linear_value_head_dim", c.v_dim}};
  for (const auto& row : rows) {
    if (row.value < 1 || row.value > (int64_t{1} << 20)) {
      return Refuse(model, absl::StrCat(row.key, " is ", row.value, ", must be in [1, 2^20]"));
    }
  }
  if (!(c.norm_eps > 0.0f && c.norm_eps < 1.0f)) {
    return Refuse(model, absl::StrCat("rms_norm_eps is ", c.norm_eps, ", must be in (0, 1)"));
  }
  if (!(c.rope_theta > 0 && std::isfinite(c.rope_theta))) {
    return Refuse(model,
                  absl::StrCat("rope_theta is ", c.rope_theta, ", must be positive and finite"));
  }
  if (c.num_q_heads % c.num_kv_heads != 0) {
    return Refuse(model, absl::StrCat("num_attention_heads ", c.num_q_heads,
                                      " is no multiple of num_key_value_heads ", c.num_kv_heads));
  }
  if (c.num_v_heads % c.num_k_heads != 0) {
    return Refuse(model, absl::StrCat("linear_num_value_heads ", c.num_v_heads,
                                      " is no multiple of linear_num_key_heads ", c.num_k_heads));
  }
  if (c.conv_width < 2 || c.conv_width > 8) {
    return Refuse(model,
                  absl::StrCat("linear_conv_kernel_dim is ", c.conv_width, ", must be in [2, 8]"));
  }
  if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0 || c.rotary_dim > c.head_dim) {
    return Refuse(model, absl::StrCat("partial_rotary_factor gives a rotary width of ",
                                      c.rotary_dim, " for head_dim ", c.head_dim,
                                      "; it must be even and in [2, head_dim]"));
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const ModelConfig& model) {
  const std::string act = model.StringOr("hidden_act", "silu");
  if (act != "silu" && act != "swish") {
    return absl::UnimplementedError(
        absl::StrCat("qwen3_5: hidden_act \"", act, "\"; supported: silu"));
  }
  if (model.BoolOr("attention_bias", false)) {
    return absl::UnimplementedError("qwen3_5: attention_bias true; supported: false");
  }
  const std::string rope = model.RopeStringOr("rope_type", "default");
  if (rope != "default") {
    return absl::UnimplementedError(
        absl::StrCat("qwen3_5: rope_type \"", rope, "\"; supported: default"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Config> ReadConfig(const ModelConfig& model) {
  RETURN_IF_ERROR(CheckSupported(model));
  Config c;
  c.vocab_size = model.vocab_size;
  c.hidden_size = model.hidden_size;
  c.num_layers = model.num_layers;
  c.tied_head = model.tie_word_embeddings;
  c.norm_eps = static_cast<float>(model.NumberOr("rms_norm_eps", 1e-6));
  ASSIGN_OR_RETURN(c.intermediate_size, model.Int("intermediate_size"));
  ASSIGN_OR_RETURN(c.num_q_heads, model.Int("num_attention_heads"));
  c.num_kv_heads = model.IntOr("num_key_value_heads", c.num_q_heads);
  c.head_dim = model.IntOr("head_dim", c.num_q_heads > 0 ? c.hidden_size / c.num_q_heads : 0);
  c.rope_theta = model.RopeNumberOr("rope_theta", 10000.0);
  c.rotary_dim = static_cast<int64_t>(std::lround(
      model.RopeNumberOr("partial_rotary_factor", 0.25) * static_cast<double>(c.head_dim)));
  c.output_gate = model.BoolOr("attn_output_gate", true);
  ASSIGN_OR_RETURN(c.num_k_heads, model.Int("linear_num_key_heads"));
  ASSIGN_OR_RETURN(c.num_v_heads, model.Int("linear_num_value_heads"));
  ASSIGN_OR_RETURN(c.k_dim, model.Int("linear_key_head_dim"));
  ASSIGN_OR_RETURN(c.v_dim, model.Int("linear_value_head_dim"));
  c.conv_width = model.IntOr("linear_conv_kernel_dim", 4);
  const std::string gate = model.StringOr("output_gate_type", "swish");
  if (gate == "sigmoid") {
    c.gdn_gate = OutputGate::kSigmoid;
  } else if (gate != "swish" && gate != "silu") {
    return absl::UnimplementedError(
        absl::StrCat("qwen3_5: output_gate_type \"", gate, "\"; supported: swish, silu, sigmoid"));
  }
  RETURN_IF_ERROR(CheckPositive(model, c));
  ASSIGN_OR_RETURN(c.layers, ReadLayers(model, c.num_layers));
  return c;
}

TpLegality LegalTp(const Config& c) {
  TpLegality legality;
  for (int t : {1, 2, 4, 8}) {
    std::string reason;
    const auto cannot = [&](int64_t count, absl::string_view what) {
      if (reason.empty() && count % t != 0) {
        reason = absl::StrCat(t, ": ", count, " ", what, " cannot be split ", t, " ways");
      }
    };
    cannot(c.num_q_heads, "attention heads");
    if (c.num_kv_heads >= t) {
      cannot(c.num_kv_heads, "key/value heads");
    } else if (reason.empty() && t % c.num_kv_heads != 0) {
      reason = absl::StrCat(t, ": ", c.num_kv_heads,
                            " key/value heads cannot be replicated evenly over ", t, " ranks");
    }
    cannot(c.num_k_heads, "linear-attention key heads");
    cannot(c.num_v_heads, "linear-attention value heads");
    cannot(c.intermediate_size, "rows of gate_proj and up_proj");
    const struct {
      const char* name;
      int64_t k;
    } rows[] = {{"self_attn.o_proj", c.num_q_heads * c.head_dim},
                {"linear_attn.out_proj", c.num_v_heads * c.v_dim},
                {"mlp.down_proj", c.intermediate_size}};
    for (const auto& row : rows) {
      const absl::Status status = Linear::ValidateRowParallel(row.name, row.k, t);
      if (reason.empty() && !status.ok()) reason = absl::StrCat(t, ": ", status.message());
    }
    if (reason.empty()) {
      legality.legal.push_back(t);
    } else {
      legality.reasons.push_back(reason);
    }
  }
  return legality;
}

}  // namespace qwen3_5
}  // namespace lockstep
