// GroupCore: forming an epoch and running it. What happens after a fault: group_recovery.cc.
#include "coordinator/group/group_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "coordinator/group/rank_identity.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace lockstep {

namespace pb = worker::v1;

namespace {

// Zeroing a cache of hundreds of gigabytes takes minutes.
constexpr absl::Duration kConfigureTimeout = absl::Minutes(10);
constexpr absl::Duration kGetInfoAttempt = absl::Seconds(5);
constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// The workers' own bound is to end first: its message says which peer is missing.
constexpr absl::Duration kInitGrace = absl::Seconds(5);
// What a rank says of its own end arrives within this of what its peers say.
constexpr absl::Duration kHearsay = absl::Milliseconds(200);
// How long the end of a process of ours may take to be told after its connection broke.
constexpr absl::Duration kExitNotice = absl::Seconds(1);
constexpr size_t kRememberedSteps = 128;
constexpr uint64_t kFirstSteps = 10;

bool IsStaleTerm(const absl::Status& status) {
  return absl::StartsWith(status.message(), "STALE_TERM");
}

// The process, not its answer, is what is missing.
bool Unreachable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsUnknown(status);
}

}  // namespace

GroupCore::GroupCore(const WorkerGroupOptions& options, RankLinkFactory links,
                     WorkerLauncher* launcher, Hooks hooks)
    : options_(options), links_(std::move(links)), launcher_(launcher), hooks_(std::move(hooks)) {
  CHECK(!options_.addresses.empty());
}

GroupCore::~GroupCore() = default;

std::unique_ptr<GroupCore::Member> GroupCore::MakeMember(const std::string& address,
                                                         absl::Time now) {
  auto member = std::make_unique<Member>();
  member->address = address;
  member->link_id = ++last_link_;
  member->link = links_(address, member->link_id);
  member->retry_at = now;
  member->last_answer = now;
  if (launcher_ != nullptr) member->ours = launcher_->Watch(address, member->link_id);
  return member;
}

GroupCore::Member* GroupCore::FindByLink(int32_t link, int* rank) {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i]->link_id != link) continue;
    *rank = static_cast<int>(i);
    return members_[i].get();
  }
  *rank = -1;
  for (const auto& spare : spares_) {
    if (spare->link_id == link) return spare.get();
  }
  return nullptr;
}

absl::Status GroupCore::RankError(int rank, absl::string_view phase,
                                  const absl::Status& cause) const {
  absl::Status status(
      cause.code(),
      absl::StrCat("rank ", rank, " (", members_[static_cast<size_t>(rank)]->address, "), ", phase,
                   ": ", absl::StatusCodeToString(cause.code()), ": ", cause.message()));
  cause.ForEachPayload([&status](absl::string_view type, const absl::Cord& payload) {
    status.SetPayload(type, payload);
  });
  return status;
}

uint64_t GroupCore::Call(Member* member, const RankRequest& request, absl::Duration timeout) {
  const uint64_t id = NextId();
  member->link->Call(id, request, timeout);
  return id;
}

bool GroupCore::AllIn(State state) const {
  return std::all_of(members_.begin(), members_.end(),
                     [state](const auto& member) { return member->state == state; });
}

std::vector<pb::LoadModelResult> GroupCore::load_results() const {
  std::vector<pb::LoadModelResult> results;
  for (const auto& member : members_) results.push_back(member->loaded);
  return results;
}

// ---- entry points ----

void GroupCore::StartLoad(uint64_t term, absl::Time now) {
  CHECK(phase_ == Phase::kIdle) << "StartLoad was called twice";
  term_ = term;
  for (const std::string& address : options_.addresses) {
    members_.push_back(MakeMember(address, now));
  }
  for (const std::string& address : options_.spares) spares_.push_back(MakeMember(address, now));
  connect_deadline_ = now + options_.connect_timeout;
  phase_ = Phase::kLoading;
  phase_began_ = now;
  Advance(now);
}

void GroupCore::StartJoin(uint64_t epoch, const pb::ConfigureRequest& limits, absl::Time now) {
  CHECK(phase_ == Phase::kLoaded || phase_ == Phase::kRunning ||
        (phase_ == Phase::kBroken && !first_load_))
      << "Join before Load";
  CloseStreams(/*orderly=*/false);
  limits_ = limits;
  epoch_ = std::max(epoch, std::max(epoch_, highest_epoch_) + 1);
  for (const auto& member : members_) member->state = State::kLoaded;
  status_ = absl::OkStatus();
  BeginJoin(now);
  Advance(now);
}

