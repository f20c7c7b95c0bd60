// EngineCore after a fault: back to the logs, suspects alone, replays before anything new.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/engine_core.h"
#include "coordinator/errors.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

// Guilt that convicts a request, and what a fault adds to it while the request runs alone: a crash
// of a worker's own making convicts at once. A process that was killed from outside says little
// about the request: an operator did it, or the kernel, short of memory.
constexpr int32_t kGuilty = 4;
int32_t Guilt(const Fault& fault, bool killed_from_outside) {
  return fault.own_crash ? kGuilty : killed_from_outside ? 1 : 2;
}
// Killed from outside so often in a row, the requests of the step are suspects after all.
constexpr int32_t kSuspiciousKills = 3;

}  // namespace

void EngineCore::Suspend(const Fault& fault) {
  std::set<RequestState*> suspects;
  while (!in_flight_.empty()) {
    const StepInFlight step = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (const EntryInFlight& entry : step.entries) {
      RequestState* request = entry.sequence->request;
      if (!request->ended && entry.sequence->phase != SequencePhase::kDone) {
        suspects.insert(request);
      }
      Abandon(entry);
    }
  }
  replay_reported_ = false;
  replay_ = ReplayReport();
  replay_.tokens = -counters_.tokens_replayed;
  const std::vector<SequenceState*> running(running_.begin(), running_.end());
  std::set<const RequestState*> replayed;
  for (SequenceState* s : running) {
    running_.erase(s);
    ReleasePlace(s);
    s->phase = SequencePhase::kWaiting;
    s->planned_outputs = static_cast<int64_t>(s->output_ids.size());
    s->progressed = false;
    ++s->recoveries;
    waiting_.insert(s);
    replaying_.insert(s);
    replayed.insert(s->request);
  }
  // The workers begin the next epoch with empty slots.
  released_slots_.clear();
  cache_.ForgetAll();
  replay_.requests = static_cast<int64_t>(replayed.size());
  counters_.requests_replayed += replay_.requests;
  ++counters_.recoveries;
  if (BlamesRequests(fault.cause)) Blame(fault, suspects);
  Reap();
}

void EngineCore::Blame(const Fault& fault, const std::set<RequestState*>& suspects) {
  const bool killed_from_outside = fault.cause == FaultCause::kProcessExit && !fault.own_crash;
  if (suspects.size() == 1 && (*suspects.begin())->isolated) {
    RequestState* request = *suspects.begin();
    request->guilt += Guilt(fault, killed_from_outside);
    if (request->guilt < kGuilty) return;
    ++counters_.poison_requests;
    ErrorDetail detail;
    detail.reason = "POISON_REQUEST";
    EndRequest(request,
               MakeError(absl::StatusCode::kInternal,
                         absl::StrCat("the request brought the workers down when it ran alone; it "
                                      "is not tried again. The last time: ",
                                      fault.message),
                         detail),
               RequestEnd::kFailed);
    return;
  }
  for (RequestState* request : suspects) {
    if (killed_from_outside && ++request->kills < kSuspiciousKills) continue;
    if (!request->isolated) ++num_isolated_;
    request->isolated = true;
  }
}

RequestState* EngineCore::Alone() const {
  if (num_isolated_ == 0) return nullptr;
  for (const auto& item : requests_) {
    if (item.second->isolated && !item.second->ended) return item.second.get();
  }
  return nullptr;
}

bool EngineCore::OthersInFlight(const RequestState* alone) const {
  for (const StepInFlight& step : in_flight_) {
    for (const EntryInFlight& entry : step.entries) {
      if (entry.sequence->request != alone) return true;
    }
  }
  return false;
}

bool EngineCore::MakeRoomFor(const RequestState* alone) {
  if (alone == nullptr || !in_flight_.empty()) return false;
  const std::vector<SequenceState*> running(running_.begin(), running_.end());
  bool preempted = false;
  for (SequenceState* s : running) {
    if (s->request == alone) continue;
    Preempt(s);
    preempted = true;
  }
  return preempted;
}

int64_t EngineCore::ReplayDebt() const {
  int64_t debt = 0;
  for (const SequenceState* s : replaying_) {
    debt += std::max<int64_t>(0, s->logged_length() - s->position);
  }
  return debt;
}

void EngineCore::OnProgress(SequenceState* s) {
  replaying_.erase(s);
  RequestState* request = s->request;
  request->kills = 0;
  if (!request->isolated) return;
  const bool through =
      std::all_of(request->outputs.begin(), request->outputs.end(), [](const auto& output) {
        return output->phase != SequencePhase::kRunning || output->progressed;
      });
  if (!through) return;
  request->guilt = 0;
  request->isolated = false;
  --num_isolated_;
}

absl::optional<EngineCore::ReplayReport> EngineCore::TakeReplayReport() {
  if (replay_reported_ || !replaying_.empty()) return absl::nullopt;
  replay_reported_ = true;
  ReplayReport report = replay_;
  report.tokens += counters_.tokens_replayed;
  return report;
}

}  // namespace lockstep
