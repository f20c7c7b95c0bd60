#include "tests/fault_rule.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep {
namespace testing {
namespace {

constexpr std::pair<const char*, FaultPhase> kPhases[] = {
    {"load", FaultPhase::kLoad},         {"prepare", FaultPhase::kPrepare},
    {"init", FaultPhase::kInit},         {"configure", FaultPhase::kConfigure},
    {"prefill", FaultPhase::kPrefill},   {"decode", FaultPhase::kDecode},
    {"sampling", FaultPhase::kSampling}, {"drain", FaultPhase::kDrain},
    {"idle", FaultPhase::kIdle},
};

constexpr std::pair<const char*, FaultKind> kKinds[] = {
    {"kill", FaultKind::kKill},
    {"abort", FaultKind::kAbort},
    {"exit0", FaultKind::kExit0},
    {"exit1", FaultKind::kExit1},
    {"stop", FaultKind::kStop},
    {"stop-resume", FaultKind::kStopResume},
    {"delay", FaultKind::kDelay},
    {"error", FaultKind::kError},
    {"oom", FaultKind::kOom},
    {"nan", FaultKind::kNan},
    {"digest", FaultKind::kDigest},
    {"corrupt-result", FaultKind::kCorruptResult},
    {"duplicate-result", FaultKind::kDuplicateResult},
    {"reorder-results", FaultKind::kReorderResults},
    {"drop-stream", FaultKind::kDropStream},
};

bool OfAStep(FaultPhase phase) {
  return phase == FaultPhase::kPrefill || phase == FaultPhase::kDecode ||
         phase == FaultPhase::kSampling;
}

template <typename Table, typename Value>
bool Find(const Table& table, absl::string_view name, Value* value) {
  const auto found = std::find_if(std::begin(table), std::end(table),
                                  [&](const auto& entry) { return entry.first == name; });
  if (found == std::end(table)) return false;
  *value = found->second;
  return true;
}

}  // namespace

absl::StatusOr<FaultRule> ParseFaultRule(absl::string_view text) {
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("fault '", text, "': ", why, "; expected PHASE[:N]=KIND[,MS]"));
  };
  FaultRule rule;
  rule.text = std::string(text);
  const std::vector<absl::string_view> sides = absl::StrSplit(text, '=');
  if (sides.size() != 2) return invalid("needs one '='");
  const std::vector<absl::string_view> when = absl::StrSplit(sides[0], ':');
  if (when.size() > 2 || !Find(kPhases, when[0], &rule.phase)) return invalid("no such phase");
  if (when.size() == 2 && (!absl::SimpleAtoi(when[1], &rule.occurrence) || rule.occurrence < 1)) {
    return invalid("N counts from 1");
  }
  const std::vector<absl::string_view> what = absl::StrSplit(sides[1], ',');
  if (what.size() > 2 || !Find(kKinds, what[0], &rule.kind)) return invalid("no such kind");
  const bool timed = rule.kind == FaultKind::kStopResume || rule.kind == FaultKind::kDelay;
  int64_t millis = 0;
  if (timed != (what.size() == 2) ||
      (timed && (!absl::SimpleAtoi(what[1], &millis) || millis < 0))) {
    return invalid("stop-resume and delay, and only they, take milliseconds");
  }
  rule.time = absl::Milliseconds(millis);
  if (rule.kind >= FaultKind::kNan && !OfAStep(rule.phase)) {
    return invalid("this kind is of a step: prefill, decode, sampling");
  }
  return rule;
}

}  // namespace testing
}  // namespace lockstep
