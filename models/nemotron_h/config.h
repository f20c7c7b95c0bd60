// NemotronH: the numbers of config.json that the architecture needs, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "models/layers/attention.h"
#include "models/model_config.h"
#include "models/tp_legality.h"

namespace lockstep {
namespace nemotron_h {

// One layer is one residual block.
enum class LayerType { kMamba, kAttention, kMlp, kMoe };

struct Config {
  int64_t vocab_size = 0, hidden_size = 0;
  float norm_eps = 1e-5f;
  bool tied_head = false;
  std::vector<LayerType> layers;
  std::vector<int64_t> intermediate_size;  // of each layer; 0 where it is no MLP
  // Attention: no positional encoding.
  AttentionConfig attention;
  // Mamba2; the inner width is mamba_heads * mamba_head_dim, whatever `expand` says.
  int64_t mamba_heads = 0, mamba_head_dim = 0, state_dim = 0, num_groups = 0, conv_width = 0;
  bool conv_bias = true;
  // Experts; numbers are 0 without a kMoe layer.
  int64_t num_experts = 0, experts_per_token = 0, expert_size = 0;
  int64_t shared_size = 0;  // 0: no shared expert
  int64_t latent_size = 0;  // 0: experts see the hidden state
  int64_t router_groups = 1, router_top_groups = 1;
  bool normalize_weights = true;
  float routed_scale = 1.0f;

  int64_t mamba_inner() const { return mamba_heads * mamba_head_dim; }
  bool Has(LayerType type) const;
};

// InvalidArgument or Unimplemented, naming the key, what it holds and what is possible. Keys have
// aliases in old files (mamba_n_groups, mamba_d_conv, mamba_conv_bias); time_step_* and expand are
// not read: dt has no limits.
absl::StatusOr<Config> ReadConfig(const ModelConfig& model);

// The virtual shards of `k` (an inner width of the experts): one count for all members of a layer,
// the smallest of theirs (numerics N7).
VirtualShards MoeShards(const Config& config, int64_t k);

TpLegality LegalTp(const Config& config);

}  // namespace nemotron_h
}  // namespace lockstep
