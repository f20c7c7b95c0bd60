// The directory of a journal, behind an interface so that tests can make it fail.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lockstep {

// A file that grows at its end. One thread.
class JournalFile {
 public:
  virtual ~JournalFile() = default;
  // After an error the file may hold a part of `bytes`.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  virtual absl::Status Truncate(int64_t size) = 0;
  // Makes what was appended durable.
  virtual absl::Status Sync() = 0;
};

// One thread.
class JournalStorage {
 public:
  virtual ~JournalStorage() = default;
  virtual absl::StatusOr<std::vector<std::string>> List() = 0;
  virtual absl::StatusOr<std::string> Read(const std::string& name) = 0;
  // Empty, whatever was there before.
  virtual absl::StatusOr<std::unique_ptr<JournalFile>> Create(const std::string& name) = 0;
  // Durable when it returns OK.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Remove(const std::string& name) = 0;
  // For messages: where the file is.
  virtual std::string PathOf(const std::string& name) const = 0;
};

// The directory `path`, made when it is missing, and locked for this process until the storage is
// destroyed or the process ends. From now on the process ignores SIGXFSZ. FAILED_PRECONDITION names
// the process that has it; the errors of the system name the path.
absl::StatusOr<std::unique_ptr<JournalStorage>> OpenJournalDirectory(const std::string& path);

}  // namespace lockstep
