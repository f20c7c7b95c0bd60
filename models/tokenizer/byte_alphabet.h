// The byte alphabet of byte-level BPE files: every byte is written as one printable character.
// Bytes 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for the code points of the same number; the other
// 68, in ascending order, for U+0100, U+0101, ...
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lockstep {

// The code point that stands for `byte`.
uint32_t ByteToAlphabet(uint8_t byte);
// Turns written characters back into bytes. False, with `out` untouched, when `text` holds a
// character outside the alphabet. `text` is UTF-8.
bool AlphabetToBytes(absl::string_view text, std::string* out);

}  // namespace lockstep
