// LinearMethod: how one weight format becomes resident on a rank and is applied. One implementation
// per WeightScheme, made by MakeLinearMethod from an explicit table; models only say "linear"
// (models/layers/linear.h) and never see a format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"
#include "models/quant/scheme.h"
#include "models/weights/shard_spec.h"
#include "models/weights/weight_store.h"

namespace lockstep {

// Whether activations are quantized as the checkpoint says (W8A8), or never (W8A16, W4A16).
enum class ActivationQuant { kNone, kCheckpoint };

// A linear that is stored as one of `count` unquantized matrices [n, k] in one tensor [count, n,
// k].
struct LinearStack {
  std::string tensor;  // full name
  int64_t index = 0;
  int64_t count = 0;  // 0: not stacked
};

// The part of a linear [n, k] that a rank holds.
struct LinearShard {
  std::string module;        // full name in the checkpoint
  std::string module_class;  // for accounting
  int64_t n = 0;             // full shape
  int64_t k = 0;
  std::vector<Range> rows;       // of n; ascending
  Range columns;                 // of k; for a row-parallel linear whole virtual shards
  bool row_parallel = false;     // input is sharded, output is a partial sum over ranks
  VirtualShards virtual_shards;  // of the full k; {1, k} when not row-parallel
  LinearStack stack;

  int64_t local_n() const {
    int64_t sum = 0;
    for (const Range& r : rows) sum += r.size;
    return sum;
  }
  int64_t local_shards() const { return row_parallel ? columns.size / virtual_shards.size : 1; }
};

// An input of linears, quantized at most once per way of quantizing and shared by all linears that
// read it. Lives for one call of a layer.
class LinearInput {
 public:
  // x [T, K] F32 or BF16. `workspace` scope of the caller covers the quantized copies.
  explicit LinearInput(ConstTensorView x) : x_(x) {}
  ConstTensorView x() const { return x_; }

  // One quantized form: E4M3 codes U8 [T, K] and F32 scales [T, groups].
  struct Quantized {
    ActivationScheme scheme = ActivationScheme::kNone;
    int64_t shard_size = 0;     // groups restart at every virtual shard
    int64_t group = 0;          // columns per scale; the last of a shard may have fewer
    float static_scale = 0.0f;  // kFp8Static
    TensorView codes;
    TensorView scales;
  };
  std::vector<Quantized>& quantized() { return quantized_; }

 private:
  ConstTensorView x_;
  std::vector<Quantized> quantized_;
};

// A resident linear: immutable after Prepare.
class ResidentLinear {
 public:
  virtual ~ResidentLinear() = default;
  const LinearShard& shard() const { return shard_; }
  const LinearScheme& scheme() const { return scheme_; }

  // sum[t, o] over the rank's columns, [T, local_n]: scales applied per virtual shard or block
  // before the tree over the rank's virtual shards (numerics N2). F32: not rounded; BF16: rounded
  // once. A quantized form of the input stays in the workspace until the caller's scope ends.
  virtual absl::Status Apply(ExecContext* ctx, LinearInput* input, TensorView sum) const = 0;

  // The same sums of each local virtual shard, not joined: F32 [local_shards, T, local_n], whose
  // row stride (between shards) is honoured.
  virtual absl::Status ApplyShards(ExecContext* ctx, LinearInput* input, TensorView sums) const = 0;

  // For evaluation: what Apply makes of `input` before the product. Scales [T, groups of this
  // rank]. FailedPrecondition when this linear does not quantize its input.
  virtual absl::StatusOr<LinearInput::Quantized> QuantizeInput(ExecContext* ctx,
                                                               LinearInput* input) const = 0;

  // out[t] = row (tokens[t] - row_begin) of the weight where this rank holds it, zeros elsewhere: a
  // tied head serves as the embedding. FailedPrecondition for quantized weights. tokens I32 [T];
  // out [T, k].
  virtual absl::Status GatherRows(ExecContext* ctx, ConstTensorView tokens, int64_t row_begin,
                                  TensorView out) const = 0;

 protected:
  ResidentLinear(LinearShard shard, LinearScheme scheme)
      : shard_(std::move(shard)), scheme_(std::move(scheme)) {}

 private:
  LinearShard shard_;
  LinearScheme scheme_;
};

class LinearMethod {
 public:
  virtual ~LinearMethod() = default;
  // InvalidArgument when the format cannot be cut like this (a column border inside 16 of K, say).
  virtual absl::Status Validate(const LinearScheme& scheme, const LinearShard& shard) const = 0;
  // Places the shard through the store, in the stored form. Corrupt values (NaN codes, scales that
  // are NaN, infinite or negative, a zero scale of weights that are not zeros) are DataLoss naming
  // tensor and index. Scales of activations that this way of running does not quantize
  // (input_scale, input_global_scale) are not read: a file holds there whatever a module that
  // calibration never reached was left with.
  virtual absl::StatusOr<std::unique_ptr<ResidentLinear>> Prepare(const LinearScheme& scheme,
                                                                  const LinearShard& shard,
                                                                  ActivationQuant activation_quant,
                                                                  WeightStore* store) const = 0;
};

const LinearMethod& LinearMethodFor(WeightScheme scheme);

}  // namespace lockstep
