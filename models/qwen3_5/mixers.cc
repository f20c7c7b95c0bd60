#include "models/qwen3_5/mixers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace qwen3_5 {

absl::Status AddLayers(const MixerConfig& config, const LoadMlpFn& load_mlp,
                       DecoderBuilder* builder) {
  const BlockLoader loader = builder->loader();
  ASSIGN_OR_RETURN(const std::shared_ptr<const RopeTable> rope,
                   RopeTable::Make(loader.linear.store->device(), config.attention.rope));
  for (size_t l = 0; l < config.layers.size(); ++l) {
    const std::string name = absl::StrCat(builder->prefix(), "layers.", l, ".");
    std::unique_ptr<Block> mixer, mlp;
    if (config.layers[l] == LayerType::kFullAttention) {
      ASSIGN_OR_RETURN(mixer,
                       AttentionBlock::Load(loader, config.attention, rope, name + "self_attn."));
    } else {
      ASSIGN_OR_RETURN(mixer, DeltaNetBlock::Load(loader, config.delta_net, name + "linear_attn."));
    }
    RETURN_IF_ERROR(builder->Add(name + "input_layernorm", std::move(mixer)));
    ASSIGN_OR_RETURN(mlp, load_mlp(loader, name + "mlp."));
    RETURN_IF_ERROR(builder->Add(name + "post_attention_layernorm", std::move(mlp)));
  }
  return absl::OkStatus();
}

}  // namespace qwen3_5
}  // namespace lockstep
