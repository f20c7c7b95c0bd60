// GroupCore: beats, faults, and making the group whole again.
#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"
#include "coordinator/group/group_core.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace lockstep {

namespace pb = worker::v1;

namespace {

constexpr absl::Duration kAbortTimeout = absl::Seconds(2);
constexpr int kLoadBudget = 3;
constexpr absl::Duration kLongestBackoff = absl::Seconds(10);

// A rank at fault with one of these is replaced even when it still answers.
bool GivesUpRanks(FaultCause cause) {
  switch (cause) {
    case FaultCause::kProcessExit:
    case FaultCause::kLeaseExpired:
    case FaultCause::kDigestMismatch:
    case FaultCause::kBadResult:
    case FaultCause::kDeviceLost:
    case FaultCause::kOperator:
      return true;
    case FaultCause::kStreamReset:
    case FaultCause::kStepRefused:
    case FaultCause::kStepOverdue:
    case FaultCause::kJoinFailed:
      return false;
  }
  return false;
}

}  // namespace

// ---- signs of life ----

void GroupCore::SendBeats(absl::Time now) {
  if (!term_decided_) return;
  pb::HealthRequest request;
  request.set_term(term_);
  request.set_epoch(epoch_);
  request.set_lease_ms(absl::ToInt64Milliseconds(options_.lease));
  const auto beat = [&](Member* member) {
    if (member->state == State::kConnecting || member->state == State::kStarting ||
        member->beat != 0 || now < member->beat_at) {
      return;
    }
    member->beat_at = now + options_.beat_period;
    member->beat = Call(member, request, options_.lease);
  };
  for (const auto& member : members_) beat(member.get());
  for (const auto& spare : spares_) beat(spare.get());
}

void GroupCore::OnBeat(Member* member, int rank, const RankEvent& event, absl::Time now) {
  if (!event.status.ok()) {
    if (rank >= 0 && absl::StartsWith(event.status.message(), "STALE_TERM")) {
      return GiveUp(Superseded(rank, event.status.message()));
    }
    // Silence is judged by the lease. A spare that is gone is looked for again.
    if (rank < 0 && absl::IsUnavailable(event.status)) {
      member->state = State::kConnecting;
      member->call = 0;
      member->retry_at = now + options_.beat_period;
    }
    return;
  }
  member->health = absl::get<pb::HealthResponse>(event.payload);
  const pb::Identity& identity = member->health.identity();
  if (rank < 0) {
    member->last_answer = now;
    return;
  }
  if (!CheckTerm(rank, identity)) return;
  Fault fault;
  fault.ranks = {rank};
  if (member->info.identity().incarnation() != 0 &&
      identity.incarnation() != member->info.identity().incarnation()) {
    fault.cause = FaultCause::kProcessExit;
    fault.message = absl::StrCat("rank ", rank, " (", member->address,
                                 ") is another process than the one that joined");
  } else if (member->health.device_lost()) {
    fault.cause = FaultCause::kDeviceLost;
    fault.own_crash = true;
    fault.message = absl::StrCat("rank ", rank, " (", member->address,
                                 ") has lost its device: ", member->health.error());
  } else {
    member->last_answer = now;
    return;
  }
  const absl::Status status = absl::UnavailableError(fault.message);
  if (phase_ == Phase::kLoading) {
    if (!WithinBudget(now)) return first_load_ ? FailLoad(status) : GiveUp(Exhausted(status));
    return ReplaceMember(rank, fault, now);
  }
  Break(std::move(fault), status, now);
}

void GroupCore::CheckLeases(absl::Time now) {
  for (size_t i = 0; i < members_.size(); ++i) {
    Member* member = members_[i].get();
    const int rank = static_cast<int>(i);
    if (!term_decided_ || member->state == State::kConnecting ||
        member->state == State::kStarting || now - member->last_answer < options_.lease) {
      continue;
    }
    Fault fault;
    fault.cause = FaultCause::kLeaseExpired;
    fault.ranks = {rank};
    fault.message = absl::StrCat(
        "rank ", rank, " (", member->address, ") has not answered for ",
        absl::FormatDuration(absl::Trunc(now - member->last_answer, absl::Milliseconds(1))),
        "; its lease is ", absl::FormatDuration(options_.lease));
    const absl::Status status = absl::UnavailableError(fault.message);
    if (phase_ == Phase::kLoading) {
      LogWarning(fault.message);
      if (WithinBudget(now)) {
        ReplaceMember(rank, fault, now);
      } else {
        return first_load_ ? FailLoad(status) : GiveUp(Exhausted(status));
      }
    } else if (phase_ == Phase::kRunning || phase_ == Phase::kJoining) {
      return Break(std::move(fault), status, now);
    }
  }
}

