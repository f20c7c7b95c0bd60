// Implementation of SchemeResolver: declared rules first, then the tensors that exist.
#include "models/quant/scheme.h"

#include <atomic>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "models/model_config.h"
#include "models/quant/module_matcher.h"
#include "models/quant/quant_rules.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr int kLoggedDisagreements = 3;

int64_t Blocks(int64_t size) { return (size + 127) / 128; }

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool IsScalar(const TensorInfo& tensor) {
  return tensor.shape.empty() || (tensor.shape.size() == 1 && tensor.shape[0] == 1);
}

bool IsScaleType(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

// The tensors of one module, and errors that name it.
struct Module {
  const Checkpoint* checkpoint;
  std::string name;
  int64_t n;
  int64_t k;

  const TensorInfo* Find(const std::string& suffix) const {
    return checkpoint->Find(absl::StrCat(name, ".", suffix));
  }
  absl::Status Error(const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat("module ", name, " [", n, ", ", k, "]: ", what));
  }
  // The tensor with one of the dtypes and one of the shapes; otherwise an error with the expected
  // one.
  absl::Status Expect(const std::string& suffix, const std::vector<DType>& dtypes,
                      const std::vector<std::vector<int64_t>>& shapes) const {
    std::vector<std::string> names;
    for (DType dtype : dtypes) names.emplace_back(Name(dtype));
    std::vector<std::string> shape_names;
    for (const auto& shape : shapes) shape_names.push_back(ShapeText(shape));
    const std::string expected = absl::StrCat(absl::StrJoin(names, " or "), " of shape ",
                                              absl::StrJoin(shape_names, " or "));
    const TensorInfo* tensor = Find(suffix);
    if (tensor == nullptr) {
      return Error(
          absl::StrCat("tensor ", name, ".", suffix, " is missing; ", expected, " is expected"));
    }
    for (const auto& shape : shapes) {
      for (DType dtype : dtypes) {
        if (tensor->shape == shape && tensor->dtype == dtype) return absl::OkStatus();
      }
    }
    return Error(absl::StrCat("tensor ", tensor->name, " is ", tensor->ToString(), "; ", expected,
                              " is expected"));
  }
};

// What the tensors say. FP8 scales may allow several readings ([1, 1] of a small matrix).
struct Found {
  std::set<WeightScheme> candidates;
  bool compressed_tensors = false;  // names of NVFP4 tensors
  std::string scale;                // FP8

  bool quantized() const { return candidates.count(WeightScheme::kBF16) == 0; }
};

absl::StatusOr<Found> FindFp8(const Module& module) {
  Found found;
  const TensorInfo* inverse = module.Find("weight_scale_inv");
  const TensorInfo* plain = module.Find("weight_scale");
  if (inverse != nullptr && plain != nullptr) {
    return module.Error("has both weight_scale and weight_scale_inv: ambiguous");
  }
  const TensorInfo* scale = inverse != nullptr ? inverse : plain;
  if (scale == nullptr) {
    return module.Error(absl::StrCat("weight is F8_E4M3, but neither tensor ", module.name,
                                     ".weight_scale nor ", module.name,
                                     ".weight_scale_inv exists"));
  }
  found.scale = inverse != nullptr ? "weight_scale_inv" : "weight_scale";
  const std::vector<int64_t>& shape = scale->shape;
  const int64_t rows = Blocks(module.n), columns = Blocks(module.k);
  if (IsScalar(*scale)) found.candidates.insert(WeightScheme::kFp8Tensor);
  if (shape == std::vector<int64_t>{rows, columns} ||
      shape == std::vector<int64_t>{rows, 1, columns, 1}) {
    found.candidates.insert(WeightScheme::kFp8Block);
  }
  if (inverse == nullptr &&
      (shape == std::vector<int64_t>{module.n, 1} || shape == std::vector<int64_t>{module.n})) {
    found.candidates.insert(WeightScheme::kFp8Channel);
  }
  if (found.candidates.empty()) {
    return module.Error(absl::StrCat("tensor ", scale->name, " is ", scale->ToString(),
                                     "; a scalar (per tensor), ", ShapeText({module.n, 1}),
                                     " (per channel) or ", ShapeText({rows, columns}),
                                     " (per 128x128 block) is expected"));
  }
  return found;
}

absl::StatusOr<Found> FindTensors(const Module& module) {
  if (module.Find("weight_g_idx") != nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("module ", module.name, ": tensor ", module.name,
                     ".weight_g_idx permutes the columns (actorder group); this is not supported"));
  }
  const TensorInfo* packed = module.Find("weight_packed");
  const TensorInfo* weight = module.Find("weight");
  if (packed != nullptr && weight != nullptr) {
    return module.Error("has both weight and weight_packed: ambiguous");
  }
  Found found;
  if (packed != nullptr) {
    found.candidates = {WeightScheme::kNvfp4};
    found.compressed_tensors = true;
    return found;
  }
  if (weight == nullptr) {
    return module.Error(absl::StrCat("neither tensor ", module.name, ".weight nor ", module.name,
                                     ".weight_packed exists in ", module.checkpoint->directory()));
  }
  if (weight->dtype == DType::kE4M3) return FindFp8(module);
  if (weight->dtype == DType::kU8 && module.Find("weight_scale_2") != nullptr) {
    found.candidates = {WeightScheme::kNvfp4};
    return found;
  }
  if (weight->dtype == DType::kBF16 || weight->dtype == DType::kF32) {
    found.candidates = {WeightScheme::kBF16};
    return found;
  }
  return module.Error(
      absl::StrCat("tensor ", weight->name, " is ", weight->ToString(),
                   weight->dtype == DType::kU8 ? " without a weight_scale_2" : "",
                   "; BF16, F32, F8_E4M3 or packed NVFP4 (U8 with weight_scale_2) is expected"));
}

