// Full attention over the paged cache, with grouped query heads: plain (Llama), with per-head norms
// of queries and keys (Qwen3), with an output gate (Qwen3.5).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/attention/attention.h"
#include "models/layers/block.h"
#include "models/layers/rope.h"
#include "models/tp_legality.h"

namespace lockstep {

struct AttentionConfig {
  int64_t hidden_size = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  RopeConfig rope;
  bool output_gate = false;  // q_proj rows are, per head, [q | gate]
  bool qk_norm = false;
  float norm_eps = 1e-6f;
  float norm_weight_offset = 0.0f;
};

// Heads, head_dim (hidden / heads where absent), rope and eps; `partial_rotary` where the config
// has no partial_rotary_factor. Refuses attention biases and impossible numbers.
absl::StatusOr<AttentionConfig> ReadAttention(const ModelConfig& model, double partial_rotary);

void AddAttentionRules(const AttentionConfig& config, TpRules* rules);

class AttentionBlock : public Block {
 public:
  // Tensors {name}{q,k,v,o}_proj and, with qk_norm, {name}{q,k}_norm.weight. `rope` is null with a
  // rotary width of 0.
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader,
                                                     const AttentionConfig& config,
                                                     std::shared_ptr<const RopeTable> rope,
                                                     const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  AttentionParams params_;
  std::shared_ptr<const RopeTable> rope_;
  Linear q_proj_, k_proj_, v_proj_, o_proj_;
  TensorView q_norm_, k_norm_;
  size_t kv_layer_ = 0;  // in CacheSpec::kv_layers
};

}  // namespace lockstep
