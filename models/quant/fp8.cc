// FP8 linears: E4M3 codes with one scale per tensor, per row, or per 128 x 128 block.
// Flavours and their tensors: models-*.md section 5.3.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "models/quant/formats.h"
#include "models/quant/packed_linear.h"

namespace lockstep {
namespace {

bool IsNan(const uint8_t* p) { return IsE4M3Nan(*p); }

absl::Status PlaceTensorScale(const TensorInfo& codes, const TensorInfo& scale,
                              PackedLinearBuilder* builder) {
  builder->weight().scaling = WeightScaling::kTensor;
  ASSIGN_OR_RETURN(builder->weight().tensor_scale, builder->PlaceScalar(scale));
  if (builder->weight().tensor_scale != 0.0f) return absl::OkStatus();
  const bool zeros = std::all_of(codes.data, codes.data + codes.bytes,
                                 [](uint8_t byte) { return (byte & 0x7f) == 0; });
  if (zeros) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("tensor ", scale.name, " in ", scale.file,
                                          ": the scale is zero but ", codes.name,
                                          " is not; the file is corrupt, get it again"));
}

class Fp8Method : public LinearMethod {
 public:
  explicit Fp8Method(WeightScaling scaling) : scaling_(scaling) {}

  absl::Status Validate(const LinearScheme&, const LinearShard& shard) const override {
    return ValidateShard(shard, 1);
  }

  absl::StatusOr<std::unique_ptr<ResidentLinear>> Prepare(const LinearScheme& scheme,
                                                          const LinearShard& shard,
                                                          ActivationQuant activation_quant,
                                                          WeightStore* store) const override {
    RETURN_IF_ERROR(Validate(scheme, shard));
    ASSIGN_OR_RETURN(PackedLinearBuilder builder,
                     PackedLinearBuilder::Create(scheme, shard, activation_quant, store));
    ASSIGN_OR_RETURN(const TensorInfo* codes, builder.Use(scheme.codes));
    ASSIGN_OR_RETURN(const TensorInfo* scale, builder.Use(scheme.scale));
    if (codes->dtype != DType::kE4M3) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", codes->name, " is ", codes->ToString(), ", expected F8_E4M3"));
    }
    builder.weight().format = WeightFormat::kFp8;
    ASSIGN_OR_RETURN(builder.weight().codes, builder.PlaceCodes(*codes, IsNan, "a NaN code"));
    if (scaling_ == WeightScaling::kTensor) {
      RETURN_IF_ERROR(PlaceTensorScale(*codes, *scale, &builder));
    } else if (scaling_ == WeightScaling::kChannel) {
      RETURN_IF_ERROR(builder.PlaceChannelScales(*scale, *codes));
    } else {
      RETURN_IF_ERROR(builder.PlaceBlockScales(*scale, *codes));
    }
    return builder.Finish();
  }

 private:
  WeightScaling scaling_;
};

}  // namespace

const LinearMethod& Fp8TensorLinearMethod() {
  static const Fp8Method method(WeightScaling::kTensor);
  return method;
}
const LinearMethod& Fp8ChannelLinearMethod() {
  static const Fp8Method method(WeightScaling::kChannel);
  return method;
}
const LinearMethod& Fp8BlockLinearMethod() {
  static const Fp8Method method(WeightScaling::kBlock128);
  return method;
}

}  // namespace lockstep
