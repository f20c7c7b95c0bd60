// ServedModel: what the front end knows of the model that is served. Immutable once published.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/tokenizer/tokenizer.h"

namespace lockstep {

struct ServedModel {
  std::string name;
  std::vector<std::string> aliases;
  std::string architecture;
  std::string quantization;  // one line
  int64_t vocab_size = 0;
  int64_t max_context = 0;  // prompt plus output, as enforced
  int32_t tensor_parallel = 1;
  std::string activation_dtype;  // "bf16", "f32"
  std::string activation_quant;  // "none", "checkpoint"
  int64_t kv_capacity_tokens = 0;
  uint64_t checkpoint_digest = 0;
  std::vector<int32_t> eos_token_ids;
  // nullptr: the checkpoint has no tokenizer.json, and only token ids are served.
  std::shared_ptr<const Tokenizer> tokenizer;
  // The tokenizer has the marks of the ChatML template.
  bool has_chat_template = false;

  // True for the empty name, the name and every alias.
  bool Answers(const std::string& asked) const {
    if (asked.empty() || asked == name) return true;
    for (const std::string& alias : aliases) {
      if (alias == asked) return true;
    }
    return false;
  }
};

}  // namespace lockstep
