#include "models/dense.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/decoder.h"
#include "models/layers/gated_mlp.h"
#include "models/tp_legality.h"

namespace lockstep {

absl::StatusOr<DenseConfig> ReadDense(const ModelConfig& model) {
  if (model.BoolOr("use_sliding_window", false)) {
    return model.Unsupported("use_sliding_window", "true", "false");
  }
  DenseConfig c;
  c.num_layers = model.num_layers;
  ASSIGN_OR_RETURN(c.intermediate_size, ReadGatedMlp(model));
  ASSIGN_OR_RETURN(c.attention, ReadAttention(model, 1.0));
  return c;
}

TpLegality LegalDenseTp(const DenseConfig& c) {
  TpRules rules;
  AddAttentionRules(c.attention, &rules);
  AddGatedMlpRules(c.intermediate_size, &rules);
  return rules.Evaluate();
}

absl::StatusOr<std::unique_ptr<Model>> LoadDense(const DenseConfig& dense,
                                                 const ModelConfig& config,
                                                 const ModelOptions& options,
                                                 const SchemeResolver& resolver,
                                                 WeightStore* store) {
  ASSIGN_OR_RETURN(DecoderBuilder builder, DecoderBuilder::Create(DecoderConfig::Of(config, 0.0f),
                                                                  options, resolver, store));
  const BlockLoader loader = builder.loader();
  ASSIGN_OR_RETURN(const std::shared_ptr<const RopeTable> rope,
                   RopeTable::Make(store->device(), dense.attention.rope));
  for (int64_t l = 0; l < dense.num_layers; ++l) {
    const std::string name = absl::StrCat(builder.prefix(), "layers.", l, ".");
    ASSIGN_OR_RETURN(std::unique_ptr<Block> attention,
                     AttentionBlock::Load(loader, dense.attention, rope, name + "self_attn."));
    RETURN_IF_ERROR(builder.Add(name + "input_layernorm", std::move(attention)));
    ASSIGN_OR_RETURN(
        std::unique_ptr<Block> mlp,
        GatedMlpBlock::Load(loader, config.hidden_size, dense.intermediate_size, name + "mlp."));
    RETURN_IF_ERROR(builder.Add(name + "post_attention_layernorm", std::move(mlp)));
  }
  return builder.Finish();
}

}  // namespace lockstep
