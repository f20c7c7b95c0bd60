// EngineCore: everything the engine decides, without its thread: requests and sequences, the plan
// of the next step, and what a step's result means. The caller carries steps and results, in order.
// Not thread safe; belongs to the engine's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "coordinator/engine.h"
#include "coordinator/engine_observer.h"
#include "coordinator/group/fault.h"
#include "coordinator/prefix_cache.h"
#include "coordinator/scheduler.h"
#include "coordinator/sequence_state.h"

namespace lockstep {

class EngineCore {
 public:
  struct Hooks {
    // The request has got its first place in a step: it is queued no more.
    std::function<void(const RequestState& request)> on_scheduled;
    // Before OnDone.
    std::function<void(const RequestState& request)> on_end;
  };

  struct Counters {
    int64_t steps = 0;
    int64_t step_micros_total = 0;  // of the steps that have answered, as rank 0 measured them
    int64_t tokens_generated = 0;
    int64_t tokens_prefilled = 0;
    int64_t tokens_cached = 0;
    int64_t tokens_replayed = 0;
    int64_t tokens_discarded = 0;
    int64_t prefill_chunks = 0;
    int64_t preemptions = 0;
    int64_t digests_checked = 0;
    int64_t digest_mismatches = 0;
    int64_t nan_logits = 0;
    int64_t requests_started = 0;
    int64_t requests_finished = 0;
    int64_t requests_failed = 0;
    int64_t requests_cancelled = 0;
    int64_t recoveries = 0;
    int64_t requests_replayed = 0;
    int64_t poison_requests = 0;

    std::map<std::string, int64_t> ToMap() const;
  };
  // What EngineStats says, cheap enough for every step.
  struct State {
    EngineStats gauges;  // without its counters
    Counters counters;
  };

  EngineCore(const EngineOptions& options, const Tokenizer* tokenizer, Hooks hooks);
  ~EngineCore();

  // Steps are numbered from 1 again. No step may be in flight.
  void BeginEpoch(uint64_t term, uint64_t epoch);

  // Takes a request whose id is not active. Sends its Accepted events.
  void Add(GenerationSpec spec, std::shared_ptr<GenerationSink> sink, absl::Time submitted);
  // Takes a request that a journal kept, at the length that its log has. Events that were shown
  // before go to `shown`; new ones, and those that come later, to `sink`.
  void Restore(const RestoredRequest& restored, GenerationSink* shown,
               std::shared_ptr<GenerationSink> sink);
  // Ends an active request. False when there is none of this id.
  bool End(const std::string& request_id, const absl::Status& status, RequestEnd how);
  void EndAll(const absl::Status& status);
  // Ends what is past its deadline.
  void ExpireDeadlines(absl::Time now);
  // Nothing is past its deadline before this time.
  absl::Time NextDeadline() const { return next_deadline_; }

  // The next step, which counts as in flight from now on; nothing when there is nothing to run.
  absl::optional<worker::v1::StepRequest> PlanStep();
  // The result of the oldest step in flight. An error means that the workers cannot be believed.
  absl::Status ApplyResult(const worker::v1::StepResult& result);
  // No step in flight will ever report (the group broke). All requests must have ended.
  void DropStepsInFlight();

  // The group broke and will be whole again in another epoch, with nothing on the devices: every
  // sequence goes back to the queue with its log, to be replayed. Requests in the steps that did
  // not report are suspects where the fault may have been their doing: each runs alone until it has
  // got its next token. One that brings the group down alone ends with INTERNAL POISON_REQUEST: at
  // once when the worker crashed by its own doing, later when it was lost for another reason.
  void Suspend(const Fault& fault);
  struct ReplayReport {
    int64_t requests = 0;
    int64_t tokens = 0;  // rows that were run again
  };
  // Once, when every sequence of the last Suspend has its next token or has ended.
  absl::optional<ReplayReport> TakeReplayReport();

  int32_t steps_in_flight() const { return static_cast<int32_t>(in_flight_.size()); }
  int64_t active_requests() const { return static_cast<int64_t>(by_id_.size()); }
  State state() const;
  // Oldest first.
  std::vector<RequestInfo> ListRequests() const;
  // The idle blocks that became free.
  int64_t ResetPrefixCache();
  absl::Time Now() const;

 private:
  struct SnapshotInFlight {
    int32_t snapshot;
    uint64_t name;
  };
  struct EntryInFlight {
    SequenceState* sequence;
    int32_t slot;
    uint64_t generation;
    int64_t position;
    int64_t tokens;
    int64_t num_logits;
    bool sample;
    int32_t restore_snapshot;  // -1: none
    std::vector<SnapshotInFlight> snapshots;
  };
  struct StepInFlight {
    uint64_t step_id;
    uint64_t batch_digest;
    std::vector<EntryInFlight> entries;
  };

