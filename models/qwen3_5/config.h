// Qwen3.5 (text part): the numbers of config.json that the architecture needs, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "models/layers/attention.h"
#include "models/layers/delta_net.h"
#include "models/model_config.h"
#include "models/tp_legality.h"

namespace lockstep {
namespace qwen3_5 {

enum class LayerType { kFullAttention, kLinearAttention };

// What the dense and the mixture-of-experts models share: the mixers of the layers.
struct MixerConfig {
  std::vector<LayerType> layers;
  AttentionConfig attention;
  DeltaNetConfig delta_net;
};

// InvalidArgument or Unimplemented, naming the key, what it holds and what is possible.
absl::StatusOr<MixerConfig> ReadMixers(const ModelConfig& model);
void AddMixerRules(const MixerConfig& config, TpRules* rules);

struct Config {
  MixerConfig mixers;
  int64_t intermediate_size = 0;
};
absl::StatusOr<Config> ReadConfig(const ModelConfig& model);

}  // namespace qwen3_5
}  // namespace lockstep
