// A byte trie walked from every place of the text.
#include "models/tokenizer/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

bool IsSpace(uint32_t c) {
  if ((c >= 0x09 && c <= 0x0D) || c == 0x85) {
    return true;
  }
  const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

// Letters, marks, numbers, connector punctuation, joiners.
bool IsWord(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;
  }
}

// The last character of valid UTF-8 that is not empty.
Utf8Unit LastUnit(absl::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) {
    --begin;
  }
  return NextUtf8(text.substr(begin));
}

bool TouchesWord(absl::string_view before, absl::string_view after) {
  return (!before.empty() && IsWord(LastUnit(before).codepoint)) ||
         (!after.empty() && IsWord(NextUtf8(after).codepoint));
}

size_t SpaceAtEnd(absl::string_view text) {
  size_t size = 0;
  while (!text.empty()) {
    const Utf8Unit unit = LastUnit(text);
    if (!IsSpace(unit.codepoint)) {
      break;
    }
    size += unit.length;
    text.remove_suffix(unit.length);
  }
  return size;
}

size_t SpaceAtBegin(absl::string_view text) {
  size_t size = 0;
  while (size < text.size()) {
    const Utf8Unit unit = NextUtf8(text.substr(size));
    if (!IsSpace(unit.codepoint)) {
      break;
    }
    size += unit.length;
  }
  return size;
}

}  // namespace

int32_t AddedTokens::Child(int32_t node, char byte) const {
  const auto& children = nodes_[node].children;
  const auto it = std::lower_bound(
      children.begin(), children.end(), byte,
      [](const std::pair<char, int32_t>& child, char wanted) { return child.first < wanted; });
  return it == children.end() || it->first != byte ? -1 : it->second;
}

void AddedTokens::Add(const AddedToken& token) {
  int32_t node = 0;
  for (const char byte : token.content) {
    int32_t child = Child(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      auto& children = nodes_[node].children;
      children.insert(std::upper_bound(children.begin(), children.end(), std::make_pair(byte, 0)),
                      std::make_pair(byte, child));
    }
    node = child;
  }
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

std::pair<int32_t, size_t> AddedTokens::Longest(absl::string_view text) const {
  std::pair<int32_t, size_t> best = {-1, 0};
  int32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    node = Child(node, text[i]);
    if (node < 0) {
      break;
    }
    if (nodes_[node].token >= 0) {
      best = {nodes_[node].token, i + 1};
    }
  }
  return best;
}

std::vector<AddedTokenSpan> AddedTokens::Split(absl::string_view text) const {
  std::vector<AddedTokenSpan> spans;
  size_t done = 0;  // everything before is in a span
  size_t pos = 0;
  while (!tokens_.empty() && pos < text.size()) {
    const auto [index, length] = Longest(text.substr(pos));
    if (index < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = pos;
    size_t end = pos + length;
    pos = end;
    if (token.single_word && TouchesWord(text.substr(0, begin), text.substr(end))) {
      continue;
    }
    if (token.lstrip) {
      begin -= SpaceAtEnd(text.substr(done, begin - done));
    }
    if (token.rstrip) {
      end += SpaceAtBegin(text.substr(end));
    }
    if (done < begin) {
      spans.push_back({text.substr(done, begin - done), -1});
    }
    spans.push_back({text.substr(begin, end - begin), token.id});
    done = end;
    pos = end;
  }
  if (done < text.size()) {
    spans.push_back({text.substr(done), -1});
  }
  return spans;
}

}  // namespace lockstep
