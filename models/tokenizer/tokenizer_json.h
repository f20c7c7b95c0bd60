// Reads the `tokenizer.json` of a byte-level BPE tokenizer into its parts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/tokenizer/added_tokens.h"
#include "models/tokenizer/bpe.h"
#include "models/tokenizer/pre_tokenizer.h"

namespace lockstep {

struct TokenizerFile {
  bool normalize_nfc = false;
  std::vector<PreTokenizerStep> pre_tokenizer;
  BpeConfig model;  // bytes, no longer in the byte alphabet
  std::vector<AddedToken> added_tokens;
  std::string eos_token;  // content; empty when unknown
};

// `tokenizer_json` and `tokenizer_config_json` are the contents of the files; the second may be
// empty. DataLoss: no JSON, or a part that is missing or of the wrong type. Unimplemented: a
// component that would change ids and is not supported, by its name. A `pretokenize_regex` of the
// second file replaces the pattern of the first when they differ, which is logged.
absl::StatusOr<TokenizerFile> ParseTokenizerJson(const std::string& tokenizer_json,
                                                 const std::string& tokenizer_config_json);

}  // namespace lockstep
