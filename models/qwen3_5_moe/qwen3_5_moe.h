// Qwen3.5-MoE, text part: the mixers of Qwen3.5 with a mixture of experts in every layer. Math:
// models-*.md section 2; source of names and formulas: the transformers library.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace lockstep {
namespace qwen3_5_moe {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store);

}  // namespace qwen3_5_moe
}  // namespace lockstep