void GroupCore::CheckOverdue(absl::Time now) {
  if (phase_ != Phase::kRunning || sent_at_.empty()) return;
  const absl::Duration running = now - sent_at_.front();
  if (running <= StepBound()) return;
  Fault fault;
  fault.cause = FaultCause::kStepOverdue;
  for (int rank = 0; rank < world(); ++rank) {
    if (members_[static_cast<size_t>(rank)]->results.empty()) fault.ranks.push_back(rank);
  }
  fault.message = absl::StrCat("step ", last_received_ + 1, " of epoch ", epoch_,
                               " has been running for ", absl::FormatDuration(running),
                               ", the bound is ", absl::FormatDuration(StepBound()),
                               "; no answer of rank ", absl::StrJoin(fault.ranks, ", "));
  const absl::Status status = absl::UnavailableError(fault.message);
  Break(std::move(fault), status, now);
}

void GroupCore::OnProcessExit(Member* member, int rank, const ProcessExit& exit, absl::Time now) {
  member->exited = true;
  if (rank < 0) {
    LogWarning("the spare worker at ", member->address, " ended with ", exit.outcome);
    for (size_t i = 0; i < spares_.size(); ++i) {
      if (spares_[i].get() != member) continue;
      spares_[i] = InPlaceOf(std::string(member->address), member->ours, now);
      return;
    }
    return;
  }
  Fault fault;
  fault.cause = FaultCause::kProcessExit;
  fault.ranks = {rank};
  fault.own_crash = exit.own_doing;
  fault.message = absl::StrCat("the worker of rank ", rank, " (", member->address, ") ended with ",
                               exit.outcome);
  const absl::Status status = absl::UnavailableError(fault.message);
  switch (phase_) {
    case Phase::kLoading:
      LogError(fault.message);
      if (options_.recover && WithinBudget(now)) return ReplaceMember(rank, fault, now);
      return first_load_ ? FailLoad(status) : GiveUp(Exhausted(status));
    case Phase::kAborting:
      // The broken streams were its doing.
      if (record_.fault.cause == FaultCause::kStreamReset ||
          record_.fault.cause == FaultCause::kStepRefused ||
          record_.fault.cause == FaultCause::kJoinFailed) {
        record_.fault = std::move(fault);
        status_ = status;
        LogError(status.message());
      }
      lost_.insert(rank);
      return;
    case Phase::kWaiting:
      lost_.insert(rank);
      return;
    case Phase::kLoaded:
      return FailLoad(status);
    default:
      return Break(std::move(fault), status, now);
  }
}

void GroupCore::OnProcessStart(Member* member, int rank, const RankEvent& event, absl::Time now) {
  if (member->state != State::kStarting) return;
  if (!event.status.ok()) {
    const absl::Status status(event.status.code(),
                              absl::StrCat("a worker in place of the one at ", member->address,
                                           " could not be started: ", event.status.message()));
    if (first_load_) return FailLoad(status);
    if (rank < 0) {
      LogError(status.message());
      return;
    }
    return TryAgain(rank, status, now);
  }
  member->address = absl::get<ProcessStart>(event.payload).address;
  member->link = links_(member->address, member->link_id);
  member->ours = true;
  member->state = State::kConnecting;
  member->retry_at = now;
  member->last_answer = now;
}

// ---- faults ----

void GroupCore::CloseStreams(bool orderly) {
  for (const auto& member : members_) {
    if (member->stream_open && member->link) member->link->CloseStream(member->stream, orderly);
    if (!orderly) {
      member->stream = 0;
      member->stream_open = false;
    }
    member->results.clear();
  }
}

void GroupCore::Close() {
  closing_ = true;
  CloseStreams(/*orderly=*/true);
  next_time_ = absl::InfiniteFuture();
}

bool GroupCore::streams_ended() const {
  return std::none_of(members_.begin(), members_.end(),
                      [](const auto& member) { return member->stream_open; });
}

