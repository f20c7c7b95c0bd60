// FakeModel: a tiny deterministic model for tests. Its logits depend on every token of the
// sequence, through a KV layer (all positions, read through the block table) and through a
// recurrent slot state on the 64-token grid (snapshotted); they do not depend on batch, chunking or
// the number of ranks. It runs one all-reduce per step. Thread compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "models/model.h"

namespace lockstep {

struct FakeModelOptions {
  int64_t vocab_size = 300;
  int rank = 0;
  int world = 1;
  int32_t nan_token = -1;            // a row of this token has a NaN among its logits
  std::function<void()> on_forward;  // called by every Forward that is no dry run
  std::function<void()> on_dry_run;
  std::function<absl::Status()> fail;  // what every Forward that is no dry run begins with
};

class FakeModel : public Model {
 public:
  explicit FakeModel(FakeModelOptions options);

  const CacheSpec& cache_spec() const override { return spec_; }
  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t local_vocab_rows() const override { return local_rows_; }
  absl::Status Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                       const CacheViews& caches, TensorView logits) const override;
  const Linear* FindLinear(const std::string&) const override { return nullptr; }

 private:
  // The hashes of all rows: the state after each token.
  void Recur(const ForwardBatch& batch, const CacheViews& caches, uint64_t* hashes) const;

  const FakeModelOptions options_;
  int64_t local_rows_ = 0;
  CacheSpec spec_;
};

}  // namespace lockstep
