#include "models/nemotron_h/config.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace nemotron_h {
namespace {

const nlohmann::json* Find(const ModelConfig& model, const char* key) {
  const auto it = model.text.find(key);
  return it == model.text.end() || it->is_null() ? nullptr : &*it;
}

// The first of the names that the file has; the canonical one when it has none.
std::string NameIn(const ModelConfig& model, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (Find(model, name) != nullptr) return name;
  }
  return *names.begin();
}

absl::StatusOr<LayerType> TypeOf(const ModelConfig& model, const std::string& key,
                                 const std::string& name) {
  const struct {
    const char* name;
    LayerType type;
  } rows[] = {{"M", LayerType::kMamba},
              {"*", LayerType::kAttention},
              {"-", LayerType::kMlp},
              {"E", LayerType::kMoe},
              {"mamba", LayerType::kMamba},
              {"attention", LayerType::kAttention},
              {"mlp", LayerType::kMlp},
              {"moe", LayerType::kMoe},
              {"linear_attention", LayerType::kMamba},
              {"full_attention", LayerType::kAttention}};
  const bool letters = key == "hybrid_override_pattern";
  for (const auto& row : rows) {
    if (name == row.name && letters == (name.size() == 1)) return row.type;
  }
  return model.Refuse(absl::StrCat(key, " has \"", name, "\"; known: ",
                                   letters ? "M, *, -, E"
                                           : "mamba, attention, mlp, moe, linear_attention, "
                                             "full_attention"));
}

absl::StatusOr<std::vector<LayerType>> ReadLayers(const ModelConfig& model) {
  const std::string key = NameIn(model, {"layers_block_type", "hybrid_override_pattern"});
  const nlohmann::json* value = Find(model, key.c_str());
  std::vector<std::string> names;
  if (value != nullptr && key == "hybrid_override_pattern" && value->is_string()) {
    for (char c : value->get<std::string>()) names.push_back(std::string(1, c));
  } else if (value != nullptr && key == "layers_block_type" && value->is_array()) {
    for (const nlohmann::json& item : *value) {
      names.push_back(item.is_string() ? item.get<std::string>() : item.dump());
    }
  } else {
    return model.Refuse(
        "a list layers_block_type or a string hybrid_override_pattern is needed: one "
        "entry per layer");
  }
  if (static_cast<int64_t>(names.size()) != model.num_layers) {
    return model.Refuse(absl::StrCat(key, " has ", names.size(), " layers, num_hidden_layers is ",
                                     model.num_layers));
  }
  std::vector<LayerType> layers;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const LayerType type, TypeOf(model, key, name));
    layers.push_back(type);
  }
  return layers;
}

