#include "kernels/base/log.h"

#include <unistd.h>

#include <atomic>
#include <mutex>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/log_line.h"

namespace lockstep {
namespace {

std::atomic<int> minimum_severity{static_cast<int>(Severity::kInfo)};
std::atomic<int> log_format{static_cast<int>(LogFormat::kText)};
std::atomic<int> process_rank{-1};
std::atomic<uint64_t> process_epoch{0};

std::string& Role() {
  static std::string* role = new std::string();
  return *role;
}

struct Repeats {
  std::mutex mutex;
  RepeatCounter counter;  // guarded by mutex
};
Repeats& TheRepeats() {
  static Repeats* repeats = new Repeats();
  return *repeats;
}

void Write(const LogLine& line) {
  const std::string text = FormatLogLine(line, static_cast<LogFormat>(log_format.load()));
  // A failed write to stderr has nobody left to be told.
  const ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
  (void)ignored;
}

}  // namespace

void SetLogLevel(Severity minimum) { minimum_severity = static_cast<int>(minimum); }
Severity LogLevel() { return static_cast<Severity>(minimum_severity.load()); }
void SetLogFormat(LogFormat format) { log_format = static_cast<int>(format); }
void SetLogRole(absl::string_view role) { Role() = std::string(role); }
void SetLogRank(int rank) { process_rank = rank; }
void SetLogEpoch(uint64_t epoch) { process_epoch = epoch; }

void Log(Severity severity, absl::string_view message, const LogFields& fields) {
  if (static_cast<int>(severity) < minimum_severity) return;
  LogLine line;
  line.time = absl::Now();
  line.severity = severity;
  line.role = Role();
  line.rank = fields.rank >= 0 ? fields.rank : process_rank.load();
  line.epoch = process_epoch;
  line.request_id = std::string(fields.request_id);
  line.message = std::string(message);
  FlushRepeatedLogs();
  {
    std::lock_guard<std::mutex> lock(TheRepeats().mutex);
    if (!TheRepeats().counter.Admit(line)) return;
  }
  Write(line);
}

void FlushRepeatedLogs() {
  std::vector<LogLine> expired;
  {
    std::lock_guard<std::mutex> lock(TheRepeats().mutex);
    expired = TheRepeats().counter.TakeExpired(absl::Now());
  }
  for (const LogLine& line : expired) Write(line);
}

}  // namespace lockstep