// Checks every tensor of the scheme and says their names.
absl::StatusOr<LinearScheme> Describe(const Module& module, const Found& found,
                                      const DeclaredScheme& declared) {
  const int64_t n = module.n, k = module.k;
  LinearScheme scheme;
  scheme.weight = declared.weight;
  scheme.activation = declared.activation;
  if (declared.weight == WeightScheme::kBF16) {
    RETURN_IF_ERROR(module.Expect("weight", {DType::kBF16, DType::kF32}, {{n, k}}));
    return scheme;
  }
  if (declared.weight == WeightScheme::kNvfp4) {
    if (k % 16 != 0) return module.Error("nvfp4 needs a multiple of 16 columns");
    scheme.codes = found.compressed_tensors ? "weight_packed" : "weight";
    scheme.scale = "weight_scale";
    scheme.global_scale = found.compressed_tensors ? "weight_global_scale" : "weight_scale_2";
    scheme.global_is_divisor = found.compressed_tensors;
    RETURN_IF_ERROR(module.Expect(scheme.codes, {DType::kU8}, {{n, k / 2}}));
    RETURN_IF_ERROR(module.Expect(scheme.scale, {DType::kE4M3}, {{n, k / 16}}));
    RETURN_IF_ERROR(module.Expect(scheme.global_scale, {DType::kF32}, {{}, {1}}));
    return scheme;
  }
  scheme.scale = found.scale;
  RETURN_IF_ERROR(module.Expect("weight", {DType::kE4M3}, {{n, k}}));
  const TensorInfo* scale = module.Find(found.scale);
  if (!IsScaleType(scale->dtype)) {
    return module.Error(absl::StrCat("tensor ", scale->name, " is ", scale->ToString(),
                                     "; F32 or BF16 is expected"));
  }
  if (scheme.activation == ActivationScheme::kFp8Static) {
    scheme.input_scale = "input_scale";
    RETURN_IF_ERROR(module.Expect(scheme.input_scale, {DType::kF32, DType::kBF16}, {{}, {1}}));
  }
  return scheme;
}

class Resolver : public SchemeResolver {
 public:
  Resolver(const Checkpoint* checkpoint, std::vector<std::unique_ptr<QuantRules>> rules)
      : checkpoint_(checkpoint), rules_(std::move(rules)) {}

  absl::StatusOr<LinearScheme> Resolve(const std::string& name, int64_t n,
                                       int64_t k) const override {
    CHECK(n > 0 && k > 0) << name << " [" << n << ", " << k << "] ";
    const Module module{checkpoint_, name, n, k};
    ASSIGN_OR_RETURN(DeclaredScheme declared, Declare(module));
    ASSIGN_OR_RETURN(const Found found, FindTensors(module));
    const bool quantized = declared.weight != WeightScheme::kBF16;
    if (quantized != found.quantized()) {
      ASSIGN_OR_RETURN(declared, TensorsWin(module, found, declared));
    } else if (found.candidates.count(declared.weight) == 0) {
      return module.Error(absl::StrCat("the config says ", Name(declared.weight),
                                       ", the tensors are ", Shown(found)));
    }
    return Describe(module, found, declared);
  }

  std::string Summary() const override {
    std::vector<std::string> producers;
    std::set<WeightScheme> schemes;
    for (const auto& rules : rules_) {
      if (producers.empty() || producers.back() != rules->producer()) {
        producers.push_back(rules->producer());
      }
      for (WeightScheme scheme : rules->schemes()) schemes.insert(scheme);
    }
    std::vector<std::string> names;
    for (WeightScheme scheme : schemes) {
      if (scheme != WeightScheme::kBF16) names.emplace_back(Name(scheme));
    }
    if (names.empty()) return Name(WeightScheme::kBF16);
    return absl::StrCat(absl::StrJoin(producers, ", "), ": ", absl::StrJoin(names, " + "));
  }

 private:
  static std::string Shown(const Found& found) {
    std::vector<std::string> names;
    for (WeightScheme scheme : found.candidates) names.emplace_back(Name(scheme));
    return absl::StrJoin(names, " or ");
  }

