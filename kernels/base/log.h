// Log lines on stderr, as text ("I 12:34:56.789 [role] message") or as one JSON object a line.
// Thread safe; one write per line. stdout belongs to data, so nothing here ever writes to it. A
// line never holds prompt text, tokens or credentials: that is up to the caller.
//
// A warning or an error that repeats one of the last seconds word for word is counted instead of
// written; the count follows when its time is over.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lockstep {

enum class Severity : int { kInfo = 0, kWarning = 1, kError = 2 };
enum class LogFormat : int { kText = 0, kJson = 1 };

// Lines below this severity are dropped. Default kInfo.
void SetLogLevel(Severity minimum);
Severity LogLevel();
// Default kText.
void SetLogFormat(LogFormat format);
// Shown in every line, e.g. "coordinator" or "worker 1". Set once, before threads start.
void SetLogRole(absl::string_view role);
// Shown in every line from now on; -1 and 0 (the defaults) show nothing.
void SetLogRank(int rank);
void SetLogEpoch(uint64_t epoch);

// What one line is about, where that is known.
struct LogFields {
  absl::string_view request_id;
  int rank = -1;  // wins over SetLogRank
};

void Log(Severity severity, absl::string_view message, const LogFields& fields = LogFields());
// Writes the counts whose time is over. Every other line does so too; a process that may be silent
// calls it now and then.
void FlushRepeatedLogs();

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
