#include "coordinator/group/state_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr char kStateFile[] = "state";
constexpr char kLockFile[] = "lock";
constexpr char kMagic[] = "lockstep-state-1";

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat("--state-dir: cannot ", what, " ", path, ": ", strerror(errno)));
}

// Writes all of it and waits until the disk has it.
absl::Status WriteDurably(const std::string& path, const std::string& content) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("write", path);
  size_t written = 0;
  while (written < content.size()) {
    const ssize_t n = write(fd, content.data() + written, content.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const absl::Status status = Failed("write", path);
      close(fd);
      return status;
    }
    written += static_cast<size_t>(n);
  }
  const bool synced = fsync(fd) == 0;
  const absl::Status status = synced ? absl::OkStatus() : Failed("sync", path);
  close(fd);
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateDir>> StateDir::Open(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return Failed("make", path);
  std::unique_ptr<StateDir> dir(new StateDir(path));
  RETURN_IF_ERROR(dir->Lock());
  RETURN_IF_ERROR(dir->Read());
  return dir;
}

StateDir::~StateDir() {
  if (lock_ >= 0) close(lock_);
}

absl::Status StateDir::Lock() {
  const std::string path = absl::StrCat(path_, "/", kLockFile);
  lock_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0) return Failed("open", path);
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    char holder[32] = "";
    const ssize_t n = pread(lock_, holder, sizeof(holder) - 1, 0);
    return absl::FailedPreconditionError(
        absl::StrCat("--state-dir ", path_, " is in use by process ",
                     n > 0 ? absl::string_view(holder, static_cast<size_t>(n)) : "unknown",
                     ": stop that server or choose another folder"));
  }
  const std::string pid = absl::StrCat(getpid());
  if (ftruncate(lock_, 0) != 0 || pwrite(lock_, pid.data(), pid.size(), 0) < 0) {
    return Failed("write", path);
  }
  return absl::OkStatus();
}

absl::Status StateDir::Read() {
  const std::string path = absl::StrCat(path_, "/", kStateFile);
  std::ifstream file(path);
  if (!file) return absl::OkStatus();
  std::string magic;
  if (!(file >> magic >> term_ >> epoch_) || magic != kMagic) {
    return absl::DataLossError(absl::StrCat(
        path, " is no state of a server: move it away, or choose another --state-dir"));
  }
  return absl::OkStatus();
}

absl::Status StateDir::Save(uint64_t term, uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mu_);
  const std::string path = absl::StrCat(path_, "/", kStateFile);
  const std::string beside = absl::StrCat(path, ".new");
  RETURN_IF_ERROR(WriteDurably(beside, absl::StrCat(kMagic, " ", term, " ", epoch, "\n")));
  if (rename(beside.c_str(), path.c_str()) != 0) return Failed("rename", beside);
  const int folder = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0 || fsync(folder) != 0) {
    const absl::Status status = Failed("sync", path_);
    if (folder >= 0) close(folder);
    return status;
  }
  close(folder);
  term_ = term;
  epoch_ = epoch;
  return absl::OkStatus();
}

}  // namespace lockstep
