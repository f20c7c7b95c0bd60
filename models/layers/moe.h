// The mixture of experts as a block: router, experts, shared expert, one all-reduce.
//
// Every inner width is cut along the virtual shards of the layer, one V for all members (the
// smallest of theirs). Per virtual shard the weighted outputs of a token's experts add in the
// router's order, then the shared expert times its gate; the shards join as a tree over the rank,
// then over the ranks (numerics N7).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe/moe.h"
#include "models/layers/block.h"
#include "models/layers/gated_mlp.h"
#include "models/tp_legality.h"

namespace lockstep {

struct MoeConfig {
  int64_t hidden_size = 0;
  RouterParams router;
  int64_t expert_size = 0;  // inner width of an expert
  int64_t shared_size = 0;  // of the shared expert

  int64_t num_virtual_shards() const;  // V of the layer
};

// num_experts, num_experts_per_tok, norm_topk_prob, moe_intermediate_size and
// shared_expert_intermediate_size. Refuses impossible numbers.
absl::StatusOr<MoeConfig> ReadMoe(const ModelConfig& model);

void AddMoeRules(const MoeConfig& config, TpRules* rules);

class MoeBlock : public Block {
 public:
  // Tensors {name}gate, {name}shared_expert_gate, {name}shared_expert.{gate,up,down}_proj, and
  // {name}experts.{e}.{gate,up,down}_proj or the stacks {name}experts.{gate_up_proj,down_proj}.
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader,
                                                     const MoeConfig& config,
                                                     const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  // The rank's part of `sum` for some rows; they do not influence each other.
  absl::Status ApplyRows(ExecContext* ctx, ConstTensorView u, TensorView sum) const;

  MoeConfig config_;
  Linear gate_, shared_gate_;
  std::vector<GatedMlp> experts_;
  GatedMlp shared_;
};

}  // namespace lockstep
