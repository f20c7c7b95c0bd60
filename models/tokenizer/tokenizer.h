// Tokenizer: Hugging Face `tokenizer.json`, byte-level BPE. Immutable and thread safe after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "models/tokenizer/chat_ml.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {

class Tokenizer {
 public:
  // NotFound when the directory has no tokenizer.json. Unimplemented names a component of the file
  // that is not supported; DataLoss a broken file. tokenizer_config.json's `pretokenize_regex` wins
  // over the file's pattern when they differ (logged).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& directory);
  virtual ~Tokenizer() = default;

  // InvalidArgument when `text` is not UTF-8 (with the byte offset). Added tokens in the text
  // become their ids when `parse_special`, and are plain text otherwise. No begin or end token is
  // added. ResourceExhausted when a pre-tokenizer pattern needs more than its step limit.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                                      bool parse_special = true) const = 0;

  // The bytes of one id; empty for special ids when `skip_special`, and for ids that the tokenizer
  // does not have (padding rows of the vocabulary).
  virtual absl::string_view TokenBytes(int32_t id, bool skip_special) const = 0;
  // Bytes of all ids. May be no UTF-8 when the ids are not whole characters.
  std::string DecodeBytes(const std::vector<int32_t>& ids, bool skip_special) const;

  virtual int32_t size() const = 0;  // ids are in [0, size)
  virtual bool IsSpecial(int32_t id) const = 0;
  // Id of an added or vocabulary token by its bytes (" Paris"); -1 when there is none.
  virtual int32_t FindToken(absl::string_view content) const = 0;
  // `eos_token` of tokenizer_config.json; -1 when unknown.
  virtual int32_t eos_id() const = 0;
};

}  // namespace lockstep
