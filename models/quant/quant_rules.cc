// Implementation of the rules of ModelOpt, compressed-tensors and fp8 configs.
#include "models/quant/quant_rules.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/quant/module_matcher.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr const char* kSupported =
    "modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MIXED_PRECISION), "
    "compressed-tensors (4-bit float tensor_group of 16; 8-bit float tensor, channel, block "
    "128x128), "
    "fp8 (e4m3; per tensor or weight_block_size [128, 128])";

absl::Status Unsupported(const std::string& file, const std::string& what) {
  return absl::UnimplementedError(
      absl::StrCat(file, ": quantization ", what, " is not supported; supported: ", kSupported));
}

absl::Status Malformed(const std::string& file, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": quantization config: ", what));
}

// A key's value, or nullptr when absent or null.
const Json* FindKey(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string TextOr(const Json& object, const char* key, const std::string& fallback) {
  const Json* value = FindKey(object, key);
  if (value == nullptr) return fallback;
  return value->is_string() ? value->get<std::string>() : value->dump();
}

int64_t IntOr(const Json& object, const char* key, int64_t fallback) {
  const Json* value = FindKey(object, key);
  return value != nullptr && value->is_number_integer() ? value->get<int64_t>() : fallback;
}

bool IsBlock128(const Json& value) {
  return value.is_array() && value.size() == 2 && value[0] == 128 && value[1] == 128;
}

// The strings of a list under any of `keys`; a missing list is empty.
absl::StatusOr<std::vector<std::string>> Names(const Json& object,
                                               const std::vector<const char*>& keys,
                                               const std::string& file) {
  std::vector<std::string> names;
  for (const char* key : keys) {
    const Json* list = FindKey(object, key);
    if (list == nullptr) continue;
    if (!list->is_array()) return Malformed(file, absl::StrCat("\"", key, "\" is not a list"));
    for (const Json& item : *list) {
      if (!item.is_string()) {
        return Malformed(file, absl::StrCat("\"", key, "\" holds something other than names"));
      }
      names.push_back(item.get<std::string>());
    }
  }
  return names;
}

// ---- ModelOpt ----

absl::StatusOr<DeclaredScheme> ModelOptAlgorithm(const std::string& algo, const Json& entry,
                                                 const std::string& file) {
  if (algo == "NVFP4" || algo == "W4A16_NVFP4") {
    const int64_t group = IntOr(entry, "group_size", 16);
    if (group != 16) {
      return Unsupported(file, absl::StrCat("modelopt ", algo, " with group_size ", group));
    }
    return DeclaredScheme{WeightScheme::kNvfp4, ActivationScheme::kNone};
  }
  if (algo == "FP8") return DeclaredScheme{WeightScheme::kFp8Tensor, ActivationScheme::kFp8Static};
  if (algo == "FP8_PER_CHANNEL_PER_TOKEN") {
    return DeclaredScheme{WeightScheme::kFp8Channel, ActivationScheme::kFp8PerToken};
  }
  if (algo == "FP8_PB_WO") {
    return DeclaredScheme{WeightScheme::kFp8Block, ActivationScheme::kNone};
  }
  return Unsupported(file, absl::StrCat("modelopt \"", algo, "\""));
}

class ModelOptRules : public QuantRules {
 public:
  static absl::StatusOr<std::unique_ptr<QuantRules>> Create(const Json& config,
                                                            const std::string& file,
                                                            const std::set<std::string>& modules) {
    auto rules = std::make_unique<ModelOptRules>();
    const std::string algo = TextOr(config, "quant_algo", "");
    if (algo.empty()) return Malformed(file, "\"quant_algo\" is absent");
    ASSIGN_OR_RETURN(std::vector<std::string> excluded,
                     Names(config, {"exclude_modules", "ignore"}, file));
    rules->excluded_ = ExcludeList(std::move(excluded), modules);
    rules->mixed_ = algo == "MIXED_PRECISION";
    if (!rules->mixed_) {
      ASSIGN_OR_RETURN(rules->uniform_, ModelOptAlgorithm(algo, config, file));
      return std::unique_ptr<QuantRules>(std::move(rules));
    }
    const Json* layers = FindKey(config, "quantized_layers");
    if (layers == nullptr || !layers->is_object()) {
      return Malformed(file, "MIXED_PRECISION without an object \"quantized_layers\"");
    }
    for (const auto& item : layers->items()) {
      const std::string layer_algo = TextOr(item.value(), "quant_algo", "");
      if (layer_algo.empty()) {
        return Malformed(file, absl::StrCat("quantized_layers: ", item.key(), ": no quant_algo"));
      }
      ASSIGN_OR_RETURN(const DeclaredScheme scheme,
                       ModelOptAlgorithm(layer_algo, item.value(), file));
      const auto inserted = rules->layers_.emplace(CanonicalModule(item.key()), scheme);
      if (!inserted.second && !(inserted.first->second == scheme)) {
        return Malformed(file, absl::StrCat("quantized_layers names ", item.key(),
                                            " twice (under two prefixes), differently"));
      }
    }
    return std::unique_ptr<QuantRules>(std::move(rules));
  }

  absl::StatusOr<DeclaredScheme> Declare(const std::string& module) const override {
    if (excluded_.Excludes(module)) return DeclaredScheme{};
    if (!mixed_) return IsLinearModule(module) ? uniform_ : DeclaredScheme{};
    const std::string canonical = CanonicalModule(module);
    const auto exact = layers_.find(canonical);
    if (exact != layers_.end()) return exact->second;
    for (const auto& item : layers_) {
      if (NamesModule(item.first, canonical)) return item.second;
      if (absl::EndsWith(item.first, ".experts") &&
          absl::StartsWith(canonical, absl::StrCat(item.first, "."))) {
        return item.second;
      }
    }
    return DeclaredScheme{};
  }
  std::string producer() const override { return "modelopt"; }
  std::set<WeightScheme> schemes() const override {
    std::set<WeightScheme> all;
    if (!mixed_) all.insert(uniform_.weight);
    for (const auto& item : layers_) all.insert(item.second.weight);
    return all;
  }

 private:
  ExcludeList excluded_;
  bool mixed_ = false;
  DeclaredScheme uniform_;
  std::map<std::string, DeclaredScheme> layers_;  // canonical name
};

// ---- compressed-tensors ----

// Numbers within names compare as numbers: group_2 before group_10.
bool NaturalLess(const std::string& a, const std::string& b) {
  const auto split = [](const std::string& s) {
    const size_t end = s.find_last_not_of("0123456789") + 1;  // npos + 1 is 0
    std::string digits = s.substr(end);
    digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
    return std::make_tuple(s.substr(0, end), digits.size(), digits);
  };
  return split(a) < split(b);
}

// `keys` in `order`; those that it lacks follow.
std::vector<std::string> Ordered(std::vector<std::string> keys,
                                 const std::vector<std::string>& order) {
  const auto place = [&order](const std::string& key) {
    return std::find(order.begin(), order.end(), key) - order.begin();
  };
  std::sort(keys.begin(), keys.end(), [&place](const std::string& a, const std::string& b) {
    return place(a) != place(b) ? place(a) < place(b) : NaturalLess(a, b);
  });
  return keys;
}

absl::StatusOr<std::vector<ModulePattern>> Patterns(const Json& object, const char* key,
                                                    const std::string& file) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, Names(object, {key}, file));
  std::vector<ModulePattern> patterns;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(ModulePattern pattern, ModulePattern::Parse(name));
    patterns.push_back(std::move(pattern));
  }
  return patterns;
}

