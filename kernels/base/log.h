// Log lines on stderr: "I 12:34:56.789 [role] message". Thread safe; one write per line.
// stdout belongs to data, so nothing here ever writes to it.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lockstep {

enum class Severity : int { kInfo = 0, kWarning = 1, kError = 2 };

// Lines below this severity are dropped. Default kInfo.
void SetLogLevel(Severity minimum);
// Shown in every line, e.g. "coordinator" or "worker 1". Set once, before threads start.
void SetLogRole(absl::string_view role);
void Log(Severity severity, absl::string_view message);

template <typename... Args>
void LogInfo(const Args&... args) {
  Log(Severity::kInfo, absl::StrCat(args...));
}
template <typename... Args>
void LogWarning(const Args&... args) {
  Log(Severity::kWarning, absl::StrCat(args...));
}
template <typename... Args>
void LogError(const Args&... args) {
  Log(Severity::kError, absl::StrCat(args...));
}

}  // namespace lockstep