void GroupCore::OnEvent(RankEvent event, absl::Time now) {
  int rank = -1;
  Member* member = FindByLink(event.link, &rank);
  if (member == nullptr) {  // of a process that was given up
    ++stale_messages_;
    return;
  }
  switch (event.kind) {
    case RankEvent::Kind::kAnswer:
      if (event.id == member->beat) {
        member->beat = 0;
        OnBeat(member, rank, event, now);
      } else if (event.id == member->abort) {
        member->abort = 0;
        if (event.status.ok()) {
          member->last_answer = now;
        } else if (IsStaleTerm(event.status)) {
          GiveUp(Superseded(rank, event.status.message()));
        } else if (Unreachable(event.status)) {
          lost_.insert(rank);
          if (member->ours && !member->exited) member->exit_due = now + kExitNotice;
        }
      } else if (event.id == member->call) {
        member->call = 0;
        OnAnswer(member, rank, std::move(event), now);
      } else {
        ++stale_messages_;
      }
      break;
    case RankEvent::Kind::kProgress:
      if (event.id != member->call) break;
      member->last_answer = now;
      if (hooks_.on_progress && rank >= 0) {
        hooks_.on_progress(rank, absl::get<pb::LoadModelProgress>(event.payload));
      }
      break;
    case RankEvent::Kind::kStepResult:
      if (event.id != member->stream || phase_ != Phase::kRunning) {
        ++stale_messages_;
        break;
      }
      member->results.push_back(absl::get<pb::StepResult>(std::move(event.payload)));
      break;
    case RankEvent::Kind::kStreamEnded:
      if (event.id != member->stream) break;
      OnStreamEnd(member, rank, event.status, now);
      break;
    case RankEvent::Kind::kProcessExited:
      OnProcessExit(member, rank, absl::get<ProcessExit>(event.payload), now);
      break;
    case RankEvent::Kind::kProcessStarted:
      OnProcessStart(member, rank, event, now);
      break;
  }
  Advance(now);
}

void GroupCore::OnStreamEnd(Member* member, int rank, const absl::Status& end, absl::Time now) {
  member->stream_open = false;
  if (closing_ || phase_ != Phase::kRunning) return;
  if (options_.recover && IsStaleTerm(end)) {
    return GiveUp(Superseded(rank, end.message()));
  }
  const absl::Status status = RankError(
      rank, "StepStream", end.ok() ? absl::UnavailableError("the worker ended the stream") : end);
  // ABORTED: a peer was lost, or its step failed and took the group along.
  const bool reset = end.ok() || Unreachable(end) || absl::IsAborted(end);
  Fault fault;
  fault.cause = reset ? FaultCause::kStreamReset : FaultCause::kStepRefused;
  fault.own_crash = !reset;
  fault.ranks = {rank};
  fault.message = std::string(status.message());
  const bool others = std::any_of(members_.begin(), members_.end(),
                                  [](const auto& other) { return other->stream_open; });
  if (options_.recover && absl::IsAborted(end) && others) {
    if (!hearsay_) hearsay_ = Hearsay{std::move(fault), status, now + kHearsay};
    return;
  }
  // When all speak of others, the first one counts.
  if (absl::IsAborted(end) && hearsay_) {
    const Hearsay first = *std::move(hearsay_);
    return Break(first.fault, first.status, now);
  }
  Break(std::move(fault), status, now);
}

void GroupCore::OnTime(absl::Time now) {
  if (phase_ == Phase::kWaiting && now >= resume_at_) Recover(now);
  if (options_.recover && !closing_) {
    SendBeats(now);
    CheckLeases(now);
    CheckOverdue(now);
    if (hearsay_ && now >= hearsay_->until) {
      const Hearsay first = *std::move(hearsay_);
      Break(first.fault, first.status, now);
    }
  }
  Advance(now);
}

