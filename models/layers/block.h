// Block: what stands between two norms of a decoder (attention, a recurrent mixer, an MLP). Reads
// the normalized residual stream and gives what is added to it. Immutable after loading.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "models/model.h"

namespace lockstep {

class Block {
 public:
  virtual ~Block() = default;

  // u [T, H] in the activations' dtype; sum F32 [T, H], complete on every rank. All ranks of `comm`
  // call it together. Temporaries stay in the workspace until the caller's scope ends.
  virtual absl::Status Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                             const CacheViews& caches, ConstTensorView u, TensorView sum) const = 0;

  // Every linear of the block, for Model::FindLinear.
  virtual void ForEachLinear(const std::function<void(const Linear&)>& visit) const = 0;
};

// What loading a block needs.
struct BlockLoader {
  LinearLoader linear;
  DType activation_dtype = DType::kBF16;
  CacheSpec* cache_spec = nullptr;  // blocks append what they keep per sequence
};

}  // namespace lockstep
