// Qwen3.5 (text part): the numbers of config.json that the architecture needs, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/delta_net/delta_net.h"
#include "models/model.h"
#include "models/model_config.h"

namespace lockstep {
namespace qwen3_5 {

enum class LayerType { kFullAttention, kLinearAttention };

struct Config {
  int64_t vocab_size = 0, hidden_size = 0, num_layers = 0, intermediate_size = 0;
  float norm_eps = 1e-6f;
  bool tied_head = false;
  std::vector<LayerType> layers;
  // Full attention.
  int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0, rotary_dim = 0;
  double rope_theta = 0;
  bool output_gate = true;
  // Gated delta net.
  int64_t num_k_heads = 0, num_v_heads = 0, k_dim = 0, v_dim = 0, conv_width = 0;
  OutputGate gdn_gate = OutputGate::kSilu;
};

// InvalidArgument or Unimplemented, naming the key, what it holds and what is possible.
absl::StatusOr<Config> ReadConfig(const ModelConfig& model);

TpLegality LegalTp(const Config& config);

}  // namespace qwen3_5
}  // namespace lockstep