absl::StatusOr<bool> AnyMatches(const std::vector<ModulePattern>& patterns,
                                const std::string& module) {
  for (const ModulePattern& pattern : patterns) {
    ASSIGN_OR_RETURN(const bool matches, pattern.Matches(module));
    if (matches) return true;
  }
  return false;
}

// Activations of an FP8 group. `shown` names the group in errors.
absl::StatusOr<ActivationScheme> GroupActivation(const Json* input, WeightScheme weight,
                                                 const std::string& shown,
                                                 const std::string& file) {
  if (input == nullptr) return ActivationScheme::kNone;
  const Json* dynamic_value = FindKey(*input, "dynamic");
  const bool dynamic =
      dynamic_value != nullptr && dynamic_value->is_boolean() && dynamic_value->get<bool>();
  const std::string strategy = TextOr(*input, "strategy", dynamic ? "token" : "tensor");
  const bool fp8 = IntOr(*input, "num_bits", 8) == 8 && TextOr(*input, "type", "int") == "float";
  if (fp8 && dynamic && strategy == "token") return ActivationScheme::kFp8PerToken;
  if (fp8 && !dynamic && strategy == "tensor") return ActivationScheme::kFp8Static;
  if (fp8 && dynamic && strategy == "group" && IntOr(*input, "group_size", 0) == 128 &&
      weight == WeightScheme::kFp8Block) {
    return ActivationScheme::kFp8Block128;
  }
  return Unsupported(
      file, absl::StrCat("compressed-tensors ", shown, " with input_activations ", input->dump()));
}