void GroupCore::Reschedule(absl::Time now) {
  next_time_ = absl::InfiniteFuture();
  if (closing_ || phase_ == Phase::kIdle) return;
  if (phase_ == Phase::kWaiting) next_time_ = resume_at_;
  if (hearsay_) next_time_ = std::min(next_time_, hearsay_->until);
  const auto consider = [&](const Member& member, bool spare) {
    if (member.state == State::kConnecting && member.call == 0 &&
        (spare || phase_ == Phase::kLoading)) {
      next_time_ = std::min(next_time_, member.retry_at);
    }
    if (phase_ == Phase::kAborting && member.exit_due > now) {
      next_time_ = std::min(next_time_, member.exit_due);
    }
    if (options_.recover && member.state != State::kConnecting &&
        member.state != State::kStarting) {
      if (member.beat == 0 && term_decided_) next_time_ = std::min(next_time_, member.beat_at);
      // Leases are judged in these phases; in others an expired one is no reason to wake up.
      if (phase_ == Phase::kLoading || phase_ == Phase::kJoining || phase_ == Phase::kRunning) {
        next_time_ = std::min(
            next_time_, std::max(now + absl::Milliseconds(1), member.last_answer + options_.lease));
      }
    }
  };
  for (const auto& member : members_) consider(*member, false);
  for (const auto& spare : spares_) consider(*spare, true);
}

// ---- forming an epoch ----

void GroupCore::Advance(absl::Time now) {
  if (phase_ == Phase::kAborting) FinishAbort(now);
  if (phase_ == Phase::kLoading) AdvanceLoad(now);
  if (phase_ == Phase::kJoining) AdvanceJoin(now);
  if (phase_ != Phase::kIdle && !closing_) {
    for (const auto& spare : spares_) AskInfo(spare.get(), now);
  }
  Reschedule(now);
}

void GroupCore::AskInfo(Member* member, absl::Time now) {
  if (member->state != State::kConnecting || member->call != 0 || now < member->retry_at) return;
  member->call = Call(member, pb::GetInfoRequest(), kGetInfoAttempt);
}

absl::Status GroupCore::CheckMembers() const {
  for (int rank = 1; rank < world(); ++rank) {
    const pb::LoadModelResult& first = members_[0]->loaded;
    const pb::LoadModelResult& other = members_[static_cast<size_t>(rank)]->loaded;
    if (first.identity().model_digest() == other.identity().model_digest() &&
        first.architecture() == other.architecture() && first.vocab_size() == other.vocab_size()) {
      continue;
    }
    return RankError(rank, "LoadModel",
                     absl::FailedPreconditionError(
                         absl::StrCat("it loaded ", other.architecture(), " with digest ",
                                      absl::Hex(other.identity().model_digest(), absl::kZeroPad16),
                                      ", rank 0 loaded ", first.architecture(), " with digest ",
                                      absl::Hex(first.identity().model_digest(), absl::kZeroPad16),
                                      ": give all ranks the same checkpoint")));
  }
  return absl::OkStatus();
}

void GroupCore::AdvanceLoad(absl::Time now) {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (first_load_ || !options_.prefer_spares) break;
    // A rank whose process does not answer goes to a spare that does.
    Member* member = members_[rank].get();
    if (member->state == State::kConnecting && !member->ours && WaitingSpare(now) != nullptr) {
      ReplaceMember(static_cast<int>(rank), record_.fault, now);
    }
  }
  for (const auto& member : members_) AskInfo(member.get(), now);
  // The first time nothing is loaded, and no term is taken, before all ranks answer.
  if (!term_decided_) {
    if (!AllIn(State::kConnected)) return;
    std::vector<pb::GetInfoResponse> infos;
    for (const auto& member : members_) infos.push_back(member->info);
    const absl::Status distinct = CheckDistinctRanks(infos, options_.share_devices);
    if (!distinct.ok()) return FailLoad(distinct);
    for (const auto& member : members_) {
      term_ = std::max(term_, member->info.identity().term() + 1);
    }
    term_decided_ = true;
  }
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    Member* member = members_[rank].get();
    if (member->state != State::kConnected) continue;
    pb::LoadModelRequest request;
    request.set_term(term_);
    request.set_path(options_.model_path);
    request.set_expected_digest(first_load_ ? options_.expected_digest
                                            : members_[0]->loaded.identity().model_digest());
    request.set_rank(static_cast<int>(rank));
    request.set_world(world());
    request.set_activation_dtype(options_.activation_dtype);
    request.set_activation_quant(options_.activation_quant);
    member->state = State::kLoading;
    member->call = Call(member, request, absl::InfiniteDuration());
  }
  if (!AllIn(State::kLoaded)) return;
  const absl::Status same = CheckMembers();
  if (first_load_) {
    if (!same.ok()) return FailLoad(same);
    first_load_ = false;
    phase_ = Phase::kLoaded;
    return;
  }
  if (!same.ok()) return TryAgain(world() - 1, same, now);
  record_.replace = now - phase_began_;
  phase_began_ = now;
  BeginJoin(now);
}

