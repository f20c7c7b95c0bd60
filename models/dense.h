// The dense decoder of Llama and Qwen3: full attention and a gated MLP in every layer, plain norms.
// What differs between them is data.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "models/layers/attention.h"
#include "models/model.h"

namespace lockstep {

struct DenseConfig {
  int64_t num_layers = 0;
  int64_t intermediate_size = 0;
  AttentionConfig attention;
};

// InvalidArgument or Unimplemented, naming the key, what it holds and what is possible.
absl::StatusOr<DenseConfig> ReadDense(const ModelConfig& model);
TpLegality LegalDenseTp(const DenseConfig& config);
absl::StatusOr<std::unique_ptr<Model>> LoadDense(const DenseConfig& dense,
                                                 const ModelConfig& config,
                                                 const ModelOptions& options,
                                                 const SchemeResolver& resolver,
                                                 WeightStore* store);

}  // namespace lockstep
