// down(silu(gate x) * up x): the dense MLP, an expert, and a shared expert.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "models/layers/block.h"
#include "models/tp_legality.h"

namespace lockstep {

// What shape a gated MLP has and how its inner width is cut: `shards` are the virtual shards of
// down_proj's K.
struct GatedMlpConfig {
  int64_t hidden_size = 0;
  int64_t inner_size = 0;
  VirtualShards shards;
  std::string module_class;  // for accounting
};

class GatedMlp {
 public:
  // Tensors {name}{gate,up,down}_proj.
  static absl::StatusOr<GatedMlp> Load(const LinearLoader& loader, const GatedMlpConfig& config,
                                       const std::string& name);
  // Matrix `index` of {stack_name}gate_up_proj [count, 2 I, H] (rows of gate first) and of
  // {stack_name}down_proj [count, H, I], both unquantized. `name` names the linears.
  static absl::StatusOr<GatedMlp> LoadStacked(const LinearLoader& loader,
                                              const GatedMlpConfig& config,
                                              const std::string& stack_name, int64_t index,
                                              int64_t count, const std::string& name);

  // sum F32 [T, H], complete on every rank. x [T, H] F32 or BF16.
  absl::Status Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView x, TensorView sum) const;
  // sums F32 [local virtual shards, T, H]: the rank's partial sums (Linear::ApplyShards).
  absl::Status ApplyShards(ExecContext* ctx, ConstTensorView x, TensorView sums) const;

  const Linear& down_proj() const { return down_proj_; }
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const;

 private:
  // act [T, local inner width] in x's dtype.
  absl::StatusOr<TensorView> Activate(ExecContext* ctx, ConstTensorView x) const;

  Linear gate_proj_, up_proj_, down_proj_;
};

// A dense MLP as a block of a decoder.
class GatedMlpBlock : public Block {
 public:
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader, int64_t hidden_size,
                                                     int64_t inner_size, const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  GatedMlp mlp_;
};

// intermediate_size, with hidden_act and mlp_bias checked.
absl::StatusOr<int64_t> ReadGatedMlp(const ModelConfig& model);
// Unimplemented unless hidden_act is silu and there are no MLP biases.
absl::Status CheckSiluMlp(const ModelConfig& model);

void AddGatedMlpRules(int64_t inner_size, TpRules* rules);

}  // namespace lockstep
