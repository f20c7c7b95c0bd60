// What log.cc is made of, apart from clocks and stderr: the text of a line, and the counting of
// repeated ones.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/log.h"

namespace lockstep {

struct LogLine {
  absl::Time time;
  Severity severity = Severity::kInfo;
  std::string role;
  int rank = -1;
  uint64_t epoch = 0;
  std::string request_id;
  std::string message;
};

// With its newline. A newline inside of a message becomes a space in text and \n in JSON; bytes
// that are no UTF-8 become U+FFFD in JSON.
std::string FormatLogLine(const LogLine& line, LogFormat format);

// Not thread safe.
class RepeatCounter {
 public:
  // Time from the line that was written to the count of its repetitions.
  static constexpr absl::Duration kWindow = absl::Seconds(10);
  // Different lines that are remembered at most: with more nothing is counted.
  static constexpr size_t kMaxLines = 256;

  // True when the line is to be written now.
  bool Admit(const LogLine& line);
  // The lines whose time is over and that were repeated, with "(repeated N times)" in the message.
  std::vector<LogLine> TakeExpired(absl::Time now);

 private:
  struct Entry {
    LogLine line;
    absl::Time until;
    int64_t repeats = 0;
  };
  std::map<std::pair<std::string, std::string>, Entry> entries_;  // by request_id and message
};

}  // namespace lockstep
