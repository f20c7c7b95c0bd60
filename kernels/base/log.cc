#include "kernels/base/log.h"

#include <unistd.h>

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lockstep {
namespace {

std::atomic<int> minimum_severity{static_cast<int>(Severity::kInfo)};

std::string& Role() {
  static std::string* role = new std::string();
  return *role;
}

}  // namespace

void SetLogLevel(Severity minimum) { minimum_severity = static_cast<int>(minimum); }

void SetLogRole(absl::string_view role) { Role() = std::string(role); }

void Log(Severity severity, absl::string_view message) {
  if (static_cast<int>(severity) < minimum_severity) return;
  const char letter = "IWE"[static_cast<int>(severity)];
  std::string line =
      absl::StrCat(std::string(1, letter), " ",
                   absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::LocalTimeZone()), " ",
                   Role().empty() ? "" : absl::StrCat("[", Role(), "] "), message, "\n");
  // A failed write to stderr has nobody left to be told.
  const ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
  (void)ignored;
}

}  // namespace lockstep