// One size for all MLP layers, or a list with one for each of them in order.
absl::Status ReadIntermediate(const ModelConfig& model, Config* c) {
  c->intermediate_size.assign(c->layers.size(), 0);
  if (!c->Has(LayerType::kMlp)) return absl::OkStatus();
  const auto count = std::count(c->layers.begin(), c->layers.end(), LayerType::kMlp);
  std::vector<int64_t> sizes;
  const nlohmann::json* value = Find(model, "intermediate_size");
  if (value != nullptr && value->is_array()) {
    for (const nlohmann::json& item : *value) {
      sizes.push_back(item.is_number_integer() ? item.get<int64_t>() : 0);
    }
    if (static_cast<int64_t>(sizes.size()) != count) {
      return model.Refuse(absl::StrCat("intermediate_size lists ", sizes.size(), " sizes for ",
                                       count, " MLP layers"));
    }
  } else {
    ASSIGN_OR_RETURN(const int64_t size, model.Int("intermediate_size"));
    sizes.assign(static_cast<size_t>(count), size);
  }
  size_t next = 0;
  for (size_t l = 0; l < c->layers.size(); ++l) {
    if (c->layers[l] != LayerType::kMlp) continue;
    c->intermediate_size[l] = sizes[next++];
    if (c->intermediate_size[l] < 1 || c->intermediate_size[l] > (int64_t{1} << 20)) {
      return model.Refuse(absl::StrCat("intermediate_size of layer ", l, " is ",
                                       c->intermediate_size[l], ", must be in [1, 2^20]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const ModelConfig& model) {
  for (const char* key :
       {"attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"}) {
    if (model.BoolOr(key, false)) return model.Unsupported(key, "true", "false");
  }
  const struct {
    const char* key;
    const char* supported;
  } rows[] = {{"mamba_hidden_act", "silu"}, {"mlp_hidden_act", "relu2"}};
  for (const auto& row : rows) {
    const std::string act = model.StringOr(row.key, row.supported);
    if (act != row.supported) return model.Unsupported(row.key, act, row.supported);
  }
  const nlohmann::json* window = Find(model, "sliding_window");
  if (window != nullptr) return model.Unsupported("sliding_window", window->dump(), "null");
  return absl::OkStatus();
}

absl::Status CheckMultiple(const ModelConfig& model, const std::string& key, int64_t value,
                           const std::string& of, int64_t divisor) {
  if (value % divisor == 0) return absl::OkStatus();
  return model.Refuse(absl::StrCat(key, " ", value, " is no multiple of ", of, " ", divisor));
}

// Rope keys are dead in these files: there is no positional encoding.
absl::Status ReadHeads(const ModelConfig& model, Config* config) {
  AttentionConfig& c = config->attention;
  c.hidden_size = config->hidden_size;
  ASSIGN_OR_RETURN(c.num_q_heads, model.Int("num_attention_heads"));
  RETURN_IF_ERROR(model.CheckSize("num_attention_heads", c.num_q_heads));
  c.num_kv_heads = model.IntOr("num_key_value_heads", c.num_q_heads);
  RETURN_IF_ERROR(model.CheckSize("num_key_value_heads", c.num_kv_heads));
  const std::string dim = NameIn(model, {"head_dim", "attention_head_dim"});
  c.head_dim = model.IntOr(dim, c.hidden_size / c.num_q_heads);
  RETURN_IF_ERROR(model.CheckSize(dim, c.head_dim));
  return CheckMultiple(model, "num_attention_heads", c.num_q_heads, "num_key_value_heads",
                       c.num_kv_heads);
}

absl::Status ReadMamba(const ModelConfig& model, Config* c) {
  const std::string groups = NameIn(model, {"n_groups", "mamba_n_groups"});
  const std::string width = NameIn(model, {"conv_kernel", "mamba_d_conv"});
  ASSIGN_OR_RETURN(c->mamba_heads, model.Int("mamba_num_heads"));
  ASSIGN_OR_RETURN(c->mamba_head_dim, model.Int("mamba_head_dim"));
  ASSIGN_OR_RETURN(c->state_dim, model.Int("ssm_state_size"));
  ASSIGN_OR_RETURN(c->num_groups, model.Int(groups));
  c->conv_width = model.IntOr(width, 4);
  c->conv_bias = model.BoolOr(NameIn(model, {"use_conv_bias", "mamba_conv_bias"}), true);
  RETURN_IF_ERROR(model.CheckSize("mamba_num_heads", c->mamba_heads));
  RETURN_IF_ERROR(model.CheckSize("mamba_head_dim", c->mamba_head_dim));
  RETURN_IF_ERROR(model.CheckSize("ssm_state_size", c->state_dim));
  RETURN_IF_ERROR(model.CheckSize(groups, c->num_groups));
  RETURN_IF_ERROR(CheckMultiple(model, "mamba_num_heads", c->mamba_heads, groups, c->num_groups));
  if (c->conv_width < 2 || c->conv_width > 8) {
    return model.Refuse(absl::StrCat(width, " is ", c->conv_width, ", must be in [2, 8]"));
  }
  return absl::OkStatus();
}

absl::Status ReadMoe(const ModelConfig& model, Config* c) {
  ASSIGN_OR_RETURN(c->num_experts, model.Int("n_routed_experts"));
  ASSIGN_OR_RETURN(c->experts_per_token, model.Int("num_experts_per_tok"));
  ASSIGN_OR_RETURN(c->expert_size, model.Int("moe_intermediate_size"));
  RETURN_IF_ERROR(model.CheckSize("n_routed_experts", c->num_experts));
  RETURN_IF_ERROR(model.CheckSize("num_experts_per_tok", c->experts_per_token));
  RETURN_IF_ERROR(model.CheckSize("moe_intermediate_size", c->expert_size));
  const int64_t shared = model.IntOr("n_shared_experts", 1);
  if (shared < 0 || shared > 1) {
    return model.Unsupported("n_shared_experts", absl::StrCat(shared), "0, 1");
  }
  if (shared == 1) {
    ASSIGN_OR_RETURN(c->shared_size, model.Int("moe_shared_expert_intermediate_size"));
    RETURN_IF_ERROR(model.CheckSize("moe_shared_expert_intermediate_size", c->shared_size));
  }
  if (Find(model, "moe_latent_size") != nullptr) {
    ASSIGN_OR_RETURN(c->latent_size, model.Int("moe_latent_size"));
    RETURN_IF_ERROR(model.CheckSize("moe_latent_size", c->latent_size));
  }
  c->router_groups = model.IntOr("n_group", 1);
  c->router_top_groups = model.IntOr("topk_group", 1);
  c->normalize_weights = model.BoolOr("norm_topk_prob", true);
  c->routed_scale = static_cast<float>(model.NumberOr("routed_scaling_factor", 1.0));
  if (c->router_groups < 1 || c->num_experts % c->router_groups != 0) {
    return model.Refuse(absl::StrCat("n_group is ", c->router_groups, "; a divisor of ",
                                     c->num_experts, " experts is needed"));
  }
  if (c->router_top_groups < 1 || c->router_top_groups > c->router_groups) {
    return model.Refuse(absl::StrCat("topk_group is ", c->router_top_groups,
                                     ", must be in [1, n_group = ", c->router_groups, "]"));
  }
  const int64_t eligible = c->num_experts / c->router_groups * c->router_top_groups;
  if (c->experts_per_token > eligible) {
    return model.Refuse(absl::StrCat("num_experts_per_tok is ", c->experts_per_token, ", only ",
                                     eligible, " experts can be chosen"));
  }
  return absl::OkStatus();
}

}  // namespace

bool Config::Has(LayerType type) const {
  return std::find(layers.begin(), layers.end(), type) != layers.end();
}

absl::StatusOr<Config> ReadConfig(const ModelConfig& model) {
  RETURN_IF_ERROR(CheckSupported(model));
  Config c;
  c.vocab_size = model.vocab_size;
  c.hidden_size = model.hidden_size;
  c.tied_head = model.tie_word_embeddings;
  c.norm_eps = static_cast<float>(
      model.NumberOr(NameIn(model, {"layer_norm_epsilon", "rms_norm_eps"}), 1e-5));
  ASSIGN_OR_RETURN(c.layers, ReadLayers(model));
  if (c.Has(LayerType::kAttention)) RETURN_IF_ERROR(ReadHeads(model, &c));
  if (c.Has(LayerType::kMamba)) RETURN_IF_ERROR(ReadMamba(model, &c));
  if (c.Has(LayerType::kMoe)) RETURN_IF_ERROR(ReadMoe(model, &c));
  RETURN_IF_ERROR(ReadIntermediate(model, &c));
  return c;
}

VirtualShards MoeShards(const Config& c, int64_t k) {
  int64_t count = VirtualShardsOf(c.expert_size).count;
  if (c.shared_size > 0) count = std::min(count, VirtualShardsOf(c.shared_size).count);
  return {count, k / count};
}

TpLegality LegalTp(const Config& c) {
  TpRules rules;
  if (c.Has(LayerType::kAttention)) {
    rules.Split(c.attention.num_q_heads, "attention heads");
    rules.KvHeads(c.attention.num_kv_heads);
    rules.RowParallel("mixer.o_proj", c.attention.num_q_heads * c.attention.head_dim);
  }
  if (c.Has(LayerType::kMamba)) {
    rules.Split(c.num_groups, "Mamba groups (a group's norm stays on one rank)");
    rules.Split(c.mamba_heads, "Mamba heads");
    rules.RowParallel("mixer.out_proj", c.mamba_inner());
  }
  for (int64_t size : c.intermediate_size) {
    if (size > 0) rules.RowParallel("mixer.down_proj", size);
  }
  if (c.Has(LayerType::kMoe)) {
    rules.RowParallel("mixer.experts.down_proj", c.expert_size, MoeShards(c, c.expert_size));
    if (c.shared_size > 0) {
      rules.RowParallel("mixer.shared_experts.down_proj", c.shared_size,
                        MoeShards(c, c.shared_size));
    }
  }
  return rules.Evaluate();
}

}  // namespace nemotron_h
}  // namespace lockstep
