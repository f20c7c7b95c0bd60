// The Mamba2 mixer as a block of a decoder: in_proj, causal convolution, Mamba2 with its gated
// group norm, out_proj.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/mamba2/mamba2.h"
#include "models/layers/block.h"
#include "models/nemotron_h/config.h"

namespace lockstep {
namespace nemotron_h {

class Mamba2Block : public Block {
 public:
  // Tensors {name}{in_proj,conv1d,A_log,D,dt_bias,norm,out_proj}...
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader,
                                                     const Config& config, const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  Mamba2Params params_;
  Linear in_proj_, out_proj_;  // in_proj rows: z | x | B | C | dt
  TensorView conv_, conv_bias_;
  TensorView a_log_, d_, dt_bias_, norm_;
  size_t first_slot_tensor_ = 0;  // conv, state, ring_x, ring_b, ring_g
};

}  // namespace nemotron_h
}  // namespace lockstep