void GroupCore::Break(Fault fault, const absl::Status& status, absl::Time now) {
  if (phase_ != Phase::kJoining && phase_ != Phase::kRunning) return;
  hearsay_ = absl::nullopt;
  LogError(absl::StatusCodeToString(status.code()), ": ", status.message());
  absl::Time seen = now;
  for (const int rank : fault.ranks) {
    seen = std::min(seen, members_[static_cast<size_t>(rank)]->last_answer);
    if (GivesUpRanks(fault.cause)) lost_.insert(rank);
  }
  if (recovering_ || record_.outcome == "replaying") ReportFault("interrupted");
  recovering_ = options_.recover;
  record_ = FaultRecord();
  record_.fault = std::move(fault);
  record_.term = term_;
  record_.epoch_before = epoch_;
  record_.detected = now;
  record_.silence = now - seen;
  // DEADLINE_EXCEEDED and CANCELLED mean "nothing yet" to who waits for results; a rank that failed
  // with one of them has failed all the same.
  status_ = absl::IsDeadlineExceeded(status) || absl::IsCancelled(status)
                ? absl::UnavailableError(status.message())
                : status;
  phase_ = Phase::kAborting;
  phase_began_ = now;
  CloseStreams(/*orderly=*/false);
  AbortAll(status.message());
  ReportFault("recovering");
}

void GroupCore::AbortAll(absl::string_view reason) {
  pb::AbortCommRequest request;
  request.set_term(term_);
  request.set_epoch(epoch_);
  request.set_reason(std::string(reason));
  for (const auto& member : members_) {
    member->call = 0;
    if (member->link == nullptr) continue;
    member->link->CancelCalls();
    member->beat = 0;
    member->abort = Call(member.get(), request, kAbortTimeout);
  }
}

void GroupCore::FinishAbort(absl::Time now) {
  for (const auto& member : members_) {
    if (member->abort != 0) return;
    if (member->ours && !member->exited && now < member->exit_due) return;
  }
  record_.abort = now - phase_began_;
  const bool refused = record_.fault.cause == FaultCause::kStepRefused;
  if (refused && !lost_.empty() && lost_.count(record_.fault.ranks.front()) == 0) {
    // Its step failed because a peer is gone.
    record_.fault.cause = FaultCause::kStreamReset;
    record_.fault.own_crash = false;
    record_.fault.ranks.assign(lost_.begin(), lost_.end());
  }
  if (!options_.recover || final_) {
    final_ = false;
    recovering_ = false;
    phase_ = Phase::kBroken;
    return;
  }
  if (!WithinBudget(now)) return GiveUp(Exhausted(status_));
  if (!lost_.empty()) {
    LogWarning("rank ", absl::StrJoin(lost_, ", "), " is given up; the others keep their weights");
  }
  // Ended now, so that nothing of it can reach the next epoch.
  for (const int rank : lost_) {
    const Member& member = *members_[static_cast<size_t>(rank)];
    if (member.ours && !member.exited) launcher_->Kill(member.address);
  }
  WaitThenRecover(now);
}

void GroupCore::WaitThenRecover(absl::Time now) {
  absl::Duration wait = absl::ZeroDuration();
  if (fruitless_ > 0) {
    wait = std::min(kLongestBackoff, absl::Milliseconds(100) * (1 << std::min(fruitless_, 10)));
  }
  ++fruitless_;
  phase_ = Phase::kWaiting;
  resume_at_ = now + wait;
  if (wait == absl::ZeroDuration()) Recover(now);
}

void GroupCore::TryAgain(int rank, const absl::Status& status, absl::Time now) {
  LogError(absl::StatusCodeToString(status.code()), ": ", status.message());
  if (!WithinBudget(now)) return GiveUp(Exhausted(status));
  status_ = status;
  for (const auto& member : members_) {
    member->call = 0;
    if (member->link != nullptr) member->link->CancelCalls();
    member->beat = 0;
  }
  lost_.insert(rank);
  WaitThenRecover(now);
}

absl::Status GroupCore::Exhausted(const absl::Status& last) const {
  ErrorDetail detail;
  detail.reason = "RECOVERY_EXHAUSTED";
  return MakeError(absl::StatusCode::kAborted,
                   absl::StrCat("more than ", options_.recovery_budget, " faults within ",
                                absl::FormatDuration(options_.recovery_window),
                                ": the server gives up; the last one: ", last.message()),
                   detail);
}

bool GroupCore::WithinBudget(absl::Time now) {
  while (!recent_faults_.empty() && now - recent_faults_.front() > options_.recovery_window) {
    recent_faults_.pop_front();
  }
  recent_faults_.push_back(now);
  // A worker that cannot even load will hardly do so the next time.
  const int budget =
      first_load_ ? std::min(kLoadBudget, options_.recovery_budget) : options_.recovery_budget;
  return static_cast<int>(recent_faults_.size()) <= budget;
}

