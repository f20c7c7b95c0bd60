#include "models/qwen3_5_moe/qwen3_5_moe.h"

#include <string>

#include "kernels/base/status_macros.h"
#include "models/decoder.h"
#include "models/layers/moe.h"
#include "models/qwen3_5/config.h"
#include "models/qwen3_5/mixers.h"

namespace lockstep {
namespace qwen3_5_moe {

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  ASSIGN_OR_RETURN(const qwen3_5::MixerConfig mixers, qwen3_5::ReadMixers(config));
  ASSIGN_OR_RETURN(const MoeConfig moe, ReadMoe(config));
  TpRules rules;
  qwen3_5::AddMixerRules(mixers, &rules);
  AddMoeRules(moe, &rules);
  return rules.Evaluate();
}

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store) {
  ASSIGN_OR_RETURN(const qwen3_5::MixerConfig mixers, qwen3_5::ReadMixers(config));
  ASSIGN_OR_RETURN(const MoeConfig moe, ReadMoe(config));
  ASSIGN_OR_RETURN(DecoderBuilder builder, DecoderBuilder::Create(DecoderConfig::Of(config, 1.0f),
                                                                  options, resolver, store));
  const auto load_mlp = [&](const BlockLoader& loader, const std::string& name) {
    return MoeBlock::Load(loader, moe, name);
  };
  RETURN_IF_ERROR(qwen3_5::AddLayers(mixers, load_mlp, &builder));
  return builder.Finish();
}

}  // namespace qwen3_5_moe
}  // namespace lockstep