  RequestState* NewRequest(GenerationSpec spec, std::shared_ptr<GenerationSink> sink,
                           absl::Time submitted);
  bool CacheUsable(const RequestState& request) const { return !request.chain.empty(); }
  bool WaitsForSibling(const SequenceState& sequence) const;
  int64_t LogitsFrom(const SequenceState& s) const { return s.request->prompt_length() - 1; }

  // ---- planning ----
  SchedulerInput MakeSchedulerInput(std::vector<SequenceState*>* sequences) const;
  SchedulerSequence RunningView(const SequenceState& sequence) const;
  SchedulerSequence WaitingView(const SequenceState& sequence) const;
  PrefixCache::Hit LookupHit(const SequenceState& sequence) const;
  void Preempt(SequenceState* sequence);
  void Admit(SequenceState* sequence);
  EntryInFlight AddEntry(SequenceState* sequence, const ScheduledRows& rows,
                         worker::v1::StepPlan* plan);
  void AddSnapshots(const SequenceState& sequence, EntryInFlight* entry,
                    worker::v1::SequenceEntry* message);
  worker::v1::StepRequest Seal(const worker::v1::StepPlan& plan, StepInFlight step);

  // ---- after a fault (engine_recovery.cc) ----
  void Blame(const Fault& fault, const std::set<RequestState*>& suspects);
  // The request that must run alone now, or null.
  RequestState* Alone() const;
  bool OthersInFlight(const RequestState* alone) const;
  // Preempts what else holds blocks. False when there is nothing.
  bool MakeRoomFor(const RequestState* alone);
  // Rows that are to be run again before all sequences are where they were.
  int64_t ReplayDebt() const;
  void OnProgress(SequenceState* sequence);

  // ---- results ----
  static bool CarriesWhatWasAgreed(const StepInFlight& step, const worker::v1::StepResult& result);
  absl::Status ApplyEntry(const EntryInFlight& entry, const worker::v1::SequenceResult& result);
  void PublishToCache(const EntryInFlight& entry);
  void CheckReplayedDigests(const EntryInFlight& entry, const worker::v1::SequenceResult& result);
  void Log(const EntryInFlight& entry, const worker::v1::SequenceResult& result);
  void FinishOutput(SequenceState* sequence, const OutputStream::Step& step);
  // Its step failed.
  void Abandon(const EntryInFlight& entry);
  // Its step has reported, or never will.
  void Unpin(const EntryInFlight& entry);

  // Blocks that are held, but are in no sequence's table.
  int64_t PinnedWithoutOwner() const;

  // ---- ends ----
  void Retire(SequenceState* sequence);
  void ReleasePlace(SequenceState* sequence);
  void EndLate(RequestState* request, absl::Time now);
  void EndRequest(RequestState* request, const absl::Status& status, RequestEnd how);
  void Reap();

  const EngineOptions options_;
  const Tokenizer* const tokenizer_;
  const Hooks hooks_;
  EngineObserver* const observer_;  // never nullptr

  uint64_t term_ = 0;
  uint64_t epoch_ = 0;
  uint64_t last_step_ = 0;
  uint64_t last_digest_ = 0;
  int64_t next_arrival_ = 0;
  int64_t steps_since_forced_ = 0;

  PrefixCache cache_;
  std::vector<int32_t> free_slots_;
  std::vector<uint64_t> generations_;    // of each slot
  std::vector<int32_t> released_slots_;  // not announced to the workers yet

  std::map<int64_t, std::unique_ptr<RequestState>> requests_;  // by arrival
  std::map<std::string, RequestState*> by_id_;                 // those that have not ended
  std::vector<RequestState*> ended_;                           // to be reaped
  std::set<SequenceState*, OlderSequence> waiting_;
  std::set<SequenceState*, OlderSequence> running_;
  std::deque<StepInFlight> in_flight_;
  Counters counters_;
  int64_t num_isolated_ = 0;            // active requests that are to run alone
  std::set<SequenceState*> replaying_;  // of the last Suspend, without their next token yet
  bool replay_reported_ = true;
  ReplayReport replay_;
  int64_t num_scheduled_ = 0;  // active requests that are in no queue any more
  // No deadline of an active request is earlier.
  absl::Time next_deadline_ = absl::InfiniteFuture();
};

}  // namespace lockstep
