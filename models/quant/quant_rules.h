// QuantRules: what a quantization config declares about a module, before any tensor is looked at.
// One implementation per producer (ModelOpt, compressed-tensors, fp8). Immutable; thread safe.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/quant/scheme.h"
#include "nlohmann/json.hpp"

namespace lockstep {

struct DeclaredScheme {
  WeightScheme weight = WeightScheme::kBF16;
  ActivationScheme activation = ActivationScheme::kNone;
  bool operator==(const DeclaredScheme& o) const {
    return weight == o.weight && activation == o.activation;
  }
};

class QuantRules {
 public:
  virtual ~QuantRules() = default;
  virtual absl::StatusOr<DeclaredScheme> Declare(const std::string& module) const = 0;
  virtual std::string producer() const = 0;
  // The quantized schemes that the config speaks of.
  virtual std::set<WeightScheme> schemes() const = 0;
};

// The rules of a `quantization_config` object. `file` is named in errors. `modules` are the
// canonical names of the checkpoint's modules; `group_order` the keys of config_groups in file
// order (those not in it follow, numbers within names in numeric order). Unimplemented names the
// algorithm and the supported list.
absl::StatusOr<std::unique_ptr<QuantRules>> MakeQuantRules(
    const nlohmann::json& config, const std::string& file, const std::set<std::string>& modules,
    const std::vector<std::string>& group_order);

// The rules of hf_quant_config.json; nullptr when it declares no linears (a KV cache, say).
absl::StatusOr<std::unique_ptr<QuantRules>> MakeHfQuantRules(const nlohmann::json& config,
                                                             const std::string& file,
                                                             const std::set<std::string>& modules);

}  // namespace lockstep
