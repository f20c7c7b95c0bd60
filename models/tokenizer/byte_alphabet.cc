// The byte alphabet as two tables, built once.
#include "models/tokenizer/byte_alphabet.h"

#include <array>
#include <utility>

#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

constexpr uint32_t kFirstSubstitute = 0x100;
constexpr int kNumSubstitutes = 68;

struct Tables {
  std::array<uint32_t, 256> forward;
  std::array<int16_t, kFirstSubstitute + kNumSubstitutes> backward;  // -1: not in the alphabet
};

bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

const Tables& GetTables() {
  static const Tables tables = [] {
    Tables t;
    t.backward.fill(-1);
    uint32_t next = kFirstSubstitute;
    for (int byte = 0; byte < 256; ++byte) {
      t.forward[byte] = StandsForItself(byte) ? static_cast<uint32_t>(byte) : next++;
      t.backward[t.forward[byte]] = static_cast<int16_t>(byte);
    }
    return t;
  }();
  return tables;
}

}  // namespace

uint32_t ByteToAlphabet(uint8_t byte) { return GetTables().forward[byte]; }

bool AlphabetToBytes(absl::string_view text, std::string* out) {
  const Tables& tables = GetTables();
  std::string bytes;
  while (!text.empty()) {
    const Utf8Unit unit = NextUtf8(text);
    if (unit.kind != Utf8Kind::kValid || unit.codepoint >= tables.backward.size() ||
        tables.backward[unit.codepoint] < 0) {
      return false;
    }
    bytes.push_back(static_cast<char>(tables.backward[unit.codepoint]));
    text.remove_prefix(unit.length);
  }
  *out = std::move(bytes);
  return true;
}

}  // namespace lockstep
