// Which quantization scheme each linear module of a checkpoint has: read from `quantization_config`
// of config.json and from hf_quant_config.json, then cross-checked against the tensors that exist.
// Rules: models-*.md section 5.4 (ModelOpt, compressed-tensors, fp8 block). Tensors win for
// "quantized or not" (logged); anything ambiguous or contradictory is an error that names the
// module.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/weights/checkpoint.h"
#include "nlohmann/json.hpp"

namespace lockstep {

enum class WeightScheme {
  kBF16,        // `weight` BF16 (or F32): unquantized
  kNvfp4,       // E2M1 codes, E4M3 scale per 16 of K, F32 global
  kFp8Tensor,   // E4M3, one scale
  kFp8Channel,  // E4M3, one scale per row
  kFp8Block,    // E4M3, one scale per 128 x 128 block
};

enum class ActivationScheme {
  kNone,         // weight-only
  kFp8Static,    // one stored scale (`input_scale`)
  kFp8PerToken,  // one dynamic scale per token (per virtual shard on row-parallel inputs)
  kFp8Block128,  // one dynamic scale per token and 128 of K
};

// Names as exported and printed: "bf16", "nvfp4", "fp8_tensor", "fp8_channel", "fp8_block".
const char* Name(WeightScheme scheme);
const char* Name(ActivationScheme scheme);

struct LinearScheme {
  WeightScheme weight = WeightScheme::kBF16;
  // What the checkpoint says about activations; NVFP4 stays weight-only whatever it says.
  ActivationScheme activation = ActivationScheme::kNone;
  // NVFP4: the stored global is a divisor (compressed-tensors), else a multiplier (ModelOpt).
  bool global_is_divisor = false;
  // Suffixes of the tensors of this module, e.g. "weight_packed", "weight_scale",
  // "weight_global_scale".
  std::string codes = "weight";
  std::string scale;         // empty: none
  std::string global_scale;  // NVFP4
  std::string input_scale;   // static activations; empty: none
};

class SchemeResolver {
 public:
  // `config` is the whole config.json; hf_quant_config.json is read from the checkpoint's directory
  // if there; `checkpoint` must outlive the resolver. Unsupported algorithms are Unimplemented with
  // the algorithm's name and the supported list.
  static absl::StatusOr<std::unique_ptr<SchemeResolver>> Create(const nlohmann::json& config,
                                                                const Checkpoint& checkpoint);
  virtual ~SchemeResolver() = default;

  // `module` is the full name as in the checkpoint, without ".weight". [n, k] is the logical shape.
  // Checks that the tensors of the scheme exist with their dtypes and shapes.
  virtual absl::StatusOr<LinearScheme> Resolve(const std::string& module, int64_t n,
                                               int64_t k) const = 0;
  // One line for people: "compressed-tensors: nvfp4 + fp8_channel".
  virtual std::string Summary() const = 0;
};

}  // namespace lockstep
