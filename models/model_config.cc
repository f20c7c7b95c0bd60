// Implementation of ModelConfig and of the lenient JSON reader.
#include "models/model_config.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr int kMaxNesting = 256;
constexpr const char* kFloatKey = "__float__";
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

// The text with every bare non-finite literal written as {"__float__": "..."}.
struct Prescan {
  std::string text;
  std::vector<std::pair<size_t, size_t>> added;  // position in `text`, bytes added up to there

  // Position in the original text of a position in `text`.
  size_t Original(size_t position) const {
    size_t shift = 0;
    for (const auto& entry : added) {
      if (entry.first <= position) shift = entry.second;
    }
    return position >= shift ? position - shift : 0;
  }
};

bool IsWordByte(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// The non-finite literal that begins at `at`, or an empty view.
absl::string_view LiteralAt(absl::string_view text, size_t at) {
  for (const absl::string_view word : {"-Infinity", "Infinity", "NaN"}) {
    if (!absl::StartsWith(text.substr(at), word)) continue;
    const size_t end = at + word.size();
    const bool starts = at == 0 || !IsWordByte(text[at - 1]);
    if (starts && (end == text.size() || !IsWordByte(text[end])))
      return text.substr(at, word.size());
  }
  return absl::string_view();
}

absl::StatusOr<Prescan> ReplaceLiterals(const std::string& text, const std::string& what) {
  Prescan out;
  out.text.reserve(text.size());
  int depth = 0;
  bool in_string = false;
  size_t added = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      out.text.push_back(c);
      if (c == '\\' && i + 1 < text.size()) out.text.push_back(text[++i]);
      if (c == '"') in_string = false;
      continue;
    }
    const absl::string_view literal = LiteralAt(text, i);
    if (!literal.empty()) {
      const std::string object = absl::StrCat("{\"", kFloatKey, "\":\"", literal, "\"}");
      out.text += object;
      added += object.size() - literal.size();
      out.added.emplace_back(out.text.size(), added);
      i += literal.size() - 1;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth > kMaxNesting) {
      return absl::DataLossError(
          absl::StrCat(what, ": nests deeper than ", kMaxNesting, " levels at byte ", i));
    }
    out.text.push_back(c);
  }
  return out;
}

// Turns {"__float__": "Infinity"} objects into numbers, everywhere.
template <typename AnyJson>
void RestoreFloats(AnyJson* json) {
  if (json->is_object() && json->size() == 1) {
    const auto it = json->find(kFloatKey);
    if (it != json->end() && it->is_string()) {
      const std::string name = it->template get<std::string>();
      double value = 0;
      if (absl::SimpleAtod(name, &value)) {
        *json = value;
        return;
      }
    }
  }
  if (json->is_structured()) {
    for (auto& item : *json) RestoreFloats(&item);
  }
}

template <typename AnyJson>
absl::StatusOr<AnyJson> ParseLenient(const std::string& text, const std::string& what) {
  ASSIGN_OR_RETURN(const Prescan scan, ReplaceLiterals(text, what));
  AnyJson json;
  try {
    json = AnyJson::parse(scan.text);
  } catch (const nlohmann::detail::parse_error& error) {
    return absl::DataLossError(absl::StrCat(what, ": not valid JSON at byte ",
                                            scan.Original(error.byte > 0 ? error.byte - 1 : 0)));
  } catch (const nlohmann::detail::exception& error) {
    return absl::DataLossError(absl::StrCat(what, ": not valid JSON: ", error.what()));
  }
  RestoreFloats(&json);
  return json;
}

