// ModelConfig: config.json, generation_config.json and the limits read from them. Text parts nested
// in `text_config` are found; synonyms are accepted; non-finite literals (Infinity, NaN) and
// {"__float__": "Infinity"} are numbers; of duplicate keys the last wins; unknown keys are ignored.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace lockstep {

struct ModelConfig {
  std::string directory;
  std::string model_type;  // of the text part, e.g. "qwen3_5_text"
  nlohmann::json root;     // config.json whole
  nlohmann::json text;     // the text part (root itself when not nested)
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;  // num_hidden_layers, else the length of the list of layer types
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  std::vector<int32_t> eos_token_ids;  // generation_config and config, merged, ascending

  // Typed reads of a key of the text part. InvalidArgument names file, key, what is there and what
  // was expected. The default variants accept an absent or null key.
  absl::StatusOr<int64_t> Int(const std::string& key) const;
  int64_t IntOr(const std::string& key, int64_t fallback) const;
  absl::StatusOr<double> Number(const std::string& key) const;
  double NumberOr(const std::string& key, double fallback) const;
  bool BoolOr(const std::string& key, bool fallback) const;
  // "dtype" and "torch_dtype" are synonyms.
  std::string StringOr(const std::string& key, const std::string& fallback) const;
  // rope_parameters.<key>, else rope_scaling.<key> (where "type" means "rope_type"), else <key> at
  // the top of the text part.
  double RopeNumberOr(const std::string& key, double fallback) const;
  std::string RopeStringOr(const std::string& key, const std::string& fallback) const;

  // InvalidArgument "<directory>/config.json: <what> (model_type <type>)".
  absl::Status Refuse(absl::string_view what) const;
  // Refuse unless 1 <= value <= 2^20.
  absl::Status CheckSize(absl::string_view key, int64_t value) const;
  // Unimplemented, naming what the value is and what this build supports.
  absl::Status Unsupported(absl::string_view key, absl::string_view value,
                           absl::string_view supported) const;
};

// NotFound without config.json; DataLoss for one that is no JSON object; InvalidArgument for
// missing or impossible values. Sizes are 1 to 2^31 - 1, eos ids inside the vocabulary.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory);

// JSON as checkpoints write it (see above). DataLoss names `what` and the byte offset.
absl::StatusOr<nlohmann::json> ParseLenientJson(const std::string& text, const std::string& what);
// The same with object keys in the order of the text (of duplicate keys the place of the first and
// the value of the last).
absl::StatusOr<nlohmann::ordered_json> ParseLenientOrderedJson(const std::string& text,
                                                               const std::string& what);

}  // namespace lockstep
