// FakeStorage: a journal's directory in memory, for tests. Its disk outlives the storage objects,
// as a real one outlives processes; it fills up, refuses writes, cuts them short and fails to sync
// when the test says so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "coordinator/journal/storage.h"

namespace lockstep {

// Thread safe.
class FakeDisk {
 public:
  // Bytes that all files together may have; a write that does not fit is cut short.
  void SetCapacity(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    capacity_ = bytes;
  }
  void FailSyncs(bool fail) {
    std::lock_guard<std::mutex> lock(mu_);
    fail_syncs_ = fail;
  }
  void FailRenames(bool fail) {
    std::lock_guard<std::mutex> lock(mu_);
    fail_renames_ = fail;
  }
  std::map<std::string, std::string> files() const {
    std::lock_guard<std::mutex> lock(mu_);
    return files_;
  }
  void SetFiles(std::map<std::string, std::string> files) {
    std::lock_guard<std::mutex> lock(mu_);
    files_ = std::move(files);
  }
  int64_t size() const {
    std::lock_guard<std::mutex> lock(mu_);
    return SizeLocked();
  }
  int syncs() const {
    std::lock_guard<std::mutex> lock(mu_);
    return syncs_;
  }
  std::unique_ptr<JournalStorage> Mount() { return std::make_unique<Storage>(this); }

 private:
  class File : public JournalFile {
   public:
    // As with a real file, a rename does not change what is written to.
    File(FakeDisk* disk, std::shared_ptr<std::string> name) : disk_(disk), name_(std::move(name)) {}
    absl::Status Append(absl::string_view bytes) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      const int64_t room = std::max<int64_t>(0, disk_->capacity_ - disk_->SizeLocked());
      const auto fits = static_cast<size_t>(std::min<int64_t>(room, bytes.size()));
      disk_->files_[*name_].append(bytes.data(), fits);
      if (fits == bytes.size()) return absl::OkStatus();
      return absl::ResourceExhaustedError("No space left on device");
    }
    absl::Status Truncate(int64_t size) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      disk_->files_[*name_].resize(static_cast<size_t>(size));
      return absl::OkStatus();
    }
    absl::Status Sync() override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      ++disk_->syncs_;
      return disk_->fail_syncs_ ? absl::UnknownError("Input/output error") : absl::OkStatus();
    }

   private:
    FakeDisk* const disk_;
    const std::shared_ptr<std::string> name_;
  };

  class Storage : public JournalStorage {
   public:
    explicit Storage(FakeDisk* disk) : disk_(disk) {}
    absl::StatusOr<std::vector<std::string>> List() override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      std::vector<std::string> names;
      for (const auto& [name, bytes] : disk_->files_) names.push_back(name);
      return names;
    }
    absl::StatusOr<std::string> Read(const std::string& name) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      const auto found = disk_->files_.find(name);
      if (found == disk_->files_.end()) return absl::NotFoundError(name);
      return found->second;
    }
    absl::StatusOr<std::unique_ptr<JournalFile>> Create(const std::string& name) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      disk_->files_[name].clear();
      open_[name] = std::make_shared<std::string>(name);
      return std::unique_ptr<JournalFile>(std::make_unique<File>(disk_, open_[name]));
    }
    absl::Status Rename(const std::string& from, const std::string& to) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      if (disk_->fail_renames_) return absl::UnknownError("Input/output error");
      disk_->files_[to] = std::move(disk_->files_[from]);
      disk_->files_.erase(from);
      *open_[from] = to;
      return absl::OkStatus();
    }
    absl::Status Remove(const std::string& name) override {
      std::lock_guard<std::mutex> lock(disk_->mu_);
      disk_->files_.erase(name);
      return absl::OkStatus();
    }
    std::string PathOf(const std::string& name) const override {
      return absl::StrCat("fake/", name);
    }

   private:
    FakeDisk* const disk_;
    std::map<std::string, std::shared_ptr<std::string>> open_;
  };

  int64_t SizeLocked() const {
    int64_t size = 0;
    for (const auto& [name, bytes] : files_) size += static_cast<int64_t>(bytes.size());
    return size;
  }

  mutable std::mutex mu_;
  // Guarded by mu_:
  std::map<std::string, std::string> files_;
  int64_t capacity_ = std::numeric_limits<int64_t>::max();
  bool fail_syncs_ = false;
  bool fail_renames_ = false;
  int syncs_ = 0;
};

}  // namespace lockstep