// The value of a key, or nullptr when absent or null.
const Json* FindKey(const Json& object, const std::string& key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

absl::Status BadKey(const std::string& directory, const std::string& key, const Json* value,
                    const std::string& expected) {
  return absl::InvalidArgumentError(absl::StrCat(directory, "/config.json: \"", key, "\" is ",
                                                 value == nullptr ? "absent" : Shown(*value), "; ",
                                                 expected, " is expected"));
}

// An integer, also one written as 5120.0.
bool ReadInt(const Json& value, int64_t* out) {
  if (value.is_number_unsigned()) {
    const uint64_t v = value.get<uint64_t>();
    if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
    *out = static_cast<int64_t>(v);
    return true;
  }
  if (value.is_number_integer()) {
    *out = value.get<int64_t>();
    return true;
  }
  if (!value.is_number_float()) return false;
  const double v = value.get<double>();
  if (!(std::fabs(v) <= 9007199254740992.0) || v != std::floor(v)) return false;
  *out = static_cast<int64_t>(v);
  return true;
}

bool ReadNumber(const Json& value, double* out) {
  if (!value.is_number()) return false;
  *out = value.get<double>();
  return true;
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in.good()) return absl::NotFoundError(absl::StrCat("no file ", path));
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

// A size: an integer from 1 to 2^31 - 1.
absl::Status ReadSize(const ModelConfig& config, const std::string& key, int64_t* out) {
  ASSIGN_OR_RETURN(*out, config.Int(key));
  if (*out >= 1 && *out <= kMaxSize) return absl::OkStatus();
  return BadKey(config.directory, key, FindKey(config.text, key),
                absl::StrCat("an integer from 1 to ", kMaxSize));
}

// num_hidden_layers, or the length of the list (or string) that gives each layer its type.
absl::Status ReadNumLayers(ModelConfig* config) {
  if (FindKey(config->text, "num_hidden_layers") == nullptr) {
    for (const char* key : {"layers_block_type", "layer_types", "hybrid_override_pattern"}) {
      const Json* value = FindKey(config->text, key);
      if (value == nullptr) continue;
      config->num_layers = static_cast<int64_t>(
          value->is_string() ? value->get_ref<const std::string&>().size() : value->size());
      if (config->num_layers >= 1 && (value->is_string() || value->is_array())) {
        return absl::OkStatus();
      }
    }
  }
  return ReadSize(*config, "num_hidden_layers", &config->num_layers);
}

// Adds the ids of an eos_token_id entry: an integer or a list of them.
absl::Status AddEosIds(const Json* value, const std::string& file, int64_t vocab_size,
                       std::set<int32_t>* ids) {
  if (value == nullptr) return absl::OkStatus();
  const std::vector<Json> list =
      value->is_array() ? value->get<std::vector<Json>>() : std::vector<Json>{*value};
  for (const Json& item : list) {
    int64_t id = 0;
    if (!ReadInt(item, &id) || id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": \"eos_token_id\" has ", Shown(item),
                                                     "; token ids from 0 to ", vocab_size - 1,
                                                     " are expected"));
    }
    ids->insert(static_cast<int32_t>(id));
  }
  return absl::OkStatus();
}

absl::Status ReadEos(ModelConfig* config) {
  std::set<int32_t> ids;
  const std::string config_file = absl::StrCat(config->directory, "/config.json");
  for (const Json* part : {&config->text, &config->root}) {
    RETURN_IF_ERROR(
        AddEosIds(FindKey(*part, "eos_token_id"), config_file, config->vocab_size, &ids));
  }
  const std::string path = absl::StrCat(config->directory, "/generation_config.json");
  const absl::StatusOr<std::string> text = ReadText(path);
  if (text.ok()) {
    ASSIGN_OR_RETURN(const Json generation, ParseLenientJson(*text, path));
    if (!generation.is_object()) {
      return absl::DataLossError(absl::StrCat(path, ": not a JSON object"));
    }
    RETURN_IF_ERROR(AddEosIds(FindKey(generation, "eos_token_id"), path, config->vocab_size, &ids));
  }
  config->eos_token_ids.assign(ids.begin(), ids.end());
  return absl::OkStatus();
}

// "Qwen3_5ForCausalLM" as "qwen3_5", "NemotronHForCausalLM" as "nemotron_h".
std::string ModelTypeOfArchitecture(const std::string& architecture) {
  std::string name = architecture;
  const size_t suffix = name.find("For");
  if (suffix != std::string::npos && suffix > 0) name.resize(suffix);
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(name[i]);
    const bool word = i > 0 && absl::ascii_isupper(c) &&
                      (absl::ascii_islower(static_cast<unsigned char>(name[i - 1])) ||
                       absl::ascii_isdigit(static_cast<unsigned char>(name[i - 1])));
    if (word) out.push_back('_');
    out.push_back(static_cast<char>(absl::ascii_tolower(c)));
  }
  return out;
}

absl::Status ReadModelType(ModelConfig* config) {
  for (const Json* part : {&config->text, &config->root}) {
    const Json* type = FindKey(*part, "model_type");
    if (type == nullptr) continue;
    if (!type->is_string()) return BadKey(config->directory, "model_type", type, "a string");
    config->model_type = type->get<std::string>();
    return absl::OkStatus();
  }
  for (const Json* part : {&config->text, &config->root}) {
    const Json* list = FindKey(*part, "architectures");
    if (list == nullptr || !list->is_array() || list->empty() || !list->front().is_string()) {
      continue;
    }
    config->model_type = ModelTypeOfArchitecture(list->front().get<std::string>());
    return absl::OkStatus();
  }
  return BadKey(config->directory, "model_type", nullptr,
                "a string (or a list \"architectures\" with a name)");
}

// Where keys of old top-level form may live besides rope_parameters: rope_scaling holds the type.
const Json* FindRope(const Json& text, const std::string& key) {
  for (const char* group : {"rope_parameters", "rope_scaling"}) {
    const Json* nested = FindKey(text, group);
    if (nested == nullptr) continue;
    const Json* value = FindKey(*nested, key);
    if (value == nullptr && key == "rope_type") value = FindKey(*nested, "type");
    if (value != nullptr) return value;
  }
  return FindKey(text, key);
}

}  // namespace

