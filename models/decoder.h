// Decoder: the forward pass that all architectures share. The residual stream h starts as the
// token's embedding; every block adds to it what it makes of norm(h); the head reads the final norm
// of it. An architecture loads its blocks through DecoderBuilder and is otherwise data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/norm/rms_norm.h"
#include "models/layers/block.h"
#include "models/layers/vocab.h"
#include "models/model.h"

namespace lockstep {

// Prefixes that releases put before the text part's names; "" is not one of them.
struct DecoderNames {
  std::vector<std::string> prefixes;  // the first that has `embedding` is the release's
  std::string embedding = "embed_tokens";
  std::string final_norm = "norm";
};

struct DecoderConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  bool tied_head = false;
  RmsNormParams norm;  // of the norms before blocks and head
  DecoderNames names;

  static DecoderConfig Of(const ModelConfig& model, float norm_weight_offset);
};

class DecoderBuilder {
 public:
  // Finds the prefix and loads the two vocabulary ends. DataLoss when no prefix fits.
  static absl::StatusOr<DecoderBuilder> Create(const DecoderConfig& config,
                                               const ModelOptions& options,
                                               const SchemeResolver& resolver, WeightStore* store);
  DecoderBuilder(DecoderBuilder&&) noexcept;
  ~DecoderBuilder();

  const std::string& prefix() const { return prefix_; }
  BlockLoader loader();

  // The next block, with the norm `{norm}.weight` before it.
  absl::Status Add(const std::string& norm, std::unique_ptr<Block> block);

  // Loads the final norm and checks that every tensor of the checkpoint is used or known to be of
  // no use to a text model (vision, multi-token prediction, scales of the cache).
  absl::StatusOr<std::unique_ptr<Model>> Finish();

 private:
  class Decoder;
  DecoderBuilder();
  absl::Status LoadVocabulary();

  DecoderConfig config_;
  LinearLoader loader_;
  std::string prefix_;
  std::unique_ptr<Decoder> model_;
};

}  // namespace lockstep
