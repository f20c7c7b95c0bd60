// What harnesses share: splitting an input, and files for code that reads files.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace fuzz {

// Takes an input apart from its front; what is not there is zero or empty.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  uint8_t Byte() { return rest_.empty() ? 0 : static_cast<uint8_t>(Bytes(1)[0]); }
  absl::string_view Bytes(size_t count) {
    const absl::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  absl::string_view Rest() { return Bytes(rest_.size()); }

 private:
  absl::string_view rest_;
};

// A folder of this process, in memory: files are written all the time.
class TempFolder {
 public:
  TempFolder() { CHECK(mkdtemp(&path_[0]) != nullptr) << path_; }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/dev/shm/lockstep_fuzz_XXXXXX";
};

inline void WriteFile(const std::string& path, absl::string_view content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  CHECK(out.good()) << path;
}

}  // namespace fuzz
}  // namespace lockstep
