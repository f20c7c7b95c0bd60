// Qwen3 dense: Llama with per-head norms of queries and keys. Math: models-*.md section 4; source
// of names and formulas: the transformers library.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace lockstep {
namespace qwen3 {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store);

}  // namespace qwen3
}  // namespace lockstep
