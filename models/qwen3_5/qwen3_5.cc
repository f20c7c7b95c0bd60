#include "models/qwen3_5/qwen3_5.h"

#include <string>

#include "kernels/base/status_macros.h"
#include "models/decoder.h"
#include "models/layers/gated_mlp.h"
#include "models/qwen3_5/config.h"
#include "models/qwen3_5/mixers.h"

namespace lockstep {
namespace qwen3_5 {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  TpRules rules;
  AddMixerRules(c.mixers, &rules);
  AddGatedMlpRules(c.intermediate_size, &rules);
  return rules.Evaluate();
}

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  ASSIGN_OR_RETURN(DecoderBuilder builder, DecoderBuilder::Create(DecoderConfig::Of(config, 1.0f),
                                                                  options, resolver, store));
  const auto load_mlp = [&](const BlockLoader& loader, const std::string& name) {
    return GatedMlpBlock::Load(loader, config.hidden_size, c.intermediate_size, name);
  };
  RETURN_IF_ERROR(AddLayers(c.mixers, load_mlp, &builder));
  return builder.Finish();
}

}  // namespace qwen3_5
}  // namespace lockstep
