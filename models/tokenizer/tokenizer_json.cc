// Parses tokenizer.json. Whatever would change an id and is not understood is refused.
#include "models/tokenizer/tokenizer_json.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "models/tokenizer/byte_alphabet.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Behavior = PreTokenizerStep::Behavior;

constexpr char kGpt2Pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
constexpr int kMaxNesting = 8;  // of Sequence in Sequence

absl::Status Broken(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("tokenizer.json: ", what));
}
absl::Status Unsupported(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("tokenizer.json: ", what, " is not supported"));
}

// The member, or null when `object` is no object or has none of that name.
const Json& Member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) {
    return null;
  }
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

absl::StatusOr<bool> BoolMember(const Json& object, const char* key, bool fallback) {
  const Json& value = Member(object, key);
  if (value.is_null()) {
    return fallback;
  }
  if (!value.is_boolean()) {
    return Broken(absl::StrCat("\"", key, "\" is ", value.type_name(), ", expected a boolean"));
  }
  return value.get<bool>();
}

std::string StringMember(const Json& object, const char* key) {
  const Json& value = Member(object, key);
  return value.is_string() ? value.get<std::string>() : "";
}

bool IsOff(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         (value.is_number() && value.get<double>() == 0.0) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

// The name of a component for messages: its type, or what it is instead of an object.
std::string TypeOf(const Json& component) {
  const std::string type = StringMember(component, "type");
  return type.empty() ? absl::StrCat("a ", component.type_name(), " without a type") : type;
}

absl::Status ReadNormalizer(const Json& json, int depth, TokenizerFile* file) {
  if (json.is_null()) {
    return absl::OkStatus();
  }
  const std::string type = TypeOf(json);
  if (type == "NFC") {
    file->normalize_nfc = true;
    return absl::OkStatus();
  }
  const Json& parts = Member(json, "normalizers");
  if (type == "Sequence" && parts.is_array() && depth < kMaxNesting) {
    for (const Json& part : parts) {
      RETURN_IF_ERROR(ReadNormalizer(part, depth + 1, file));
    }
    return absl::OkStatus();
  }
  return Unsupported(absl::StrCat("normalizer ", type));
}

absl::StatusOr<PreTokenizerStep> ReadSplit(const Json& json) {
  PreTokenizerStep step;
  const Json& pattern = Member(json, "pattern");
  if (Member(pattern, "Regex").is_string()) {
    step.pattern = StringMember(pattern, "Regex");
  } else if (Member(pattern, "String").is_string()) {
    step.pattern = StringMember(pattern, "String");
    step.literal = true;
  } else {
    return Broken("a Split pre_tokenizer has no Regex or String pattern");
  }
  ASSIGN_OR_RETURN(const bool invert, BoolMember(json, "invert", false));
  const std::string behavior = StringMember(json, "behavior");
  if (behavior == "Isolated") {
    step.behavior = Behavior::kIsolated;
  } else if (behavior == "Removed") {
    step.behavior = invert ? Behavior::kKeepMatches : Behavior::kKeepGaps;
  } else {
    return Unsupported(absl::StrCat("pre_tokenizer Split with behavior \"", behavior, "\""));
  }
  return step;
}

// Appends the steps; `byte_level` becomes true at ByteLevel, which must be the last component:
// those after it would see the byte alphabet instead of the text.
absl::Status ReadPreTokenizer(const Json& json, int depth, bool* byte_level, TokenizerFile* file) {
  const std::string type = TypeOf(json);
  const Json& parts = Member(json, "pretokenizers");
  if (type == "Sequence" && parts.is_array() && depth < kMaxNesting) {
    for (const Json& part : parts) {
      RETURN_IF_ERROR(ReadPreTokenizer(part, depth + 1, byte_level, file));
    }
    return absl::OkStatus();
  }
  if (*byte_level) {
    return Unsupported(absl::StrCat("pre_tokenizer ", type, " after ByteLevel"));
  }
  if (type == "Split") {
    ASSIGN_OR_RETURN(PreTokenizerStep step, ReadSplit(json));
    file->pre_tokenizer.push_back(std::move(step));
  } else if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, BoolMember(json, "individual_digits", false));
    file->pre_tokenizer.push_back({Behavior::kIsolated, individual ? "\\p{N}" : "\\p{N}+"});
  } else if (type == "ByteLevel") {
    *byte_level = true;
    ASSIGN_OR_RETURN(const bool add_prefix_space, BoolMember(json, "add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool use_regex, BoolMember(json, "use_regex", true));
    if (add_prefix_space) {
      file->pre_tokenizer.push_back({Behavior::kAddPrefixSpace, ""});
    }
    if (use_regex) {
      file->pre_tokenizer.push_back({Behavior::kIsolated, kGpt2Pattern});
    }
  } else {
    return Unsupported(absl::StrCat("pre_tokenizer ", type));
  }
  return absl::OkStatus();
}

absl::Status ReadPostProcessor(const Json& json, int depth) {
  const std::string type = TypeOf(json);
  if (json.is_null() || type == "ByteLevel" || type == "TemplateProcessing") {
    return absl::OkStatus();  // offsets, or special tokens around the text: neither is ours to add
  }
  const Json& parts = Member(json, "processors");
  if (type == "Sequence" && parts.is_array() && depth < kMaxNesting) {
    for (const Json& part : parts) {
      RETURN_IF_ERROR(ReadPostProcessor(part, depth + 1));
    }
    return absl::OkStatus();
  }
  return Unsupported(absl::StrCat("post_processor ", type));
}

// The bytes of a written token. One with a character outside the byte alphabet stands for itself.
std::string WrittenBytes(const std::string& written) {
  std::string bytes;
  return AlphabetToBytes(written, &bytes) ? bytes : written;
}

absl::StatusOr<std::pair<std::string, std::string>> ReadMerge(const Json& json) {
  std::string left;
  std::string right;
  if (json.is_array() && json.size() == 2 && json[0].is_string() && json[1].is_string()) {
    left = json[0].get<std::string>();
    right = json[1].get<std::string>();
  } else if (json.is_string()) {
    const std::string& both = json.get_ref<const std::string&>();
    const size_t space = both.find(' ');
    if (space != std::string::npos && both.find(' ', space + 1) == std::string::npos) {
      left = both.substr(0, space);
      right = both.substr(space + 1);
    }
  }
  if (left.empty() || right.empty()) {
    return Broken(absl::StrCat("merge ", json.dump(), " is not two tokens"));
  }
  return std::make_pair(WrittenBytes(left), WrittenBytes(right));
}

absl::Status ReadModel(const Json& json, TokenizerFile* file) {
  const std::string type = StringMember(json, "type");
  if (!type.empty() && type != "BPE") {
    return Unsupported(absl::StrCat("model ", type));
  }
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                          "byte_fallback"}) {
    if (!IsOff(Member(json, key))) {
      return Unsupported(absl::StrCat("model.", key, " ", Member(json, key).dump()));
    }
  }
  const Json& vocab = Member(json, "vocab");
  const Json& merges = Member(json, "merges");
  if (!vocab.is_object() || !merges.is_array()) {
    return Broken("the model has no \"vocab\" object or no \"merges\" array");
  }
  BpeConfig& model = file->model;
  ASSIGN_OR_RETURN(model.ignore_merges, BoolMember(json, "ignore_merges", false));
  const std::string unknown = StringMember(json, "unk_token");
  for (const auto& [written, id] : vocab.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() != id.get<int32_t>()) {
      return Broken(absl::StrCat("the id of \"", written, "\" is ", id.dump(),
                                 ", expected a 32-bit integer"));
    }
    model.vocab.emplace_back(WrittenBytes(written), id.get<int32_t>());
    if (!unknown.empty() && written == unknown) {
      model.unknown_id = id.get<int32_t>();
    }
  }
  model.merges.reserve(merges.size());
  for (const Json& merge : merges) {
    ASSIGN_OR_RETURN(auto pair, ReadMerge(merge));
    model.merges.push_back(std::move(pair));
  }
  return absl::OkStatus();
}

