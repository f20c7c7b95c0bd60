// Qwen3.5 dense, text part: gated full attention and gated delta net layers, SwiGLU, zero-centred
// norms. Math: models-*.md section 1 of the design; source of names and formulas: the transformers
// library.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace lockstep {
namespace qwen3_5 {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store);

}  // namespace qwen3_5
}  // namespace lockstep
