// Llama (SmolLM2 too): full attention with rotary embedding (llama3 scaling included), SwiGLU,
// plain norms. Math: models-*.md section 4; source of names and formulas: the transformers library.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace lockstep {
namespace llama {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store);

}  // namespace llama
}  // namespace lockstep
