// StateDir: the folder in which a server keeps what must outlive it: the highest term and epoch
// that it has used. One server at a time: the folder is locked.
//
// Not thread safe, but for Save.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep {

class StateDir {
 public:
  // Makes the folder when it is not there. FAILED_PRECONDITION: another process holds it (the
  // message names it). DATA_LOSS: the state file is not one of ours. INVALID_ARGUMENT: the folder
  // cannot be made or written.
  static absl::StatusOr<std::unique_ptr<StateDir>> Open(const std::string& path);
  ~StateDir();
  StateDir(const StateDir&) = delete;
  StateDir& operator=(const StateDir&) = delete;

  const std::string& path() const { return path_; }
  // As last saved; 0 in a new folder.
  uint64_t term() const { return term_; }
  uint64_t epoch() const { return epoch_; }

  // Durable when it returns OK. Thread safe.
  absl::Status Save(uint64_t term, uint64_t epoch);

 private:
  explicit StateDir(std::string path) : path_(std::move(path)) {}
  absl::Status Lock();
  absl::Status Read();

  const std::string path_;
  int lock_ = -1;
  std::mutex mu_;
  uint64_t term_ = 0;
  uint64_t epoch_ = 0;
};

}  // namespace lockstep
