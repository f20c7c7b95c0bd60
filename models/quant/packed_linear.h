// PackedLinear: the resident form that all formats share (a GemmWeight and the buffers behind it),
// and the builder with which a format fills it from the checkpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/runtime/device_buffer.h"
#include "models/quant/linear_method.h"

namespace lockstep {

// How a resident linear quantizes its input.
struct ActivationPlan {
  ActivationScheme scheme = ActivationScheme::kNone;
  ActGroups groups;
  float static_scale = 0.0f;  // kFp8Static
};

class PackedLinear : public ResidentLinear {
 public:
  PackedLinear(LinearShard shard, LinearScheme scheme, GemmWeight weight, ActivationPlan activation,
               std::vector<DeviceBuffer> buffers);

  absl::Status Apply(ExecContext* ctx, LinearInput* input, TensorView sum) const override;
  absl::Status ApplyShards(ExecContext* ctx, LinearInput* input, TensorView sums) const override;
  absl::StatusOr<LinearInput::Quantized> QuantizeInput(ExecContext* ctx,
                                                       LinearInput* input) const override;
  absl::Status GatherRows(ExecContext* ctx, ConstTensorView tokens, int64_t row_begin,
                          TensorView out) const override;

 private:
  GemmWeight weight_;
  ActivationPlan activation_;
  std::vector<DeviceBuffer> buffers_;
};

// InvalidArgument unless `shard` is a legal part of [n, k]: rows in range; whole virtual shards, a
// power of two of them; a multiple of `k_multiple` columns in each (of all K when not
// row-parallel).
absl::Status ValidateShard(const LinearShard& shard, int64_t k_multiple);

// Makes one PackedLinear: Create, then the Place calls of the format, then Finish.
class PackedLinearBuilder {
 public:
  static absl::StatusOr<PackedLinearBuilder> Create(const LinearScheme& scheme,
                                                    const LinearShard& shard,
                                                    ActivationQuant activation_quant,
                                                    WeightStore* store);

  GemmWeight& weight() { return weight_; }
  // The tensor `{module}.{suffix}` (of a stack: the stack), marked as used. NotFound names it.
  absl::StatusOr<const TensorInfo*> Use(const std::string& suffix);
  // Marks `{module}.{suffix}` as used if it is there, without reading it: what no computation uses
  // may hold anything.
  void Ignore(const std::string& suffix);

  // Packs the shard's rows and columns of a tensor stored as [n, k / k_per_unit] units of the
  // dtype's size, or as one such matrix of a stack. `is_bad(first byte of a unit)` marks corrupt
  // units: DataLoss names tensor and index.
  absl::StatusOr<const void*> PlaceUnits(const TensorInfo& tensor, int64_t k_per_unit,
                                         bool (*is_bad)(const uint8_t*), const char* bad_text);
  // One scale per row of the shard, F32 or BF16, stored as [n] or [n, 1]. `codes` is the placed FP8
  // tensor [n, k]: DataLoss names a zero scale whose codes are not zeros.
  absl::Status PlaceChannelScales(const TensorInfo& tensor, const TensorInfo& codes);
  // The 128 x 128 block scales that cover the shard, F32 or BF16, stored as [R, C] or [R, 1, C, 1];
  // `codes` as above.
  absl::Status PlaceBlockScales(const TensorInfo& tensor, const TensorInfo& codes);
  // A number stored as [] or [1], F32 or BF16; DataLoss unless finite and not negative.
  absl::StatusOr<float> PlaceScalar(const TensorInfo& tensor);

  absl::StatusOr<std::unique_ptr<ResidentLinear>> Finish();

 private:
  PackedLinearBuilder() = default;
  absl::StatusOr<uint8_t*> Allocate(const TensorInfo& tensor, int64_t bytes);
  absl::Status PlanActivation(ActivationQuant activation_quant);

  LinearScheme scheme_;
  LinearShard shard_;
  WeightStore* store_ = nullptr;
  GemmWeight weight_;
  ActivationPlan activation_;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace lockstep
