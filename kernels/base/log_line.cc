#include "kernels/base/log_line.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace {

std::string TextLine(const LogLine& line) {
  std::string text =
      absl::StrCat(std::string(1, "IWE"[static_cast<int>(line.severity)]), " ",
                   absl::FormatTime("%H:%M:%E3S", line.time, absl::LocalTimeZone()), " ");
  if (!line.role.empty()) absl::StrAppend(&text, "[", line.role, "] ");
  if (line.rank >= 0) absl::StrAppend(&text, "[rank ", line.rank, "] ");
  if (line.epoch > 0) absl::StrAppend(&text, "[epoch ", line.epoch, "] ");
  if (!line.request_id.empty()) absl::StrAppend(&text, "[request ", line.request_id, "] ");
  absl::StrAppend(&text, line.message);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return absl::StrCat(text, "\n");
}

std::string JsonLine(const LogLine& line) {
  constexpr const char* kSeverities[] = {"info", "warning", "error"};
  nlohmann::ordered_json object;
  object["time"] = absl::FormatTime(absl::RFC3339_full, line.time, absl::UTCTimeZone());
  object["severity"] = kSeverities[static_cast<int>(line.severity)];
  if (!line.role.empty()) object["role"] = line.role;
  if (line.rank >= 0) object["rank"] = line.rank;
  if (line.epoch > 0) object["epoch"] = line.epoch;
  if (!line.request_id.empty()) object["request_id"] = line.request_id;
  object["message"] = line.message;
  return absl::StrCat(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace),
                      "\n");
}

}  // namespace

std::string FormatLogLine(const LogLine& line, LogFormat format) {
  return format == LogFormat::kJson ? JsonLine(line) : TextLine(line);
}

bool RepeatCounter::Admit(const LogLine& line) {
  if (line.severity == Severity::kInfo) return true;
  const auto key = std::make_pair(line.request_id, line.message);
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    ++found->second.repeats;
    return false;
  }
  if (entries_.size() < kMaxLines) entries_[key] = {line, line.time + kWindow, 0};
  return true;
}

std::vector<LogLine> RepeatCounter::TakeExpired(absl::Time now) {
  std::vector<LogLine> expired;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    if (entry.until > now) {
      ++it;
      continue;
    }
    if (entry.repeats == 0) {
      it = entries_.erase(it);
      continue;
    }
    expired.push_back(entry.line);
    expired.back().time = now;
    absl::StrAppend(&expired.back().message, " (repeated ", entry.repeats, " times)");
    entry.until = now + kWindow;
    entry.repeats = 0;
    ++it;
  }
  return expired;
}

}  // namespace lockstep
