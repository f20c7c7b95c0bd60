// A journal's directory on a POSIX file system: see storage.h.
#include "coordinator/journal/storage.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr char kLockName[] = "lock";
constexpr size_t kReadBytes = 1 << 20;

absl::Status SystemError(absl::string_view what, const std::string& path) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat("journal: cannot ", what, " ", path));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return SystemError("open", path);
  std::string bytes;
  for (;;) {
    const size_t had = bytes.size();
    bytes.resize(had + kReadBytes);
    const ssize_t got = read(file.get(), &bytes[had], kReadBytes);
    bytes.resize(had + static_cast<size_t>(got > 0 ? got : 0));
    if (got < 0 && errno != EINTR) return SystemError("read", path);
    if (got == 0) return bytes;
  }
}

absl::Status SyncDirectory(const std::string& path) {
  const FileDescriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || fsync(directory.get()) != 0) return SystemError("sync", path);
  return absl::OkStatus();
}

class PosixFile : public JournalFile {
 public:
  PosixFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  absl::Status Append(absl::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = write(fd_.get(), bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return SystemError("write", path_);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }
  absl::Status Truncate(int64_t size) override {
    if (ftruncate(fd_.get(), size) != 0) return SystemError("truncate", path_);
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    if (fdatasync(fd_.get()) != 0) return SystemError("sync", path_);
    return absl::OkStatus();
  }

 private:
  const FileDescriptor fd_;
  const std::string path_;
};

class PosixStorage : public JournalStorage {
 public:
  PosixStorage(std::string directory, int lock) : directory_(std::move(directory)), lock_(lock) {}

  absl::StatusOr<std::vector<std::string>> List() override {
    DIR* directory = opendir(directory_.c_str());
    if (directory == nullptr) return SystemError("list", directory_);
    std::vector<std::string> names;
    while (const dirent* entry = readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != ".." && name != kLockName) names.push_back(name);
    }
    closedir(directory);
    return names;
  }
  absl::StatusOr<std::string> Read(const std::string& name) override {
    return ReadWhole(PathOf(name));
  }
  absl::StatusOr<std::unique_ptr<JournalFile>> Create(const std::string& name) override {
    const std::string path = PathOf(name);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return SystemError("create", path);
    return std::unique_ptr<JournalFile>(std::make_unique<PosixFile>(fd, path));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(PathOf(from).c_str(), PathOf(to).c_str()) != 0) {
      return SystemError("rename", PathOf(from));
    }
    return SyncDirectory(directory_);
  }
  absl::Status Remove(const std::string& name) override {
    if (unlink(PathOf(name).c_str()) != 0) return SystemError("remove", PathOf(name));
    return absl::OkStatus();
  }
  std::string PathOf(const std::string& name) const override {
    return absl::StrCat(directory_, "/", name);
  }

 private:
  const std::string directory_;
  const FileDescriptor lock_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<JournalStorage>> OpenJournalDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return SystemError("make the directory", path);
  }
  // A write beyond RLIMIT_FSIZE is an error (EFBIG) like that of a full disk, not the end of the
  // process.
  signal(SIGXFSZ, SIG_IGN);
  const std::string lock_path = absl::StrCat(path, "/", kLockName);
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return SystemError("open", lock_path);
  auto storage = std::make_unique<PosixStorage>(path, fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return SystemError("lock", lock_path);
    const auto owner = ReadWhole(lock_path);
    return absl::FailedPreconditionError(absl::StrCat(
        "the journal ", path, " is in use by process ",
        owner.ok() ? absl::StripAsciiWhitespace(*owner) : absl::string_view("(unknown)"),
        ": two coordinators cannot share one; end that process, or give another "
        "--request-journal"));
  }
  // For whoever finds it locked.
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) != 0 ||
      pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return SystemError("write", lock_path);
  }
  return std::unique_ptr<JournalStorage>(std::move(storage));
}

}  // namespace lockstep
