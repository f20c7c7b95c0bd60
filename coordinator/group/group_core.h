// GroupCore: every decision about the ranks of one replica: bringing them from "process listens" to
// "steps can run", noticing that one is lost, and making the group whole again in a new epoch. No
// thread, no I/O, no clock of its own: it is told of events and of the time, and acts through
// RankLinks. So a simulation drives the same code as production does.
//
// The life of an epoch, on all ranks in parallel:
//   GetInfo -> LoadModel (answers at once where the weights are resident) -> PrepareComm ->
//   InitComm with a self-test -> Configure -> StepStream.
// After a fault: AbortComm on every rank, bounded; ranks that do not answer, whose process ended,
// whose lease expired or whose results were outvoted are given up: their process is ended where it
// is ours, and a spare or a restarted process takes the rank. The others keep their weights. Then
// the sequence above, with the next epoch. What an old epoch still sends is for a stream or call
// that is closed, and is dropped.
//
// Not thread safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "coordinator/group/fault.h"
#include "coordinator/group/group_options.h"
#include "coordinator/group/rank_link.h"
#include "proto/worker.pb.h"

namespace lockstep {

class GroupCore {
 public:
  enum class Phase {
    kIdle,
    kLoading,   // until every rank has its weights; again after a fault
    kLoaded,    // the first load is done: waits for StartJoin
    kJoining,   // an epoch is being formed
    kRunning,   // steps can run
    kAborting,  // after a fault, until every rank has aborted
    kWaiting,   // between attempts
    kBroken,    // for good, or until StartJoin where recovery is off: `status` says why
  };
  using ProgressFn = std::function<void(int rank, const worker::v1::LoadModelProgress& progress)>;
  struct Hooks {
    ProgressFn on_progress;
    // A member of the group was given up and another process takes its rank.
    std::function<void(int rank, const Fault& fault)> on_replaced;
    // A fault was met, or its record has changed.
    std::function<void(const FaultRecord& record)> on_fault;
  };

  // `launcher` may be null.
  GroupCore(const WorkerGroupOptions& options, RankLinkFactory links, WorkerLauncher* launcher,
            Hooks hooks);
  ~GroupCore();

  // Connects to all ranks and loads them once all answer. The term is the larger of `term` and one
  // more than any rank has seen.
  void StartLoad(uint64_t term, absl::Time now);
  // Forms `epoch` (or a higher one, when a rank has seen that) with these limits, which later
  // epochs use too.
  void StartJoin(uint64_t epoch, const worker::v1::ConfigureRequest& limits, absl::Time now);
  void OnEvent(RankEvent event, absl::Time now);
  void OnTime(absl::Time now);
  // When OnTime is to be called next.
  absl::Time next_time() const { return next_time_; }
  // Ends the streams in order; nothing is called failed any more.
  void Close();
  bool streams_ended() const;

  Phase phase() const { return phase_; }
  // In kBroken: why. In kAborting, kWaiting and later phases of a recovery: what broke the group.
  const absl::Status& status() const { return status_; }
  const Fault& last_fault() const { return record_.fault; }
  // Messages that came from a process, call or stream that is not the present one, and were
  // dropped.
  int64_t stale_messages() const { return stale_messages_; }
  uint64_t term() const { return term_; }
  uint64_t epoch() const { return epoch_; }
  int world() const { return static_cast<int>(members_.size()); }
  std::vector<worker::v1::LoadModelResult> load_results() const;

  // In kRunning only.
  void Send(const worker::v1::StepRequest& request, absl::Time now);
  // The next result that all ranks agree on, when it is there. A disagreement is a fault.
  absl::optional<worker::v1::StepResult> TakeResult(absl::Time now);

  // Who took the last result does not believe it.
  void Distrust(const absl::Status& status, absl::Time now);

  // The requests that were running when the last fault came are where they were.
  void OnReplayed(int64_t requests, int64_t tokens_recomputed, absl::Time now);

  // Gives up the process of `rank` (kOperator), as after a fault.
  absl::Status Replace(int rank, absl::string_view reason, absl::Time now);

  struct MemberView {
    std::string address;
    std::string worker_id;
    std::string device;
    std::string state;  // as the worker says; "UNKNOWN" without a recent answer
    absl::Time last_answer = absl::InfinitePast();
    uint64_t last_step = 0;
    int64_t resident_bytes = 0;
    uint64_t incarnation = 0;
  };
  std::vector<MemberView> members() const { return Views(members_); }
  std::vector<MemberView> spares() const { return Views(spares_); }

 private:
  enum class State {
    kConnecting,  // asks GetInfo until it answers
    kConnected,
    kLoading,
    kLoaded,
    kPreparing,
    kPrepared,
    kInit,
    kJoined,
    kConfiguring,
    kReady,
    kStarting,  // its process is being started
  };
  struct Member {
    std::string address;
    int32_t link_id = 0;
    std::unique_ptr<RankLink> link;
    State state = State::kConnecting;
    uint64_t call = 0;  // of the bring-up; 0: none is open
    absl::Time retry_at = absl::InfinitePast();
    uint64_t beat = 0;
    absl::Time beat_at = absl::InfinitePast();
    absl::Time last_answer = absl::InfinitePast();
    worker::v1::GetInfoResponse info;
    worker::v1::HealthResponse health;
    worker::v1::LoadModelResult loaded;
    worker::v1::PrepareCommResponse prepared;
    uint64_t self_test = 0;
    uint64_t abort = 0;  // call of AbortComm that is open
    bool ours = false;   // a process of launcher_, which is there then
    bool exited = false;
    absl::Time exit_due = absl::InfinitePast();  // kAborting: waits so long to hear how it ended
    uint64_t stream = 0;
    bool stream_open = false;
    std::deque<worker::v1::StepResult> results;
  };

