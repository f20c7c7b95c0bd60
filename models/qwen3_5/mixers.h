// The mixers of Qwen3.5's layers (gated full attention or a gated delta net), dense and
// mixture-of-experts alike.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "models/decoder.h"
#include "models/qwen3_5/config.h"

namespace lockstep {
namespace qwen3_5 {

// Adds for every layer its mixer, then what `load_mlp(loader, "<prefix>layers.<l>.mlp.")` gives.
using LoadMlpFn =
    std::function<absl::StatusOr<std::unique_ptr<Block>>(const BlockLoader&, const std::string&)>;
absl::Status AddLayers(const MixerConfig& config, const LoadMlpFn& load_mlp,
                       DecoderBuilder* builder);

}  // namespace qwen3_5
}  // namespace lockstep
