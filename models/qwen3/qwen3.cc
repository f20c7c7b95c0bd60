#include "models/qwen3/qwen3.h"

#include "kernels/base/status_macros.h"
#include "models/dense.h"

namespace lockstep {
namespace qwen3 {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  ASSIGN_OR_RETURN(const DenseConfig c, ReadDense(config));
  return LegalDenseTp(c);
}

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store) {
  ASSIGN_OR_RETURN(DenseConfig c, ReadDense(config));
  c.attention.qk_norm = true;
  return LoadDense(c, config, options, resolver, store);
}

}  // namespace qwen3
}  // namespace lockstep
