// down(relu(up x)^2): the dense MLP, an expert and a shared expert of NemotronH.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "models/layers/block.h"

namespace lockstep {
namespace nemotron_h {

// Widths, and how the inner one is cut: `shards` are the virtual shards of down_proj's K.
struct Relu2MlpConfig {
  int64_t outer_size = 0;
  int64_t inner_size = 0;
  VirtualShards shards;
  std::string module_class;  // for accounting
};

class Relu2Mlp {
 public:
  // Tensors {name}{up,down}_proj.
  static absl::StatusOr<Relu2Mlp> Load(const LinearLoader& loader, const Relu2MlpConfig& config,
                                       const std::string& name);

  // sum F32 [T, outer]: complete on every rank, or this rank's part when `comm` is null. x
  // [T, outer] F32 or BF16.
  absl::Status Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView x, TensorView sum) const;
  // sums F32 [local virtual shards, T, outer]: the rank's partial sums (Linear::ApplyShards).
  absl::Status ApplyShards(ExecContext* ctx, ConstTensorView x, TensorView sums) const;

  void ForEachLinear(const std::function<void(const Linear&)>& visit) const;

 private:
  // act [T, local inner width] in x's dtype.
  absl::StatusOr<TensorView> Activate(ExecContext* ctx, ConstTensorView x) const;

  Linear up_proj_, down_proj_;
};

// A dense MLP as a block of a decoder.
class Relu2MlpBlock : public Block {
 public:
  static absl::StatusOr<std::unique_ptr<Block>> Load(const BlockLoader& loader, int64_t hidden_size,
                                                     int64_t inner_size, const std::string& name);

  absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                     const CacheViews& caches, ConstTensorView u, TensorView sum) const override;
  void ForEachLinear(const std::function<void(const Linear&)>& visit) const override;

 private:
  Relu2Mlp mlp_;
};

}  // namespace nemotron_h
}  // namespace lockstep
