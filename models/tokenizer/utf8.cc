// UTF-8 decoding by the Unicode Standard's table 3-7.
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

bool IsContinuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

Utf8Unit NextUtf8(absl::string_view bytes) {
  const uint8_t lead = static_cast<uint8_t>(bytes[0]);
  if (lead < 0x80) {
    return {Utf8Kind::kValid, 1, lead};
  }
  if (lead < 0xC2 || lead > 0xF4) {
    return {Utf8Kind::kInvalid, 1, 0};
  }
  const int need = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range is narrower after these leads: overlong forms, surrogates, above
  // U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  uint32_t codepoint = lead & (0xFF >> (need + 1));
  for (int i = 1; i < need; ++i) {
    if (static_cast<size_t>(i) >= bytes.size()) {
      return {Utf8Kind::kTruncated, i, 0};
    }
    const uint8_t byte = static_cast<uint8_t>(bytes[i]);
    if (byte < low || byte > high) {
      return {Utf8Kind::kInvalid, i, 0};
    }
    codepoint = (codepoint << 6) | (byte & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kValid, need, codepoint};
}

size_t CompleteUtf8Prefix(absl::string_view bytes) {
  // A character has at most three continuation bytes, so its lead is among the last three bytes
  // when it is truncated. A lead byte always begins a unit: it is never the inside of another.
  size_t begin = bytes.size();
  for (int back = 0; back < 3 && begin > 0; ++back) {
    --begin;
    if (IsContinuation(static_cast<uint8_t>(bytes[begin]))) {
      continue;
    }
    const bool truncated = NextUtf8(bytes.substr(begin)).kind == Utf8Kind::kTruncated;
    return truncated ? begin : bytes.size();
  }
  return bytes.size();
}

std::string ToValidUtf8(absl::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Unit unit = NextUtf8(bytes);
    if (unit.kind == Utf8Kind::kValid) {
      out.append(bytes.data(), unit.length);
    } else {
      out.append(kReplacement);
    }
    bytes.remove_prefix(unit.length);
  }
  return out;
}

bool IsValidUtf8(absl::string_view bytes, size_t* first_bad) {
  size_t pos = 0;
  bool valid = true;
  while (pos < bytes.size()) {
    const Utf8Unit unit = NextUtf8(bytes.substr(pos));
    if (unit.kind != Utf8Kind::kValid) {
      valid = false;
      break;
    }
    pos += unit.length;
  }
  if (first_bad != nullptr) {
    *first_bad = pos;
  }
  return valid;
}

void AppendUtf8(uint32_t codepoint, std::string* out) {
  if (codepoint < 0x80) {
    out->push_back(static_cast<char>(codepoint));
    return;
  }
  const int more = codepoint < 0x800 ? 1 : codepoint < 0x10000 ? 2 : 3;
  const uint32_t lead_mark = more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0;
  out->push_back(static_cast<char>(lead_mark | (codepoint >> (6 * more))));
  for (int i = more - 1; i >= 0; --i) {
    out->push_back(static_cast<char>(0x80 | ((codepoint >> (6 * i)) & 0x3F)));
  }
}

}  // namespace lockstep
