// The table of linear methods.
#include "models/quant/linear_method.h"

#include "kernels/base/check.h"
#include "models/quant/formats.h"

namespace lockstep {
namespace {

struct Row {
  WeightScheme scheme;
  const LinearMethod& (*method)();
};
constexpr Row kMethods[] = {
    {WeightScheme::kBF16, Bf16LinearMethod},
    {WeightScheme::kNvfp4, Nvfp4LinearMethod},
    {WeightScheme::kFp8Tensor, Fp8TensorLinearMethod},
    {WeightScheme::kFp8Channel, Fp8ChannelLinearMethod},
    {WeightScheme::kFp8Block, Fp8BlockLinearMethod},
};

}  // namespace

const LinearMethod& LinearMethodFor(WeightScheme scheme) {
  for (const Row& row : kMethods) {
    if (row.scheme == scheme) return row.method();
  }
  CHECK(false) << "no linear method for scheme " << static_cast<int>(scheme) << " ";
  return Bf16LinearMethod();
}

}  // namespace lockstep