absl::StatusOr<DeclaredScheme> GroupScheme(const Json& group, const std::string& file) {
  const Json* weights = FindKey(group, "weights");
  if (weights == nullptr) return DeclaredScheme{};
  const int64_t bits = IntOr(*weights, "num_bits", 8);
  const std::string type = TextOr(*weights, "type", "int");
  const std::string strategy = TextOr(*weights, "strategy", "tensor");
  const std::string shown = absl::StrCat(bits, "-bit ", type, " ", strategy);
  const Json* symmetric = FindKey(*weights, "symmetric");
  if (symmetric != nullptr && *symmetric != true) {
    return Unsupported(file, absl::StrCat("compressed-tensors asymmetric ", shown));
  }
  const std::string actorder = TextOr(*weights, "actorder", "static");
  if (actorder != "static" && actorder != "weight" && actorder != "false") {
    return Unsupported(file, absl::StrCat("compressed-tensors actorder \"", actorder, "\""));
  }
  if (bits == 4 && type == "float" && strategy == "tensor_group") {
    const int64_t size = IntOr(*weights, "group_size", 16);
    if (size == 16) return DeclaredScheme{WeightScheme::kNvfp4, ActivationScheme::kNone};
    return Unsupported(file, absl::StrCat("compressed-tensors ", shown, " of ", size));
  }
  if (bits != 8 || type != "float") {
    return Unsupported(file, absl::StrCat("compressed-tensors ", shown));
  }
  DeclaredScheme scheme;
  if (strategy == "tensor") {
    scheme.weight = WeightScheme::kFp8Tensor;
  } else if (strategy == "channel") {
    scheme.weight = WeightScheme::kFp8Channel;
  } else if (strategy == "block") {
    scheme.weight = WeightScheme::kFp8Block;
    const Json* block = FindKey(*weights, "block_structure");
    if (block != nullptr && !IsBlock128(*block)) {
      return Unsupported(file, absl::StrCat("compressed-tensors ", shown, " of ", block->dump()));
    }
  } else {
    return Unsupported(file, absl::StrCat("compressed-tensors ", shown));
  }
  ASSIGN_OR_RETURN(scheme.activation, GroupActivation(FindKey(group, "input_activations"),
                                                      scheme.weight, shown, file));
  return scheme;
}

class CompressedTensorsRules : public QuantRules {
 public:
  static absl::StatusOr<std::unique_ptr<QuantRules>> Create(const Json& config,
                                                            const std::string& file,
                                                            const std::vector<std::string>& order) {
    const Json* sparsity = FindKey(config, "sparsity_config");
    if (sparsity != nullptr && TextOr(*sparsity, "format", "dense") != "dense") {
      return Unsupported(file, absl::StrCat("compressed-tensors sparsity \"",
                                            TextOr(*sparsity, "format", ""), "\""));
    }
    const Json* transform = FindKey(config, "transform_config");
    if (transform != nullptr && !transform->empty()) {
      return Unsupported(file, "compressed-tensors transform_config");
    }
    auto rules = std::make_unique<CompressedTensorsRules>();
    ASSIGN_OR_RETURN(rules->ignore_, Patterns(config, "ignore", file));
    const Json* groups = FindKey(config, "config_groups");
    if (groups == nullptr || !groups->is_object()) {
      return Malformed(file, "no object \"config_groups\"");
    }
    std::vector<std::string> keys;
    for (const auto& item : groups->items()) keys.push_back(item.key());
    for (const std::string& key : Ordered(std::move(keys), order)) {
      const Json& json = (*groups)[key];
      if (!json.is_object()) return Malformed(file, absl::StrCat(key, " is not an object"));
      Group group;
      ASSIGN_OR_RETURN(group.targets, Patterns(json, "targets", file));
      ASSIGN_OR_RETURN(group.scheme, GroupScheme(json, file));
      rules->groups_.push_back(std::move(group));
    }
    return std::unique_ptr<QuantRules>(std::move(rules));
  }

