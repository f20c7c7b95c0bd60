// TokenFile: see token_file.h.
#include "security/token_file.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_dev == b.st_dev && a.st_size == b.st_size &&
         a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec &&
         a.st_ctim.tv_sec == b.st_ctim.tv_sec && a.st_ctim.tv_nsec == b.st_ctim.tv_nsec;
}

// Every byte is looked at, whatever differs first.
bool SameBytes(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(
        difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  }
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ReadTokens(const std::string& path,
                                                    absl::string_view flag) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(flag, " ", path, " cannot be read"));
  std::vector<std::string> tokens;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const absl::string_view token = absl::StripAsciiWhitespace(line);
    if (token.empty() || token.front() == '#') continue;
    if (!std::all_of(token.begin(), token.end(),
                     [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); })) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " ", path, ", line ", number,
                       ": a token is one word of printable ASCII characters"));
    }
    tokens.emplace_back(token);
  }
  if (file.bad()) return absl::NotFoundError(absl::StrCat(flag, " ", path, " cannot be read"));
  if (tokens.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", path, " has no token: write one a line"));
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path,
                                                           absl::string_view flag) {
  RETURN_IF_ERROR(ReadTokens(path, flag).status());
  return std::unique_ptr<TokenFile>(new TokenFile(path, flag));
}

void TokenFile::ReadIfChanged() const {
  struct stat now = {};
  if (stat(path_.c_str(), &now) != 0) now = {};
  if (now.st_ino != 0 && SameFile(now, seen_)) return;
  // Before reading: what is written meanwhile is seen next time.
  seen_ = now;
  absl::StatusOr<std::vector<std::string>> tokens = ReadTokens(path_, flag_);
  if (!tokens.ok()) {
    LogWarning("no token is accepted: ", tokens.status().message());
    tokens_.clear();
    return;
  }
  tokens_ = *std::move(tokens);
}

bool TokenFile::Accepts(absl::string_view token) const {
  absl::MutexLock lock(&mutex_);
  ReadIfChanged();
  bool accepted = false;
  for (const std::string& known : tokens_) accepted |= SameBytes(known, token);
  return accepted;
}

}  // namespace lockstep
