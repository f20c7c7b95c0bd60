#include "worker/fake_model.h"

#include <limits>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "models/weights/shard_spec.h"

namespace lockstep {
namespace {

constexpr int64_t kVirtualShards = 8;

int32_t I32(const ConstTensorView& view, int64_t i) {
  return static_cast<const int32_t*>(view.data)[i];
}

// What one virtual shard adds to a row's activation: of many magnitudes, so that the order of
// additions shows in the bits.
float Partial(uint64_t hash, int64_t shard) {
  const uint64_t h = Mix64(hash + static_cast<uint64_t>(shard) * 77);
  return static_cast<float>(static_cast<int32_t>(h)) * static_cast<float>(1 << (h >> 60));
}

float Tree(uint64_t hash, int64_t first, int64_t count) {
  if (count == 1) return Partial(hash, first);
  return Tree(hash, first, count / 2) + Tree(hash, first + count / 2, count / 2);
}

}  // namespace

FakeModel::FakeModel(FakeModelOptions options)
    : options_(std::move(options)),
      local_rows_(ShardSpec::VocabRowsPerRank(options_.vocab_size, options_.world)) {
  spec_.kv_dtype = DType::kF32;
  spec_.kv_layers.push_back({1, 1});
  spec_.slot_tensors.push_back({"grid_hash", DType::kI64, Shape{1}, true});
  spec_.slot_tensors.push_back({"scratch", DType::kF32, Shape{2, 2}, false});
}

void FakeModel::Recur(const ForwardBatch& batch, const CacheViews& caches, uint64_t* hashes) const {
  const int64_t columns = batch.block_table.shape[1];
  int64_t snapshot = 0;
  for (int64_t b = 0; b < batch.num_sequences; ++b) {
    const int32_t slot = I32(batch.slots, b);
    const int64_t start = I32(batch.start_positions, b);
    const int64_t first_row = I32(batch.row_offsets, b);
    const int64_t rows = I32(batch.row_offsets, b + 1) - first_row;
    const auto cell = [&](int64_t position) {
      const int32_t block = I32(batch.block_table, b * columns + position / kGrid);
      CHECK_GE(block, 0);
      return static_cast<float*>(caches.kv_layers[0].keys.data) + block * kGrid + position % kGrid;
    };
    int64_t* grid = caches.slot_tensors[0].row<int64_t>(slot);
    const auto fold = [&](uint64_t hash, int64_t position) {
      return Fold64(hash, static_cast<uint64_t>(*cell(position)) + 1);
    };
    for (int64_t i = 0; i < rows; ++i) {
      *cell(start + i) = static_cast<float>(I32(batch.tokens, first_row + i));
    }
    uint64_t hash = static_cast<uint64_t>(*grid);
    uint64_t all = 0;
    for (int64_t p = 0; p < start; ++p) {
      all += Mix64(static_cast<uint64_t>(p) << 32 | static_cast<uint64_t>(*cell(p)));
      if (p >= start / kGrid * kGrid) hash = fold(hash, p);
    }
    for (int64_t p = start; p < start + rows; ++p) {
      hash = fold(hash, p);
      all += Mix64(static_cast<uint64_t>(p) << 32 | static_cast<uint64_t>(*cell(p)));
      hashes[first_row + p - start] = Fold64(hash, all);
      if ((p + 1) % kGrid != 0) continue;
      *grid = static_cast<int64_t>(hash);
      if (snapshot < batch.num_snapshots && I32(batch.snapshot_sequence, snapshot) == b &&
          I32(batch.snapshot_position, snapshot) == p + 1) {
        *caches.snapshot_tensors[0].row<int64_t>(I32(batch.snapshot_slot, snapshot++)) = *grid;
      }
    }
  }
  CHECK_EQ(snapshot, batch.num_snapshots);
}

absl::Status FakeModel::Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                                const CacheViews& caches, TensorView logits) const {
  Workspace::Scope scope(ctx->workspace);
  TensorView hashes = ctx->workspace->Take(DType::kI64, {batch.num_tokens});
  TensorView activation = ctx->workspace->Take(DType::kF32, {batch.num_tokens});
  const int64_t shards = kVirtualShards / options_.world;
  if (ctx->dry_run() && options_.on_dry_run) options_.on_dry_run();
  if (!ctx->dry_run()) {
    if (options_.on_forward) options_.on_forward();
    if (options_.fail) RETURN_IF_ERROR(options_.fail());
    uint64_t* h = reinterpret_cast<uint64_t*>(hashes.row<int64_t>(0));
    Recur(batch, caches, h);
    for (int64_t t = 0; t < batch.num_tokens; ++t) {
      activation.row<float>(0)[t] = Tree(h[t], options_.rank * shards, shards);
    }
  }
  RETURN_IF_ERROR(comm->AllReduce(ctx, activation));
  if (ctx->dry_run()) return absl::OkStatus();
  for (int64_t r = 0; r < batch.num_logits; ++r) {
    const int64_t row = I32(batch.logit_rows, r);
    const uint64_t key =
        Fold64(static_cast<uint64_t>(hashes.row<int64_t>(0)[row]),
               HashBytes(absl::string_view(
                   reinterpret_cast<const char*>(activation.row<float>(0) + row), 4)));
    float* out = logits.row<float>(r);
    for (int64_t c = 0; c < local_rows_; ++c) {
      const int64_t id = options_.rank * local_rows_ + c;
      out[c] = static_cast<float>(Mix64(key + static_cast<uint64_t>(id)) >> 40) * 1e-6f;
      if (id >= options_.vocab_size) out[c] = -std::numeric_limits<float>::infinity();
      if (id == 0 && I32(batch.tokens, row) == options_.nan_token) {
        out[c] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