  uint64_t NextId() { return ++last_id_; }
  static std::vector<MemberView> Views(const std::vector<std::unique_ptr<Member>>& members);
  std::unique_ptr<Member> MakeMember(const std::string& address, absl::Time now);
  Member* FindByLink(int32_t link, int* rank);  // rank -1: a spare
  absl::Status RankError(int rank, absl::string_view phase, const absl::Status& cause) const;
  uint64_t Call(Member* member, const RankRequest& request, absl::Duration timeout);

  // ---- forming an epoch ----
  void Advance(absl::Time now);
  void AdvanceLoad(absl::Time now);
  void AdvanceJoin(absl::Time now);
  void AskInfo(Member* member, absl::Time now);
  bool AllIn(State state) const;
  absl::Status CheckMembers() const;
  void BeginJoin(absl::Time now);
  void OpenStreams(absl::Time now);
  void OnStreamEnd(Member* member, int rank, const absl::Status& end, absl::Time now);
  void OnAnswer(Member* member, int rank, RankEvent event, absl::Time now);
  void OnBringUpFailure(Member* member, int rank, const absl::Status& status, absl::Time now);
  void FailLoad(const absl::Status& status);
  bool CheckTerm(int rank, const worker::v1::Identity& identity);
  absl::Status Superseded(int rank, absl::string_view what) const;

  // ---- running ----
  void OnBeat(Member* member, int rank, const RankEvent& event, absl::Time now);
  void SendBeats(absl::Time now);
  void CheckLeases(absl::Time now);
  void CheckOverdue(absl::Time now);
  absl::Duration StepBound() const;
  absl::Status CheckAgreement(std::vector<int>* outvoted) const;

  // ---- faults ----
  void Break(Fault fault, const absl::Status& status, absl::Time now);
  void AbortAll(absl::string_view reason);
  void CloseStreams(bool orderly);
  void FinishAbort(absl::Time now);
  void Recover(absl::Time now);
  void GiveUp(const absl::Status& status);
  // A replacement failed: another one after a while, as long as the budget lasts.
  void TryAgain(int rank, const absl::Status& status, absl::Time now);
  void WaitThenRecover(absl::Time now);
  absl::Status Exhausted(const absl::Status& last) const;
  // `fault` is why; the record at hand keeps the cause that began it.
  void ReplaceMember(int rank, const Fault& fault, absl::Time now);
  // Whatever comes back at `address`: a process that is started there when it is ours, else one
  // that is waited for.
  std::unique_ptr<Member> InPlaceOf(const std::string& address, bool ours, absl::Time now);
  bool WithinBudget(absl::Time now);
  void ReportFault(absl::string_view outcome);
  void Reschedule(absl::Time now);
  Member* WaitingSpare(absl::Time now);
  void OnProcessExit(Member* member, int rank, const ProcessExit& exit, absl::Time now);
  void OnProcessStart(Member* member, int rank, const RankEvent& event, absl::Time now);

  const WorkerGroupOptions options_;
  const RankLinkFactory links_;
  WorkerLauncher* const launcher_;
  const Hooks hooks_;

  Phase phase_ = Phase::kIdle;
  absl::Status status_;
  std::vector<std::unique_ptr<Member>> members_;  // rank order
  std::vector<std::unique_ptr<Member>> spares_;
  int32_t last_link_ = 0;
  uint64_t last_id_ = 0;
  int64_t stale_messages_ = 0;
  uint64_t term_ = 0;
  bool term_decided_ = false;
  uint64_t epoch_ = 0;
  uint64_t highest_epoch_ = 0;  // that any rank has seen
  worker::v1::ConfigureRequest limits_;
  bool first_load_ = true;
  absl::Time connect_deadline_ = absl::InfiniteFuture();
  bool closing_ = false;

  // Steps of this epoch.
  uint64_t last_received_ = 0;
  std::deque<absl::Time> sent_at_;           // of the steps that have not been taken
  std::deque<absl::Duration> recent_steps_;  // durations

  // The fault at hand.
  bool recovering_ = false;
  bool ever_ran_ = false;  // some epoch
  bool final_ = false;     // the fault is one that another attempt would meet again
  FaultRecord record_;
  std::set<int> lost_;  // ranks to be replaced
  // A rank's stream ended because of another rank, as it said: until `until` that one may say what
  // happened to it. In kRunning.
  struct Hearsay {
    Fault fault;
    absl::Status status;
    absl::Time until;
  };
  absl::optional<Hearsay> hearsay_;
  absl::Time phase_began_ = absl::InfinitePast();
  absl::Time resume_at_ = absl::InfiniteFuture();  // of kWaiting
  std::deque<absl::Time> recent_faults_;
  int fruitless_ = 0;  // recoveries since a step was agreed on

  absl::Time next_time_ = absl::InfiniteFuture();
};

}  // namespace lockstep
