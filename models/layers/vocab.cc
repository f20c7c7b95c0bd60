#include "models/layers/vocab.h"

#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/embedding/embedding.h"
#include "kernels/rows/rows.h"

namespace lockstep {

VocabShard VocabShard::Of(int64_t size, int rank, int world) {
  VocabShard shard;
  shard.size = size;
  shard.rows_per_rank = ShardSpec::VocabRowsPerRank(size, world);
  shard.begin = rank * shard.rows_per_rank;
  shard.rows = ShardSpec::Vocab(size).LocalSize(rank, world);
  return shard;
}

absl::StatusOr<VocabHead> VocabHead::Load(const LinearLoader& loader, const std::string& module,
                                          int64_t vocab_size, int64_t hidden_size) {
  VocabHead head;
  head.shard_ = VocabShard::Of(vocab_size, loader.store->rank(), loader.store->world());
  if (head.shard_.rows == 0) {
    // The other ranks hold all rows; this one still uses the tensors.
    ASSIGN_OR_RETURN(const LinearScheme scheme,
                     loader.resolver->Resolve(module, vocab_size, hidden_size));
    for (const std::string& suffix :
         {scheme.codes, scheme.scale, scheme.global_scale, scheme.input_scale}) {
      if (!suffix.empty()) loader.store->UseIfPresent(module + "." + suffix);
    }
    return head;
  }
  ASSIGN_OR_RETURN(head.linear_, Linear::ColumnParallel(loader, module, "head", vocab_size,
                                                        hidden_size, ShardSpec::Vocab(vocab_size)));
  return head;
}

absl::Status VocabHead::Apply(ExecContext* ctx, ConstTensorView x, TensorView logits) const {
  if (shard_.rows > 0) {
    LinearInput input(x);
    RETURN_IF_ERROR(linear_.Apply(ctx, &input, logits.Columns(0, shard_.rows)));
  }
  if (shard_.rows == shard_.rows_per_rank) return absl::OkStatus();
  return Fill(ctx, -std::numeric_limits<float>::infinity(),
              logits.Columns(shard_.rows, shard_.rows_per_rank - shard_.rows));
}

absl::StatusOr<VocabEmbedding> VocabEmbedding::Load(WeightStore* store, const std::string& tensor,
                                                    int64_t vocab_size, int64_t hidden_size) {
  VocabEmbedding embedding;
  embedding.shard_ = VocabShard::Of(vocab_size, store->rank(), store->world());
  ASSIGN_OR_RETURN(embedding.table_, store->PlaceTensor(tensor, {vocab_size, hidden_size},
                                                        ShardSpec::Vocab(vocab_size), "embedding"));
  return embedding;
}

VocabEmbedding VocabEmbedding::Tied(const VocabHead* head) {
  VocabEmbedding embedding;
  embedding.shard_ = head->shard();
  embedding.tied_ = head;
  return embedding;
}

absl::Status VocabEmbedding::Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView tokens,
                                   TensorView out) const {
  const auto lookup = [&](TensorView rows) {
    // A rank without rows is asked for none: EmbeddingSelect takes nothing of what it gives.
    if (tied_ != nullptr && shard_.rows == 0) return Fill(ctx, 0.0f, rows);
    if (tied_ != nullptr) {
      return tied_->linear().resident().GatherRows(ctx, tokens, shard_.begin, rows);
    }
    return EmbeddingLookup(ctx, tokens, table_, shard_.begin, rows);
  };
  if (comm->size() == 1) return lookup(out);
  Workspace::Scope scope(ctx->workspace);
  TensorView local = ctx->workspace->Take(out.dtype, out.shape);
  RETURN_IF_ERROR(lookup(local));
  TensorView gathered = ctx->workspace->Take(out.dtype, {comm->size(), out.shape[0], out.shape[1]});
  RETURN_IF_ERROR(comm->AllGather(ctx, local, gathered));
  return EmbeddingSelect(ctx, tokens, gathered, shard_.rows_per_rank, out);
}

}  // namespace lockstep