  // All configs must agree.
  absl::StatusOr<DeclaredScheme> Declare(const Module& module) const {
    DeclaredScheme declared;
    for (size_t i = 0; i < rules_.size(); ++i) {
      ASSIGN_OR_RETURN(const DeclaredScheme one, rules_[i]->Declare(module.name));
      if (i > 0 && !(one == declared)) {
        return module.Error(absl::StrCat("config.json says ", Name(declared.weight),
                                         " (activations ", Name(declared.activation),
                                         "), hf_quant_config.json says ", Name(one.weight),
                                         " (activations ", Name(one.activation), ")"));
      }
      declared = one;
    }
    return declared;
  }

  // The config and the tensors disagree about "quantized or not".
  absl::StatusOr<DeclaredScheme> TensorsWin(const Module& module, const Found& found,
                                            const DeclaredScheme& declared) const {
    if (found.candidates.size() != 1) {
      return module.Error(absl::StrCat("the config says ", Name(declared.weight),
                                       ", the tensors may be ", Shown(found), ": ambiguous"));
    }
    const WeightScheme scheme = *found.candidates.begin();
    const int logged = disagreements_.fetch_add(1);
    if (logged < kLoggedDisagreements) {
      LogWarning("module ", module.name, ": the quantization config says ", Name(declared.weight),
                 ", its tensors are ", Name(scheme), "; using ", Name(scheme),
                 logged + 1 == kLoggedDisagreements ? " (more of these are not logged)" : "");
    }
    return DeclaredScheme{scheme, ActivationScheme::kNone};
  }

  const Checkpoint* checkpoint_;
  std::vector<std::unique_ptr<QuantRules>> rules_;
  mutable std::atomic<int> disagreements_{0};
};

// Canonical names of everything that holds a tensor.
std::set<std::string> ModulesOf(const Checkpoint& checkpoint) {
  std::set<std::string> modules;
  for (const auto& item : checkpoint.tensors()) {
    const size_t dot = item.first.rfind('.');
    if (dot != std::string::npos) modules.insert(CanonicalModule(item.first.substr(0, dot)));
  }
  return modules;
}

// The text of a file, empty when there is none.
std::string ReadIfPresent(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in.good()) return std::string();
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

template <typename AnyJson>
const AnyJson* FindConfig(const AnyJson& root) {
  if (!root.is_object()) return nullptr;
  const auto it = root.find("quantization_config");
  if (it != root.end() && !it->is_null()) return &*it;
  const auto text = root.find("text_config");
  if (text == root.end() || !text->is_object()) return nullptr;
  const auto nested = text->find("quantization_config");
  return nested == text->end() || nested->is_null() ? nullptr : &*nested;
}

// The keys of config_groups in the order of config.json; empty when the file cannot say.
std::vector<std::string> GroupOrder(const Checkpoint& checkpoint) {
  std::vector<std::string> order;
  const std::string path = checkpoint.directory() + "/config.json";
  const auto root = ParseLenientOrderedJson(ReadIfPresent(path), path);
  if (!root.ok()) return order;
  const nlohmann::ordered_json* config = FindConfig(*root);
  if (config == nullptr || !config->is_object()) return order;
  const auto groups = config->find("config_groups");
  if (groups == config->end() || !groups->is_object()) return order;
  for (const auto& item : groups->items()) order.push_back(item.key());
  return order;
}

}  // namespace

const char* Name(WeightScheme scheme) {
  switch (scheme) {
    case WeightScheme::kBF16:
      return "bf16";
    case WeightScheme::kNvfp4:
      return "nvfp4";
    case WeightScheme::kFp8Tensor:
      return "fp8_tensor";
    case WeightScheme::kFp8Channel:
      return "fp8_channel";
    case WeightScheme::kFp8Block:
      return "fp8_block";
  }
  return "unknown";
}

const char* Name(ActivationScheme scheme) {
  switch (scheme) {
    case ActivationScheme::kNone:
      return "none";
    case ActivationScheme::kFp8Static:
      return "fp8_static";
    case ActivationScheme::kFp8PerToken:
      return "fp8_per_token";
    case ActivationScheme::kFp8Block128:
      return "fp8_block128";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<SchemeResolver>> SchemeResolver::Create(
    const Json& config, const Checkpoint& checkpoint) {
  const std::set<std::string> modules = ModulesOf(checkpoint);
  std::vector<std::unique_ptr<QuantRules>> all;
  const Json* quantization = FindConfig(config);
  if (quantization != nullptr) {
    ASSIGN_OR_RETURN(auto rules,
                     MakeQuantRules(*quantization, checkpoint.directory() + "/config.json", modules,
                                    GroupOrder(checkpoint)));
    all.push_back(std::move(rules));
  }
  const std::string path = checkpoint.directory() + "/hf_quant_config.json";
  const std::string text = ReadIfPresent(path);
  if (!text.empty()) {
    ASSIGN_OR_RETURN(const Json json, ParseLenientJson(text, path));
    ASSIGN_OR_RETURN(auto rules, MakeHfQuantRules(json, path, modules));
    if (rules != nullptr) all.push_back(std::move(rules));
  }
  return std::unique_ptr<SchemeResolver>(std::make_unique<Resolver>(&checkpoint, std::move(all)));
}

}  // namespace lockstep
