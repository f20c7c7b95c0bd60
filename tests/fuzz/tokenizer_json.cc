// tokenizer.json and, after a zero byte, tokenizer_config.json of any bytes: an error, or a
// tokenizer whose ids are its own.
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/base/check.h"
#include "models/tokenizer/tokenizer.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;  // NOLINT: an entry point outside of it
  static const fuzz::TempFolder temp;
  const std::string& folder = temp.path();
  const absl::string_view input = fuzz::FuzzInput(data, size).Rest();
  const size_t zero = input.find('\0');
  fuzz::WriteFile(folder + "/tokenizer.json", input.substr(0, zero));
  const std::string config = folder + "/tokenizer_config.json";
  if (zero == absl::string_view::npos) {
    std::remove(config.c_str());
  } else {
    fuzz::WriteFile(config, input.substr(zero + 1));
  }
  const auto tokenizer = Tokenizer::Load(folder);
  if (!tokenizer.ok()) return 0;
  const int32_t count = (*tokenizer)->size();
  CHECK((*tokenizer)->eos_id() < count);
  for (const char* text :
       {"", "Hello world", " the  <|im_start|>user\n12,345",
        "\xC3\xA9\xE6\x97\xA5 \xF0\x9F\x98\x80", "aaaaaaaaaaaaaaaa\t\r\n  'll"}) {
    for (const bool special : {false, true}) {
      const auto ids = (*tokenizer)->Encode(text, special);
      if (!ids.ok()) {
        CHECK(absl::IsResourceExhausted(ids.status()) || absl::IsInvalidArgument(ids.status()))
            << ids.status().ToString();
        continue;
      }
      for (const int32_t id : *ids) CHECK(id >= 0 && id < count) << id;
      (void)(*tokenizer)->DecodeBytes(*ids, special);
    }
  }
  (void)(*tokenizer)->TokenBytes(-1, false);
  (void)(*tokenizer)->TokenBytes(count, false);
  (void)(*tokenizer)->FindToken("Hello");
  return 0;
}
