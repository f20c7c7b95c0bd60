// The gated delta net as a block: projections, causal convolution, recurrence, gated norm.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/delta_net/delta_net.h"
#include "models/layers/block.h"
#include "models/tp_legality.h"

namespace lockstep {

struct DeltaNetConfig {
  int64_t hidden_size = 0;
  int64_t conv_width = 4;
  DeltaNetParams params;  // of all ranks together
};

// The linear_* keys and output_gate_type. Refuses impossible numbers.
absl::StatusOr<DeltaNetConfig> ReadDeltaNet(const ModelConfig& model);

void AddDeltaNetRules(const DeltaNetConfig& config, TpRules* rules);

class DeltaNetBlock : public Block {
 public:
  // Tensors {name}in_proj_{qkv,z,b,a}, {name}out_proj, {name}conv1d.weight, {name}A_log,
  // {name}dt_bias, {name}norm.weight.
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader,
                                                     const DeltaNetConfig& config,
                                                     const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  absl::Status LoadLinears(const LinearLoader& loader, const DeltaNetConfig& config,
                           const std::string& name, const ShardSpec& qkv);
  void AddCaches(const BlockLoader& loader, const std::string& name, int64_t conv_width);

  DeltaNetParams params_;  // of this rank
  Linear in_proj_qkv_, in_proj_z_, in_proj_b_, in_proj_a_, out_proj_;
  TensorView conv_, a_log_, dt_bias_, norm_;
  size_t first_slot_tensor_ = 0;  // conv, state, ring_k, ring_d, ring_g
};

}  // namespace lockstep
