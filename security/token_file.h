// TokenFile: the bearer tokens that a server accepts, one a line; empty lines and lines that begin
// with '#' are skipped. Read again when the file changes, so tokens are rotated without a restart;
// replace the file by renaming, since a half-written one is believed too. A file that cannot be
// read, or has no token, accepts nobody. Tokens never appear in messages. Thread safe.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace lockstep {

// The tokens of a file. NOT_FOUND: it cannot be read; INVALID_ARGUMENT: it has no token, or one
// with spaces or characters that no header can carry. `flag` names the file in messages.
absl::StatusOr<std::vector<std::string>> ReadTokens(const std::string& path,
                                                    absl::string_view flag);

class TokenFile {
 public:
  // Errors as of ReadTokens.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path,
                                                         absl::string_view flag);

  // Takes as long for a wrong token as for a right one of its length.
  bool Accepts(absl::string_view token) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TokenFile(std::string path, absl::string_view flag) : path_(std::move(path)), flag_(flag) {}
  void ReadIfChanged() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string flag_;
  mutable absl::Mutex mutex_;
  mutable std::vector<std::string> tokens_ ABSL_GUARDED_BY(mutex_);
  mutable struct stat seen_ ABSL_GUARDED_BY(mutex_) = {};  // of the file that was read last
};

}  // namespace lockstep