absl::StatusOr<int64_t> ModelConfig::Int(const std::string& key) const {
  const Json* value = FindKey(text, key);
  int64_t out = 0;
  if (value == nullptr || !ReadInt(*value, &out)) {
    return BadKey(directory, key, value, "an integer");
  }
  return out;
}

int64_t ModelConfig::IntOr(const std::string& key, int64_t fallback) const {
  const Json* value = FindKey(text, key);
  int64_t out = 0;
  return value != nullptr && ReadInt(*value, &out) ? out : fallback;
}

absl::StatusOr<double> ModelConfig::Number(const std::string& key) const {
  const Json* value = FindKey(text, key);
  double out = 0;
  if (value == nullptr || !ReadNumber(*value, &out)) {
    return BadKey(directory, key, value, "a number");
  }
  return out;
}

double ModelConfig::NumberOr(const std::string& key, double fallback) const {
  const Json* value = FindKey(text, key);
  double out = 0;
  return value != nullptr && ReadNumber(*value, &out) ? out : fallback;
}

bool ModelConfig::BoolOr(const std::string& key, bool fallback) const {
  const Json* value = FindKey(text, key);
  return value != nullptr && value->is_boolean() ? value->get<bool>() : fallback;
}

std::string ModelConfig::StringOr(const std::string& key, const std::string& fallback) const {
  const Json* value = FindKey(text, key);
  if (value == nullptr && key == "dtype") value = FindKey(text, "torch_dtype");
  if (value == nullptr && key == "torch_dtype") value = FindKey(text, "dtype");
  return value != nullptr && value->is_string() ? value->get<std::string>() : fallback;
}

double ModelConfig::RopeNumberOr(const std::string& key, double fallback) const {
  const Json* value = FindRope(text, key);
  double out = 0;
  return value != nullptr && ReadNumber(*value, &out) ? out : fallback;
}

std::string ModelConfig::RopeStringOr(const std::string& key, const std::string& fallback) const {
  const Json* value = FindRope(text, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : fallback;
}

absl::Status ModelConfig::Refuse(absl::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat(directory, "/config.json: ", what, " (model_type ", model_type, ")"));
}

absl::Status ModelConfig::CheckSize(absl::string_view key, int64_t value) const {
  if (value >= 1 && value <= (int64_t{1} << 20)) return absl::OkStatus();
  return Refuse(absl::StrCat(key, " is ", value, ", must be in [1, 2^20]"));
}

absl::Status ModelConfig::Unsupported(absl::string_view key, absl::string_view value,
                                      absl::string_view supported) const {
  return absl::UnimplementedError(absl::StrCat(directory, "/config.json: ", key, " \"", value,
                                               "\" (model_type ", model_type,
                                               "); supported: ", supported));
}

absl::StatusOr<Json> ParseLenientJson(const std::string& text, const std::string& what) {
  return ParseLenient<Json>(text, what);
}

absl::StatusOr<nlohmann::ordered_json> ParseLenientOrderedJson(const std::string& text,
                                                               const std::string& what) {
  return ParseLenient<nlohmann::ordered_json>(text, what);
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory) {
  ModelConfig config;
  config.directory = directory;
  const std::string path = absl::StrCat(directory, "/config.json");
  ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  ASSIGN_OR_RETURN(config.root, ParseLenientJson(text, path));
  if (!config.root.is_object()) {
    return absl::DataLossError(absl::StrCat(path, ": not a JSON object"));
  }
  const Json* nested = FindKey(config.root, "text_config");
  if (nested != nullptr && !nested->is_object()) {
    return BadKey(directory, "text_config", nested, "an object");
  }
  config.text = nested != nullptr ? *nested : config.root;
  RETURN_IF_ERROR(ReadModelType(&config));
  RETURN_IF_ERROR(ReadSize(config, "vocab_size", &config.vocab_size));
  RETURN_IF_ERROR(ReadSize(config, "hidden_size", &config.hidden_size));
  RETURN_IF_ERROR(ReadNumLayers(&config));
  RETURN_IF_ERROR(ReadSize(config, "max_position_embeddings", &config.max_position_embeddings));
  // A wrapper may say it at the root only.
  const Json* tied = FindKey(config.text, "tie_word_embeddings");
  if (tied == nullptr) tied = FindKey(config.root, "tie_word_embeddings");
  if (tied != nullptr && !tied->is_boolean()) {
    return BadKey(directory, "tie_word_embeddings", tied, "true or false");
  }
  config.tie_word_embeddings = tied != nullptr && tied->get<bool>();
  RETURN_IF_ERROR(ReadEos(&config));
  return config;
}

}  // namespace lockstep
