// UTF-8: validation, repair, and finding whole characters at the end of a growing byte string.
// Well-formed is what the Unicode Standard's table 3-7 lists: no overlong forms, no surrogates,
// nothing above U+10FFFF. Pure functions; one pass over the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lockstep {

enum class Utf8Kind {
  kValid,      // a whole character
  kInvalid,    // a maximal subpart that can never become a character
  kTruncated,  // the beginning of a character; the bytes end before it does
};

struct Utf8Unit {
  Utf8Kind kind;
  int length;          // bytes, 1 to 4
  uint32_t codepoint;  // with kValid
};

// The unit that begins at `bytes[0]`. `bytes` is not empty.
Utf8Unit NextUtf8(absl::string_view bytes);

// First bytes of `bytes` that are whole, valid UTF-8 characters or are known to be invalid; the
// rest is the beginning of a character whose end is yet to come.
size_t CompleteUtf8Prefix(absl::string_view bytes);
// Invalid sequences become U+FFFD, one per maximal subpart (Unicode recommended practice).
std::string ToValidUtf8(absl::string_view bytes);
// `first_bad`, when given, receives the offset of the first invalid sequence, or the size.
bool IsValidUtf8(absl::string_view bytes, size_t* first_bad = nullptr);

// Appends one code point. `codepoint` is a Unicode scalar value.
void AppendUtf8(uint32_t codepoint, std::string* out);

}  // namespace lockstep