void GroupCore::BeginJoin(absl::Time now) {
  phase_ = Phase::kJoining;
  phase_began_ = now;
  epoch_ = std::max(epoch_, highest_epoch_ + 1);
  if (options_.persist_epoch) {
    const absl::Status kept = options_.persist_epoch(term_, epoch_);
    if (!kept.ok()) return GiveUp(kept);
  }
  limits_.set_term(term_);
  limits_.set_epoch(epoch_);
  pb::PrepareCommRequest prepare;
  prepare.set_term(term_);
  prepare.set_epoch(epoch_);
  for (const auto& member : members_) {
    member->state = State::kPreparing;
    member->call = Call(member.get(), prepare, options_.comm_timeout);
  }
}

void GroupCore::AdvanceJoin(absl::Time now) {
  if (AllIn(State::kPrepared)) {
    pb::InitCommRequest init;
    init.set_term(term_);
    init.set_epoch(epoch_);
    init.set_timeout_ms(absl::ToInt64Milliseconds(options_.comm_timeout));
    for (const auto& member : members_) init.add_addresses(member->prepared.address());
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      init.set_rank(static_cast<int>(rank));
      members_[rank]->state = State::kInit;
      members_[rank]->call = Call(members_[rank].get(), init, options_.comm_timeout + kInitGrace);
    }
  } else if (AllIn(State::kJoined)) {
    for (int rank = 1; rank < world(); ++rank) {
      const uint64_t found = members_[static_cast<size_t>(rank)]->self_test;
      if (found == members_[0]->self_test) continue;
      const absl::Status status = RankError(
          rank, "InitComm",
          absl::InternalError(absl::StrCat("its self-test gave ", absl::Hex(found),
                                           ", rank 0's gave ", absl::Hex(members_[0]->self_test))));
      Fault fault;
      fault.cause = FaultCause::kJoinFailed;
      fault.ranks = {rank};
      fault.message = std::string(status.message());
      final_ = !ever_ran_;
      return Break(std::move(fault), status, now);
    }
    for (const auto& member : members_) {
      member->state = State::kConfiguring;
      member->call = Call(member.get(), limits_, kConfigureTimeout);
    }
  } else if (AllIn(State::kReady)) {
    OpenStreams(now);
  }
}

void GroupCore::OpenStreams(absl::Time now) {
  for (const auto& member : members_) {
    member->results.clear();
    member->stream = NextId();
    member->stream_open = true;
    member->link->OpenStream(member->stream);
  }
  last_received_ = 0;
  sent_at_.clear();
  recent_steps_.clear();
  phase_ = Phase::kRunning;
  ever_ran_ = true;
  if (!recovering_) return;
  recovering_ = false;
  record_.join = now - phase_began_;
  record_.epoch_after = epoch_;
  LogInfo("epoch ", epoch_, " runs: ", absl::FormatDuration(now - record_.detected),
          " after the fault (abort ", absl::FormatDuration(record_.abort), ", replace ",
          absl::FormatDuration(record_.replace), ", join ", absl::FormatDuration(record_.join),
          ")");
  ReportFault("replaying");
}

bool GroupCore::CheckTerm(int rank, const pb::Identity& identity) {
  highest_epoch_ = std::max(highest_epoch_, identity.epoch());
  if (!term_decided_ || identity.term() <= term_) return true;
  GiveUp(Superseded(rank, absl::StrCat("of term ", identity.term())));
  return false;
}

absl::Status GroupCore::Superseded(int rank, absl::string_view what) const {
  ErrorDetail detail;
  detail.reason = "SUPERSEDED";
  return MakeError(absl::StatusCode::kUnavailable,
                   absl::StrCat("rank ", rank, " (", members_[static_cast<size_t>(rank)]->address,
                                ") belongs to another coordinator (", what,
                                "); this one's term is ", term_, ": ask that one"),
                   detail);
}

