// NFC over utf8proc's tables: decompose, order the combining marks, compose.
#include "models/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "kernels/base/check.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

bool IsAscii(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<uint8_t>(c) < 0x80; });
}

int CombiningClass(utf8proc_int32_t codepoint) {
  return utf8proc_get_property(codepoint)->combining_class;
}

// Canonical ordering: every run of marks sorted by class, equal ones in their order.
void OrderMarks(std::vector<utf8proc_int32_t>* codepoints) {
  auto it = codepoints->begin();
  while (it != codepoints->end()) {
    if (CombiningClass(*it) == 0) {
      ++it;
      continue;
    }
    const auto end = std::find_if(it, codepoints->end(),
                                  [](utf8proc_int32_t c) { return CombiningClass(c) == 0; });
    std::stable_sort(it, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return CombiningClass(a) < CombiningClass(b);
    });
    it = end;
  }
}

}  // namespace

std::string NormalizeNfc(absl::string_view text) {
  if (IsAscii(text)) {
    return std::string(text);
  }
  constexpr int kMaxDecomposition = 32;  // code points; Unicode's longest canonical one has 4
  std::vector<utf8proc_int32_t> codepoints;
  codepoints.reserve(text.size());
  while (!text.empty()) {
    const Utf8Unit unit = NextUtf8(text);
    text.remove_prefix(unit.length);
    utf8proc_int32_t parts[kMaxDecomposition];
    int boundary_class = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(unit.codepoint), parts,
                                kMaxDecomposition, UTF8PROC_DECOMPOSE, &boundary_class);
    CHECK(count > 0 && count <= kMaxDecomposition)
        << "decomposition of U+" << std::hex << unit.codepoint;
    codepoints.insert(codepoints.end(), parts, parts + count);
  }
  OrderMarks(&codepoints);
  const utf8proc_ssize_t composed =
      utf8proc_normalize_utf32(codepoints.data(), static_cast<utf8proc_ssize_t>(codepoints.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  CHECK(composed >= 0) << "utf8proc error " << composed;
  std::string out;
  out.reserve(codepoints.size());
  for (utf8proc_ssize_t i = 0; i < composed; ++i) {
    AppendUtf8(static_cast<uint32_t>(codepoints[i]), &out);
  }
  return out;
}

}  // namespace lockstep
