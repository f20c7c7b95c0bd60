// The two ends of a model under a vocabulary split: embedding rows in, logits out.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/comm/comm_group.h"
#include "kernels/runtime/exec_context.h"
#include "models/layers/linear.h"
#include "models/weights/weight_store.h"

namespace lockstep {

// Rows of the vocabulary that a rank holds: [begin, begin + rows) of `size`; every rank's slot of a
// gathered row is `rows_per_rank` wide, padding included.
struct VocabShard {
  int64_t size = 0;
  int64_t rows_per_rank = 0;
  int64_t begin = 0;
  int64_t rows = 0;

  static VocabShard Of(int64_t size, int rank, int world);
};

// The output projection [V, H], in whatever format the checkpoint has it.
class VocabHead {
 public:
  // With a tied head, `module` is the embedding's.
  static absl::StatusOr<VocabHead> Load(const LinearLoader& loader, const std::string& module,
                                        int64_t vocab_size, int64_t hidden_size);

  // logits F32 [R, rows_per_rank] of x [R, H]; columns beyond the rank's rows become -infinity.
  absl::Status Apply(ExecContext* ctx, ConstTensorView x, TensorView logits) const;
  const VocabShard& shard() const { return shard_; }
  const Linear& linear() const { return linear_; }

 private:
  VocabShard shard_;
  Linear linear_;  // unset when the rank holds no row
};

// Token embedding: a table of its own, or the rows of a tied head.
class VocabEmbedding {
 public:
  static absl::StatusOr<VocabEmbedding> Load(WeightStore* store, const std::string& tensor,
                                             int64_t vocab_size, int64_t hidden_size);
  // Reads rows of `head`, which must be unquantized and outlive this.
  static VocabEmbedding Tied(const VocabHead* head);

  // out [T, H] F32 or BF16: the row of each token, from the rank that owns it (numerics N4).
  absl::Status Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView tokens,
                     TensorView out) const;

 private:
  VocabShard shard_;
  TensorView table_;
  const VocabHead* tied_ = nullptr;
};

}  // namespace lockstep