void GroupCore::GiveUp(const absl::Status& status) {
  LogError(status.message());
  hearsay_ = absl::nullopt;
  CloseStreams(/*orderly=*/false);
  for (const auto& member : members_) {
    member->call = 0;
    member->abort = 0;
    if (member->link) member->link->CancelCalls();
  }
  phase_ = Phase::kBroken;
  status_ = status;
  if (recovering_) ReportFault("exhausted");
  recovering_ = false;
}

void GroupCore::Recover(absl::Time now) {
  epoch_ = std::max(epoch_, highest_epoch_) + 1;
  phase_ = Phase::kLoading;
  phase_began_ = now;
  connect_deadline_ = absl::InfiniteFuture();
  const std::set<int> lost = std::move(lost_);
  lost_.clear();
  for (int rank = 0; rank < world(); ++rank) {
    if (lost.count(rank) != 0) {
      ReplaceMember(rank, record_.fault, now);
      if (phase_ != Phase::kLoading) return;
      continue;
    }
    // One that is still being started or looked for goes on with that.
    Member* member = members_[static_cast<size_t>(rank)].get();
    if (member->state != State::kStarting && member->state != State::kConnecting) {
      member->state = State::kConnected;
    }
  }
}

GroupCore::Member* GroupCore::WaitingSpare(absl::Time now) {
  for (const auto& spare : spares_) {
    if (spare->state == State::kConnected && now - spare->last_answer < options_.lease) {
      return spare.get();
    }
  }
  return nullptr;
}

std::unique_ptr<GroupCore::Member> GroupCore::InPlaceOf(const std::string& address, bool ours,
                                                        absl::Time now) {
  if (!ours) return MakeMember(address, now);
  auto member = std::make_unique<Member>();
  member->address = address;
  member->link_id = ++last_link_;
  member->state = State::kStarting;
  member->last_answer = now;
  launcher_->Restart(address, member->link_id);
  return member;
}

void GroupCore::ReplaceMember(int rank, const Fault& fault, absl::Time now) {
  std::unique_ptr<Member>& place = members_[static_cast<size_t>(rank)];
  if (hooks_.on_replaced) hooks_.on_replaced(rank, fault);
  record_.replaced_ranks.push_back(rank);
  const std::string address = place->address;
  const bool ours = place->ours;
  if (ours) launcher_->Kill(address);
  Member* spare = options_.prefer_spares ? WaitingSpare(now) : nullptr;
  if (spare == nullptr) {
    place = InPlaceOf(address, ours, now);
    LogInfo("rank ", rank,
            ours ? ": a worker is started in place of the one at " : ": waiting for a worker at ",
            address);
    return;
  }
  for (auto& held : spares_) {
    if (held.get() != spare) continue;
    place = std::move(held);
    // The place of the spare goes to whatever comes back where the rank was lost.
    held = InPlaceOf(address, ours, now);
    break;
  }
  LogInfo("rank ", rank, " goes to the spare worker at ", place->address);
}

void GroupCore::OnReplayed(int64_t requests, int64_t tokens_recomputed, absl::Time now) {
  if (record_.outcome != "replaying") return;
  record_.requests_replayed = requests;
  record_.tokens_recomputed = tokens_recomputed;
  record_.replay = now - record_.detected - record_.abort - record_.replace - record_.join;
  ReportFault("recovered");
}

void GroupCore::Distrust(const absl::Status& status, absl::Time now) {
  Fault fault;
  fault.cause = FaultCause::kBadResult;
  fault.ranks = {0};  // whose results the engine sees
  fault.message = std::string(status.message());
  Break(std::move(fault), status, now);
  Advance(now);
}

absl::Status GroupCore::Replace(int rank, absl::string_view reason, absl::Time now) {
  if (rank < 0 || rank >= world()) {
    return absl::NotFoundError(absl::StrCat("there is no rank ", rank, ": the group has ", world(),
                                            " ranks, 0 to ", world() - 1));
  }
  if (!options_.recover || (phase_ != Phase::kRunning && phase_ != Phase::kJoining)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " cannot be replaced now: the group is not running"));
  }
  Fault fault;
  fault.cause = FaultCause::kOperator;
  fault.ranks = {rank};
  fault.message =
      absl::StrCat("rank ", rank, " is replaced on request", reason.empty() ? "" : ": ", reason);
  const absl::Status status = absl::UnavailableError(fault.message);
  Break(std::move(fault), status, now);
  Advance(now);
  return absl::OkStatus();
}

void GroupCore::ReportFault(absl::string_view outcome) {
  record_.outcome = std::string(outcome);
  if (hooks_.on_fault) hooks_.on_fault(record_);
}

}  // namespace lockstep
