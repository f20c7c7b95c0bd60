// PackedLinear: the resident form that all formats share (a GemmWeight and the buffers behind it),
// and the builder with which a format fills it from the checkpoint.
#pragma once

#include <functional>
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

  // Packs the shard's rows and columns of a tensor of codes stored as [n, k], or as one such matrix
  // of a stack, in weight().format, for the store's device. `is_bad(first byte of a code)` marks
  // corrupt codes: DataLoss names tensor and index. FailedPrecondition when the device cannot have
  // the format or the shape.
  absl::StatusOr<const void*> PlaceCodes(const TensorInfo& tensor, bool (*is_bad)(const uint8_t*),
                                         const char* bad_text);
  // The same of E2M1 codes, stored as [n, k / 2] bytes, and their E4M3 scales [n, k / 16].
  absl::Status PlaceNvfp4(const TensorInfo& codes, const TensorInfo& scales,
                          bool (*is_bad_scale)(const uint8_t*), const char* bad_text);
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
  // Device memory with the bytes that `fill` writes on the host.
  absl::StatusOr<const void*> Place(const TensorInfo& tensor, int64_t bytes,
                                    int64_t checkpoint_bytes,
                                    const std::function<void(uint8_t*)>& fill);
  // The shard's part of each of its rows; a unit of the tensor's dtype holds k_per_unit columns.
  absl::StatusOr<std::vector<const uint8_t*>> RowsOf(const TensorInfo& tensor, int64_t k_per_unit,
                                                     bool (*is_bad)(const uint8_t*),
                                                     const char* bad_text) const;
  // FailedPrecondition when the weight cannot be packed for CUDA.
  absl::Status CheckFragments() const;
  int leaves() const { return static_cast<int>(weight_.shards * weight_.splits); }
  absl::Status PlanActivation(ActivationQuant activation_quant);

  LinearScheme scheme_;
  LinearShard shard_;
  WeightStore* store_ = nullptr;
  GemmWeight weight_;
  ActivationPlan activation_;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace lockstep
