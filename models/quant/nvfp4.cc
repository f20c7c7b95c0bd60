// NVFP4 linears, weight-only: E2M1 codes, an E4M3 scale per 16 of K, an F32 global.
// Layout of the file and the two conventions of the global: models-*.md section 5.2.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "models/quant/formats.h"
#include "models/quant/packed_linear.h"

namespace lockstep {
namespace {

constexpr int64_t kBlock = 16;

bool IsBadScale(const uint8_t* p) { return IsE4M3Nan(*p) || *p > 0x80; }

// The multiplier of the sums. A zero global is corrupt unless the tensor holds zeros only.
absl::StatusOr<float> Multiplier(const LinearScheme& scheme, const TensorInfo& global, float stored,
                                 const TensorInfo& codes) {
  if (stored == 0.0f) {
    const bool zeros = std::all_of(codes.data, codes.data + codes.bytes,
                                   [](uint8_t byte) { return (byte & 0x77) == 0; });
    if (zeros) return 0.0f;
    return absl::DataLossError(absl::StrCat("tensor ", global.name, " in ", global.file,
                                            ": the global scale is zero but ", codes.name,
                                            " is not; the file is corrupt, get it again"));
  }
  const float multiplier = scheme.global_is_divisor ? 1.0f / stored : stored;
  if (std::isfinite(multiplier)) return multiplier;
  return absl::DataLossError(absl::StrCat("tensor ", global.name, " in ", global.file,
                                          ": the global divisor ", stored, " has no reciprocal"));
}

class Nvfp4Method : public LinearMethod {
 public:
  absl::Status Validate(const LinearScheme&, const LinearShard& shard) const override {
    return ValidateShard(shard, kBlock);
  }

  absl::StatusOr<std::unique_ptr<ResidentLinear>> Prepare(const LinearScheme& scheme,
                                                          const LinearShard& shard,
                                                          ActivationQuant activation_quant,
                                                          WeightStore* store) const override {
    RETURN_IF_ERROR(Validate(scheme, shard));
    ASSIGN_OR_RETURN(PackedLinearBuilder builder,
                     PackedLinearBuilder::Create(scheme, shard, activation_quant, store));
    ASSIGN_OR_RETURN(const TensorInfo* codes, builder.Use(scheme.codes));
    ASSIGN_OR_RETURN(const TensorInfo* scales, builder.Use(scheme.scale));
    ASSIGN_OR_RETURN(const TensorInfo* global, builder.Use(scheme.global_scale));
    if (codes->dtype != DType::kU8 || scales->dtype != DType::kE4M3) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors ", codes->name, " and ", scales->name, " are ", codes->ToString(),
                       " and ", scales->ToString(), ", expected U8 and F8_E4M3"));
    }
    GemmWeight& weight = builder.weight();
    weight.format = WeightFormat::kNvfp4;
    weight.scaling = WeightScaling::kTensor;
    RETURN_IF_ERROR(
        builder.PlaceNvfp4(*codes, *scales, IsBadScale, "a NaN or a negative block scale"));
    ASSIGN_OR_RETURN(const float stored, builder.PlaceScalar(*global));
    ASSIGN_OR_RETURN(weight.tensor_scale, Multiplier(scheme, *global, stored, *codes));
    return builder.Finish();
  }
};

}  // namespace

const LinearMethod& Nvfp4LinearMethod() {
  static const Nvfp4Method method;
  return method;
}

}  // namespace lockstep