void GroupCore::OnAnswer(Member* member, int rank, RankEvent event, absl::Time now) {
  if (!event.status.ok()) return OnBringUpFailure(member, rank, event.status, now);
  member->last_answer = now;
  switch (member->state) {
    case State::kConnecting:
      member->info = absl::get<pb::GetInfoResponse>(std::move(event.payload));
      if (rank >= 0 && !CheckTerm(rank, member->info.identity())) return;
      member->state = State::kConnected;
      member->beat_at = now;
      break;
    case State::kLoading:
      member->loaded = absl::get<pb::LoadModelResult>(std::move(event.payload));
      if (!CheckTerm(rank, member->loaded.identity())) return;
      member->state = State::kLoaded;
      break;
    case State::kPreparing:
      member->prepared = absl::get<pb::PrepareCommResponse>(std::move(event.payload));
      member->state = State::kPrepared;
      break;
    case State::kInit:
      member->self_test = absl::get<pb::InitCommResponse>(event.payload).self_test();
      member->state = State::kJoined;
      break;
    case State::kConfiguring:
      member->state = State::kReady;
      break;
    default:
      CHECK(false) << "an answer in a state that asked for nothing";
  }
}

void GroupCore::OnBringUpFailure(Member* member, int rank, const absl::Status& status,
                                 absl::Time now) {
  if (rank < 0) {  // a spare
    member->state = State::kConnecting;
    member->retry_at = now + options_.beat_period;
    return;
  }
  if (IsStaleTerm(status)) return GiveUp(Superseded(rank, status.message()));
  if (member->state == State::kConnecting) {
    if (member->ours && options_.recover && absl::IsDeadlineExceeded(status) && WithinBudget(now)) {
      // It runs and listens, and does not answer: it is of no use.
      Fault fault;
      fault.cause = FaultCause::kLeaseExpired;
      fault.ranks = {rank};
      fault.message = std::string(RankError(rank, "GetInfo", status).message());
      LogError(fault.message);
      return ReplaceMember(rank, fault, now);
    }
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) {
      return first_load_ ? FailLoad(RankError(rank, "GetInfo", status))
                         : GiveUp(RankError(rank, "GetInfo", status));
    }
    if (now + kRetryPause >= connect_deadline_) {
      ErrorDetail detail;
      detail.reason = "WORKER_UNREACHABLE";
      return FailLoad(
          RankError(rank, "GetInfo",
                    MakeError(absl::StatusCode::kDeadlineExceeded,
                              absl::StrCat("the worker did not answer within ",
                                           absl::FormatDuration(options_.connect_timeout),
                                           "; the last attempt gave: ", status.message()),
                              detail)));
    }
    member->retry_at = now + kRetryPause;
    return;
  }
  static constexpr const char* kPhases[] = {
      "GetInfo",  "GetInfo",  "LoadModel", "LoadModel", "PrepareComm",  "PrepareComm",
      "InitComm", "InitComm", "Configure", "Configure", "process start"};
  const absl::Status named = RankError(rank, kPhases[static_cast<int>(member->state)], status);
  const bool lost = Unreachable(status) || absl::StartsWith(status.message(), "DEVICE_LOST");
  if (member->state == State::kLoading) {
    Fault fault;
    fault.cause = absl::StartsWith(status.message(), "DEVICE_LOST") ? FaultCause::kDeviceLost
                  : lost                                            ? FaultCause::kStreamReset
                                                                    : FaultCause::kJoinFailed;
    fault.ranks = {rank};
    fault.message = std::string(named.message());
    if (first_load_ && !(options_.recover && lost && WithinBudget(now))) return FailLoad(named);
    if (!lost) return TryAgain(rank, named, now);
    if (!first_load_ && !WithinBudget(now)) return GiveUp(Exhausted(named));
    return ReplaceMember(rank, fault, now);
  }
  Fault fault;
  fault.cause = FaultCause::kJoinFailed;
  fault.ranks = {rank};
  fault.message = std::string(named.message());
  if (absl::StartsWith(status.message(), "DEVICE_LOST")) fault.cause = FaultCause::kDeviceLost;
  // Limits or devices that the ranks refuse the first time they will refuse again.
  final_ = !ever_ran_ && !lost && !absl::IsAborted(status);
  // An epoch that a rank has seen already: its number is the least that the next one may have.
  if (absl::StartsWith(status.message(), "STALE_EPOCH")) {
    highest_epoch_ = std::max(highest_epoch_, epoch_ + 15);
  }
  Break(std::move(fault), named, now);
}

void GroupCore::FailLoad(const absl::Status& status) {
  phase_ = Phase::kBroken;
  status_ = status;
  for (const auto& member : members_) {
    member->call = 0;
    if (member->link != nullptr) member->link->CancelCalls();
  }
}

// ---- running ----

void GroupCore::Send(const pb::StepRequest& request, absl::Time now) {
  CHECK(phase_ == Phase::kRunning);
  for (const auto& member : members_) {
    if (member->stream_open) member->link->Write(member->stream, request);
  }
  sent_at_.push_back(now);
}