  absl::StatusOr<DeclaredScheme> Declare(const std::string& module) const override {
    ASSIGN_OR_RETURN(const bool ignored, AnyMatches(ignore_, module));
    if (ignored) return DeclaredScheme{};
    for (const Group& group : groups_) {
      ASSIGN_OR_RETURN(const bool matches, AnyMatches(group.targets, module));
      if (matches) return group.scheme;
    }
    return DeclaredScheme{};
  }
  std::string producer() const override { return "compressed-tensors"; }
  std::set<WeightScheme> schemes() const override {
    std::set<WeightScheme> all;
    for (const Group& group : groups_) all.insert(group.scheme.weight);
    return all;
  }

 private:
  struct Group {
    std::vector<ModulePattern> targets;
    DeclaredScheme scheme;
  };
  std::vector<ModulePattern> ignore_;
  std::vector<Group> groups_;
};

// ---- fp8 ----

class Fp8Rules : public QuantRules {
 public:
  static absl::StatusOr<std::unique_ptr<QuantRules>> Create(const Json& config,
                                                            const std::string& file) {
    auto rules = std::make_unique<Fp8Rules>();
    const std::string format = TextOr(config, "fmt", "e4m3");
    if (format != "e4m3") return Unsupported(file, absl::StrCat("fp8 fmt \"", format, "\""));
    const Json* block = FindKey(config, "weight_block_size");
    if (block != nullptr && !IsBlock128(*block)) {
      return Unsupported(file, absl::StrCat("fp8 weight_block_size ", block->dump()));
    }
    const std::string activation = TextOr(config, "activation_scheme", "dynamic");
    if (activation != "dynamic" && activation != "static") {
      return Unsupported(file, absl::StrCat("fp8 activation_scheme \"", activation, "\""));
    }
    const bool dynamic = activation == "dynamic";
    if (block != nullptr) {
      if (!dynamic) return Unsupported(file, "fp8 block with static activations");
      rules->scheme_ = {WeightScheme::kFp8Block, ActivationScheme::kFp8Block128};
    } else {
      rules->scheme_ = {WeightScheme::kFp8Tensor,
                        dynamic ? ActivationScheme::kFp8PerToken : ActivationScheme::kFp8Static};
    }
    ASSIGN_OR_RETURN(rules->excluded_,
                     Names(config, {"modules_to_not_convert", "ignored_layers"}, file));
    return std::unique_ptr<QuantRules>(std::move(rules));
  }

  absl::StatusOr<DeclaredScheme> Declare(const std::string& module) const override {
    if (!IsLinearModule(module)) return DeclaredScheme{};
    for (const std::string& entry : excluded_) {
      if (NamesModule(entry, module)) return DeclaredScheme{};
    }
    return scheme_;
  }
  std::string producer() const override { return "fp8"; }
  std::set<WeightScheme> schemes() const override { return {scheme_.weight}; }

 private:
  DeclaredScheme scheme_;
  std::vector<std::string> excluded_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<QuantRules>> MakeQuantRules(
    const Json& config, const std::string& file, const std::set<std::string>& modules,
    const std::vector<std::string>& group_order) {
  if (!config.is_object()) return Malformed(file, "not an object");
  const std::string method = TextOr(config, "quant_method", "");
  if (method == "compressed-tensors") {
    return CompressedTensorsRules::Create(config, file, group_order);
  }
  if (method == "fp8") return Fp8Rules::Create(config, file);
  const Json* nested = FindKey(config, "quantization");
  if (absl::StartsWith(method, "modelopt") || (method.empty() && nested != nullptr)) {
    return ModelOptRules::Create(nested != nullptr ? *nested : config, file, modules);
  }
  if (method.empty()) return Malformed(file, "\"quant_method\" is absent");
  return Unsupported(file, absl::StrCat("\"", method, "\""));
}

absl::StatusOr<std::unique_ptr<QuantRules>> MakeHfQuantRules(const Json& config,
                                                             const std::string& file,
                                                             const std::set<std::string>& modules) {
  if (!config.is_object()) return Malformed(file, "not an object");
  const Json* nested = FindKey(config, "quantization");
  const Json& body = nested != nullptr ? *nested : config;
  if (!body.is_object()) return Malformed(file, "\"quantization\" is not an object");
  if (FindKey(body, "quant_algo") == nullptr) return std::unique_ptr<QuantRules>();
  return ModelOptRules::Create(body, file, modules);
}

}  // namespace lockstep
