#include "models/nemotron_h/nemotron_h.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/decoder.h"
#include "models/layers/attention.h"
#include "models/nemotron_h/config.h"
#include "models/nemotron_h/mamba2_block.h"
#include "models/nemotron_h/moe_block.h"
#include "models/nemotron_h/relu2_mlp.h"

namespace lockstep {
namespace nemotron_h {
namespace {

DecoderConfig DecoderOf(const ModelConfig& model, const Config& c, const Checkpoint& checkpoint) {
  DecoderConfig d = DecoderConfig::Of(model, 0.0f);
  d.norm.eps = c.norm_eps;
  d.names.prefixes = {"language_model.backbone.", "backbone.", "language_model.model.", "model."};
  d.names.embedding = "embeddings";
  d.names.final_norm = "norm_f";
  // Some exports say "embedding".
  for (const std::string& prefix : d.names.prefixes) {
    if (checkpoint.Find(prefix + "embedding.weight") != nullptr) d.names.embedding = "embedding";
  }
  return d;
}

absl::StatusOr<std::unique_ptr<Block>> LoadBlock(const BlockLoader& loader, const Config& c,
                                                 size_t layer, const std::string& name) {
  switch (c.layers[layer]) {
    case LayerType::kMamba:
      return Mamba2Block::Load(loader, c, name);
    case LayerType::kAttention:
      return AttentionBlock::Load(loader, c.attention, nullptr, name);
    case LayerType::kMlp:
      return Relu2MlpBlock::Load(loader, c.hidden_size, c.intermediate_size[layer], name);
    case LayerType::kMoe:
      return MoeBlock::Load(loader, c, name);
  }
  return absl::InternalError(absl::StrCat(name, ": a layer of no type"));
}

}  // namespace

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  return LegalTp(c);
}

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  ASSIGN_OR_RETURN(
      DecoderBuilder builder,
      DecoderBuilder::Create(DecoderOf(config, c, store->checkpoint()), options, resolver, store));
  for (size_t l = 0; l < c.layers.size(); ++l) {
    const std::string layer = absl::StrCat(builder.prefix(), "layers.", l, ".");
    ASSIGN_OR_RETURN(std::unique_ptr<Block> block,
                     LoadBlock(builder.loader(), c, l, layer + "mixer."));
    RETURN_IF_ERROR(builder.Add(layer + "norm", std::move(block)));
  }
  return builder.Finish();
}

}  // namespace nemotron_h
}  // namespace lockstep
