// The mixture of experts of NemotronH as a block of a decoder: sigmoid router with a correction
// bias for the choice alone, relu^2 experts, a shared expert that sees the hidden state, and, with
// a latent size, experts that work on fc1(x) and whose weighted sum goes through fc2. One
// all-reduce (numerics N7): of the sum of both, or of [routed latent | shared] side by side, fc2
// after it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe/moe.h"
#include "models/layers/block.h"
#include "models/nemotron_h/config.h"
#include "models/nemotron_h/relu2_mlp.h"

namespace lockstep {
namespace nemotron_h {

class MoeBlock : public Block {
 public:
  // Tensors {name}gate, {name}experts.{e}.{up,down}_proj, {name}shared_experts.{up,down}_proj and
  // {name}fc{1,2}_latent_proj.
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader,
                                                     const Config& config, const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  // This rank's part for some rows, which do not influence each other: F32 [rows, hidden], or
  // [rows, latent | hidden] with latent experts.
  absl::Status ApplyRows(ExecContext* ctx, ConstTensorView u, TensorView part) const;

  RouterParams router_;
  int64_t local_shards_ = 0, expert_width_ = 0, hidden_size_ = 0;
  bool latent_ = false;
  Linear gate_, fc1_, fc2_;
  TensorView bias_;
  std::vector<Relu2Mlp> experts_;
  std::unique_ptr<Relu2Mlp> shared_;  // or null
};

}  // namespace nemotron_h
}  // namespace lockstep