absl::StatusOr<AddedToken> ReadAddedToken(const Json& json) {
  AddedToken token;
  const Json& id = Member(json, "id");
  token.content = StringMember(json, "content");
  if (!id.is_number_integer() || token.content.empty()) {
    return Broken(absl::StrCat("added token ", json.dump(), " lacks an id or its content"));
  }
  constexpr int64_t kMaxId = 1 << 24;
  if (id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxId) {
    return Broken(absl::StrCat("added token \"", token.content, "\" has id ", id.dump(),
                               "; expected 0 to ", kMaxId - 1));
  }
  token.id = id.get<int32_t>();
  ASSIGN_OR_RETURN(token.special, BoolMember(json, "special", false));
  ASSIGN_OR_RETURN(token.normalized, BoolMember(json, "normalized", !token.special));
  ASSIGN_OR_RETURN(token.lstrip, BoolMember(json, "lstrip", false));
  ASSIGN_OR_RETURN(token.rstrip, BoolMember(json, "rstrip", false));
  ASSIGN_OR_RETURN(token.single_word, BoolMember(json, "single_word", false));
  return token;
}

absl::Status ApplyConfig(const std::string& text, TokenizerFile* file) {
  const Json config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return absl::DataLossError("tokenizer_config.json is not a JSON object");
  }
  const Json& eos = Member(config, "eos_token");
  file->eos_token = eos.is_string() ? eos.get<std::string>() : StringMember(eos, "content");
  const std::string pattern = StringMember(config, "pretokenize_regex");
  if (pattern.empty()) {
    return absl::OkStatus();
  }
  PreTokenizerStep* split = nullptr;
  for (PreTokenizerStep& step : file->pre_tokenizer) {
    if (!step.pattern.empty() && !step.literal) {
      if (split != nullptr) {
        return Unsupported("pretokenize_regex beside several patterns in tokenizer.json");
      }
      split = &step;
    }
  }
  if (split == nullptr) {
    return Unsupported("pretokenize_regex beside no pattern in tokenizer.json");
  }
  if (split->pattern != pattern) {
    LogWarning("tokenizer_config.json's pretokenize_regex \"", pattern,
               "\" replaces tokenizer.json's pattern \"", split->pattern, "\"");
    split->pattern = pattern;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerFile> ParseTokenizerJson(const std::string& tokenizer_json,
                                                 const std::string& tokenizer_config_json) {
  const Json json = Json::parse(tokenizer_json, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return Broken("not a JSON object");
  }
  TokenizerFile file;
  for (const char* key : {"truncation", "padding"}) {
    if (!IsOff(Member(json, key))) {
      return Unsupported(key);
    }
  }
  RETURN_IF_ERROR(ReadModel(Member(json, "model"), &file));
  RETURN_IF_ERROR(ReadNormalizer(Member(json, "normalizer"), 0, &file));
  bool byte_level = false;
  RETURN_IF_ERROR(ReadPreTokenizer(Member(json, "pre_tokenizer"), 0, &byte_level, &file));
  if (!byte_level) {
    return Unsupported("a pre_tokenizer without ByteLevel");
  }
  RETURN_IF_ERROR(ReadPostProcessor(Member(json, "post_processor"), 0));
  const Json& decoder = Member(json, "decoder");
  if (!decoder.is_null() && TypeOf(decoder) != "ByteLevel") {
    return Unsupported(absl::StrCat("decoder ", TypeOf(decoder)));
  }
  const Json& added = Member(json, "added_tokens");
  if (!added.is_null() && !added.is_array()) {
    return Broken("\"added_tokens\" is not an array");
  }
  for (const Json& item : added) {
    ASSIGN_OR_RETURN(AddedToken token, ReadAddedToken(item));
    file.added_tokens.push_back(std::move(token));
  }
  if (!tokenizer_config_json.empty()) {
    RETURN_IF_ERROR(ApplyConfig(tokenizer_config_json, &file));
  }
  return file;
}

}  // namespace lockstep
