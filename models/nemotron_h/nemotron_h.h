// NemotronH: one residual block per layer, either a Mamba2 mixer, attention without positional
// encoding, a relu^2 MLP or a mixture of experts; plain-weight norms. Math: models-*.md section 3
// of the design; source of names and formulas: the transformers library.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace lockstep {
namespace nemotron_h {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config);

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store);

}  // namespace nemotron_h
}  // namespace lockstep
