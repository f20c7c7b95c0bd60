// Canonical composition (NFC) of text.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace lockstep {

// The Unicode normalization form C of `text`. `text` is UTF-8. O(n log n) whatever the text: a run
// of combining marks is sorted, not inserted one by one.
std::string NormalizeNfc(absl::string_view text);

}  // namespace lockstep
