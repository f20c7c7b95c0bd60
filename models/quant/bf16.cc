// Unquantized linears: BF16 (or F32) weights as stored.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/quant/formats.h"
#include "models/quant/packed_linear.h"

namespace lockstep {
namespace {

bool IsBadF32(const uint8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return (bits & 0x7f800000u) == 0x7f800000u;
}

bool IsBadBF16(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return (bits & 0x7f80u) == 0x7f80u;
}

class Bf16Method : public LinearMethod {
 public:
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
    ASSIGN_OR_RETURN(const TensorInfo* weight, builder.Use(scheme.codes));
    if (weight->dtype != DType::kBF16 && weight->dtype != DType::kF32) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", weight->name, " is ",
                                                     weight->ToString(), ", expected BF16 or F32"));
    }
    const bool bf16 = weight->dtype == DType::kBF16;
    builder.weight().format = bf16 ? WeightFormat::kBF16 : WeightFormat::kF32;
    ASSIGN_OR_RETURN(
        builder.weight().codes,
        builder.PlaceCodes(*weight, bf16 ? IsBadBF16 : IsBadF32, "a weight that is not finite"));
    return builder.Finish();
  }
};

}  // namespace

const LinearMethod& Bf16LinearMethod() {
  static const Bf16Method method;
  return method;
}

}  // namespace lockstep
