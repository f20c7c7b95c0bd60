// Model: a weight list, a cache spec and a forward pass. One implementation per architecture, found
// through the explicit table in model.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/cache_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/comm/comm_group.h"
#include "kernels/runtime/exec_context.h"
#include "models/layers/linear.h"
#include "models/model_config.h"
#include "models/weights/weight_store.h"

namespace lockstep {

struct ModelOptions {
  DType activation_dtype = DType::kBF16;  // F32 or BF16: dtype of the residual stream and of KV
  ActivationQuant activation_quant = ActivationQuant::kNone;
};

// What a rank keeps per sequence, besides weights.
struct CacheSpec {
  struct KvLayer {
    int64_t num_kv_heads = 0;  // of this rank
    int64_t head_dim = 0;
  };
  struct SlotTensor {
    std::string name;  // "layers.0.conv"
    DType dtype = DType::kF32;
    Shape shape;  // of one slot
    // Part of the state at a grid point: zeroed or restored when a sequence starts, snapshotted for
    // the prefix cache. The others need no initialization.
    bool snapshot = false;
  };
  DType kv_dtype = DType::kBF16;
  std::vector<KvLayer> kv_layers;
  std::vector<SlotTensor> slot_tensors;

  int64_t BytesPerKvBlock() const;
  int64_t BytesPerSlot() const;
  int64_t BytesPerSnapshot() const;
};

// The caches that the executor allocated for a CacheSpec, same order.
struct CacheViews {
  std::vector<KvCacheView> kv_layers;
  std::vector<TensorView> slot_tensors;  // [slots, shape...]
  std::vector<TensorView>
      snapshot_tensors;  // [snapshots, shape...]; null data where not snapshotted
};

// Legal tensor-parallel sizes among 1, 2, 4, 8, and why the others are not.
struct TpLegality {
  std::vector<int> legal;
  std::vector<std::string>
      reasons;  // one per refused size: "8: 4 linear key heads cannot be split 8 ways"
  // InvalidArgument listing the legal sizes and the reason, when `tp` is not among them.
  absl::Status Check(int tp) const;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual const CacheSpec& cache_spec() const = 0;
  virtual int64_t vocab_size() const = 0;
  // Rows of logits of one rank, padding included: ShardSpec::VocabRowsPerRank.
  virtual int64_t local_vocab_rows() const = 0;

  // The logits of batch.logit_rows: logits F32 [R, local_vocab_rows]; rows beyond the vocabulary
  // are -infinity. Launches the same ops for any number of tokens. All ranks of `comm` call it
  // together.
  virtual absl::Status Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                               const CacheViews& caches, TensorView logits) const = 0;

  // For evaluation: the linear of that module name (with any prefix that releases use), or nullptr.
  virtual const Linear* FindLinear(const std::string& module) const = 0;
};

// Which sizes are legal, from the config alone. Unimplemented names an unknown architecture and
// lists the known ones.
absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

// Loads the rank's shard through the store (which knows rank and world).
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const ModelConfig& config,
                                                 const ModelOptions& options,
                                                 const SchemeResolver& resolver,
                                                 WeightStore* store);

}  // namespace lockstep