absl::optional<pb::StepResult> GroupCore::TakeResult(absl::Time now) {
  if (phase_ != Phase::kRunning) return absl::nullopt;
  if (!std::all_of(members_.begin(), members_.end(),
                   [](const auto& member) { return !member->results.empty(); })) {
    return absl::nullopt;
  }
  ++last_received_;
  std::vector<int> outvoted;
  const absl::Status agreed = CheckAgreement(&outvoted);
  if (!agreed.ok()) {
    Fault fault;
    fault.cause = FaultCause::kDigestMismatch;
    fault.ranks = outvoted;
    fault.message = std::string(agreed.message());
    Break(std::move(fault), agreed, now);
    Advance(now);
    return absl::nullopt;
  }
  if (!sent_at_.empty()) {
    recent_steps_.push_back(now - sent_at_.front());
    sent_at_.pop_front();
    if (recent_steps_.size() > kRememberedSteps) recent_steps_.pop_front();
  }
  fruitless_ = 0;
  pb::StepResult result = std::move(members_[0]->results.front());
  for (const auto& member : members_) member->results.pop_front();
  return result;
}

absl::Status GroupCore::CheckAgreement(std::vector<int>* outvoted) const {
  const auto front = [this](int rank) -> const pb::StepResult& {
    return members_[static_cast<size_t>(rank)]->results.front();
  };
  for (int rank = 0; rank < world(); ++rank) {
    const pb::StepResult& found = front(rank);
    if (found.step_id() == last_received_ && found.epoch() == epoch_) continue;
    *outvoted = {rank};
    return RankError(
        rank, "StepStream",
        absl::InternalError(absl::StrCat("a result of step ", last_received_, " of epoch ", epoch_,
                                         " was expected, found step ", found.step_id(),
                                         " of epoch ", found.epoch())));
  }
  // Those that differ from what most ranks say; all when there is no majority.
  const auto votes = [&](int rank) {
    int same = 0;
    for (int other = 0; other < world(); ++other) {
      same += front(rank).batch_digest() == front(other).batch_digest() &&
                      front(rank).result_digest() == front(other).result_digest()
                  ? 1
                  : 0;
    }
    return same;
  };
  for (int rank = 0; rank < world(); ++rank) {
    if (2 * votes(rank) <= world()) outvoted->push_back(rank);
  }
  for (int rank = 1; rank < world(); ++rank) {
    const pb::StepResult& first = front(0);
    const pb::StepResult& found = front(rank);
    const bool same_batch = found.batch_digest() == first.batch_digest();
    if (same_batch && found.result_digest() == first.result_digest()) continue;
    const uint64_t ours = same_batch ? first.result_digest() : first.batch_digest();
    const uint64_t theirs = same_batch ? found.result_digest() : found.batch_digest();
    return absl::InternalError(absl::StrCat(
        "step ", found.step_id(), ": ranks 0 (", members_[0]->address, ") and ", rank, " (",
        members_[static_cast<size_t>(rank)]->address, ") disagree on the ",
        same_batch ? "result" : "batch", " digest: ", absl::Hex(ours, absl::kZeroPad16), " and ",
        absl::Hex(theirs, absl::kZeroPad16)));
  }
  return absl::OkStatus();
}

absl::Duration GroupCore::StepBound() const {
  absl::Duration bound = options_.step_timeout;
  if (!recent_steps_.empty()) {
    std::vector<absl::Duration> sorted(recent_steps_.begin(), recent_steps_.end());
    std::sort(sorted.begin(), sorted.end());
    bound = std::max(bound, 20 * sorted[sorted.size() * 99 / 100]);
  }
  return last_received_ < kFirstSteps ? 6 * bound : bound;
}

std::vector<GroupCore::MemberView> GroupCore::Views(
    const std::vector<std::unique_ptr<Member>>& members) {
  std::vector<MemberView> views;
  for (const auto& held : members) {
    const Member& member = *held;
    MemberView view;
    view.address = member.address;
    view.worker_id = member.info.identity().worker_id();
    view.device = member.info.device();
    view.last_answer = member.last_answer;
    view.last_step = member.health.last_step();
    view.resident_bytes = member.loaded.resident_bytes();
    view.incarnation = member.info.identity().incarnation();
    view.state = member.state == State::kConnecting || member.state == State::kStarting
                     ? "UNKNOWN"
                     : pb::WorkerState_Name(member.health.state());
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace lockstep
