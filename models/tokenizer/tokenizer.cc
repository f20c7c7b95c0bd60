// The byte-level BPE tokenizer: added tokens, normalizer, pre-tokenizer and merges in turn.
#include "models/tokenizer/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/tokenizer/added_tokens.h"
#include "models/tokenizer/bpe.h"
#include "models/tokenizer/normalizer.h"
#include "models/tokenizer/pre_tokenizer.h"
#include "models/tokenizer/tokenizer_json.h"

namespace lockstep {
namespace {

class BpeTokenizer : public Tokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(TokenizerFile file) {
    auto tokenizer = std::make_unique<BpeTokenizer>();
    tokenizer->normalize_nfc_ = file.normalize_nfc;
    ASSIGN_OR_RETURN(tokenizer->pre_tokenizer_, PreTokenizer::Create(file.pre_tokenizer));
    ASSIGN_OR_RETURN(tokenizer->model_, BpeModel::Create(std::move(file.model)));
    tokenizer->size_ = tokenizer->model_->size();
    for (AddedToken& token : file.added_tokens) {
      RETURN_IF_ERROR(tokenizer->AddToken(std::move(token)));
    }
    if (!file.eos_token.empty()) {
      tokenizer->eos_id_ = tokenizer->FindToken(file.eos_token);
    }
    return tokenizer;
  }

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              bool parse_special) const override {
    size_t bad = 0;
    if (!IsValidUtf8(text, &bad)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the text is not UTF-8: invalid sequence at byte ", bad, " of ", text.size(),
                       "; send valid UTF-8 or token ids"));
    }
    std::vector<int32_t> ids;
    if (!parse_special) {
      RETURN_IF_ERROR(EncodePlain(Normalized(text), &ids));
      return ids;
    }
    for (const AddedTokenSpan& raw : raw_added_.Split(text)) {
      if (raw.id >= 0) {
        ids.push_back(raw.id);
        continue;
      }
      const std::string normalized = Normalized(raw.text);
      for (const AddedTokenSpan& span : normalized_added_.Split(normalized)) {
        if (span.id >= 0) {
          ids.push_back(span.id);
        } else {
          RETURN_IF_ERROR(EncodePlain(span.text, &ids));
        }
      }
    }
    return ids;
  }

  absl::string_view TokenBytes(int32_t id, bool skip_special) const override {
    const auto it = added_.find(id);
    if (it == added_.end()) {
      return model_->TokenBytes(id);
    }
    return skip_special && it->second.special ? absl::string_view() : it->second.content;
  }

  int32_t size() const override { return size_; }
  bool IsSpecial(int32_t id) const override {
    const auto it = added_.find(id);
    return it != added_.end() && it->second.special;
  }
  int32_t FindToken(absl::string_view content) const override {
    const auto it = added_ids_.find(content);
    return it == added_ids_.end() ? model_->FindToken(content) : it->second;
  }
  int32_t eos_id() const override { return eos_id_; }

 private:
  absl::Status AddToken(AddedToken token) {
    const absl::string_view in_model = model_->TokenBytes(token.id);
    if (!in_model.empty() && in_model != token.content) {
      return absl::DataLossError(absl::StrCat("tokenizer.json: added token \"", token.content,
                                              "\" has the id ", token.id,
                                              " of another vocabulary token"));
    }
    if (added_.contains(token.id) || added_ids_.contains(token.content)) {
      return absl::DataLossError(absl::StrCat("tokenizer.json: added token \"", token.content,
                                              "\", id ", token.id, ", is there twice"));
    }
    added_ids_.emplace(token.content, token.id);
    size_ = std::max(size_, token.id + 1);
    if (token.normalized) {
      AddedToken searched = token;
      searched.content = Normalized(token.content);
      normalized_added_.Add(searched);
    } else {
      raw_added_.Add(token);
    }
    added_.emplace(token.id, std::move(token));
    return absl::OkStatus();
  }

  std::string Normalized(absl::string_view text) const {
    return normalize_nfc_ ? NormalizeNfc(text) : std::string(text);
  }

  absl::Status EncodePlain(absl::string_view text, std::vector<int32_t>* ids) const {
    return pre_tokenizer_->Split(text,
                                 [&](absl::string_view piece) { model_->EncodePiece(piece, ids); });
  }

  bool normalize_nfc_ = false;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  std::unique_ptr<BpeModel> model_;
  AddedTokens raw_added_;
  AddedTokens normalized_added_;
  absl::flat_hash_map<int32_t, AddedToken> added_;
  absl::flat_hash_map<std::string, int32_t> added_ids_;
  int32_t size_ = 0;
  int32_t eos_id_ = -1;
};

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream contents;
  if (!in || !(contents << in.rdbuf())) {
    return absl::DataLossError(absl::StrCat(path, " cannot be read or is empty"));
  }
  return contents.str();
}

bool IsThere(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& directory) {
  const std::string path = directory + "/tokenizer.json";
  const std::string config_path = directory + "/tokenizer_config.json";
  if (!IsThere(path)) {
    return absl::NotFoundError(absl::StrCat("no tokenizer.json in \"", directory, "\""));
  }
  ASSIGN_OR_RETURN(const std::string json, ReadFile(path));
  std::string config;
  if (IsThere(config_path)) {
    ASSIGN_OR_RETURN(config, ReadFile(config_path));
  }
  absl::StatusOr<TokenizerFile> file = ParseTokenizerJson(json, config);
  absl::Status status = file.status();
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = BpeTokenizer::Create(*std::move(file));
    if (tokenizer.ok()) {
      return tokenizer;
    }
    status = tokenizer.status();
  }
  return absl::Status(status.code(), absl::StrCat(directory, ": ", status.message()));
}

std::string Tokenizer::DecodeBytes(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    const absl::string_view token = TokenBytes(id, skip_special);
    bytes.append(token.data(), token.size());
  }
  return bytes;
}

}  // namespace lockstep
