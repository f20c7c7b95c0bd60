// The thread around EngineCore: takes requests and cancellations from other threads, keeps steps
// queued, and waits for a new epoch when the group breaks. Requests fail only when there will be
// none.
#include "coordinator/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/admission.h"
#include "coordinator/engine_core.h"
#include "coordinator/errors.h"
#include "coordinator/scheduler.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace {

constexpr size_t kRememberedRequests = 4096;
// How long the thread sleeps at most: bounds how late a deadline is noticed with an injected clock.
constexpr absl::Duration kLongestWait = absl::Seconds(1);
constexpr absl::Duration kAnswerTimeout = absl::Seconds(2);
constexpr absl::Duration kLongestWaitInjectedClock = absl::Milliseconds(2);

absl::Status WithReason(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                        absl::Duration retry_after = absl::ZeroDuration()) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  detail.retry_after = retry_after;
  return MakeError(code, message, detail);
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, StepTransport* transport, const Tokenizer* tokenizer)
      : options_(options),
        transport_(transport),
        core_(options, tokenizer,
              {[this](const RequestState& request) { OnScheduled(request); },
               [this](const RequestState& request) { OnEnd(request); }}) {
    state_ = core_.state();
  }

  ~Impl() { Stop(WithReason(absl::StatusCode::kUnavailable, "DRAINING", "the server stopped")); }

  void Start(uint64_t term, uint64_t epoch) {
    CHECK(!thread_.joinable()) << "Engine::Start was called twice";
    core_.BeginEpoch(term, epoch);
    last_tick_ = absl::ToUnixMillis(absl::Now());
    thread_ = std::thread([this] { Run(); });
  }
  void StartWithoutThread(uint64_t term, uint64_t epoch) { core_.BeginEpoch(term, epoch); }
  void RunOnce() {
    if (TakeInbox()) Turn();
  }

  absl::Status Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink) {
    CHECK(!spec.prompt_ids.empty() && spec.max_tokens >= 1 && spec.n >= 1);
    {
      std::lock_guard<std::mutex> lock(mu_);
      absl::Status status = Admissible(spec);
      if (!status.ok()) {
        if (options_.observer != nullptr) options_.observer->OnRejected(ReasonOrCode(status));
        return status;
      }
      Count(spec);
      ++untaken_;
      arrivals_.push_back({std::move(spec), std::move(sink), core_.Now()});
    }
    WakeUp();
    return absl::OkStatus();
  }

  void Restore(const RestoredRequest& restored, GenerationSink* shown,
               std::shared_ptr<GenerationSink> sink) {
    CHECK(!thread_.joinable()) << "Engine::Restore after Start";
    const GenerationSpec& spec = restored.spec;
    const absl::Status fits = FitsPool(spec);
    {
      std::lock_guard<std::mutex> lock(mu_);
      Count(spec);
    }
    core_.Restore(restored, shown, std::move(sink));
    if (!fits.ok()) {
      core_.End(spec.request_id,
                WithReason(absl::StatusCode::kFailedPrecondition, ReasonOf(fits),
                           absl::StrCat("restored from the journal: ", fits.message())),
                RequestEnd::kFailed);
    }
    std::lock_guard<std::mutex> lock(mu_);
    state_ = core_.state();
  }

  CancelOutcome Cancel(const std::string& request_id, const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      const auto found = records_.find(request_id);
      if (found == records_.end()) return CancelOutcome::kNotFound;
      if (found->second.finished) return CancelOutcome::kAlreadyFinished;
      cancels_.push_back({request_id, status});
    }
    WakeUp();
    return CancelOutcome::kCancelled;
  }

  void SetDraining(bool draining) {
    std::lock_guard<std::mutex> lock(mu_);
    draining_ = draining;
  }
  bool draining() const {
    std::lock_guard<std::mutex> lock(mu_);
    return draining_;
  }
  bool idle() const {
    std::lock_guard<std::mutex> lock(mu_);
    return active_ == 0 && steps_in_flight_ == 0;
  }
  absl::Status Ready() const {
    std::lock_guard<std::mutex> lock(mu_);
    return failure_.ok() ? recovering_ : failure_;
  }
  absl::Status Failure() const {
    std::lock_guard<std::mutex> lock(mu_);
    return failure_;
  }
  EngineStats stats() const {
    std::lock_guard<std::mutex> lock(mu_);
    EngineStats stats = state_.gauges;
    stats.counters = state_.counters.ToMap();
    // What holds now, rather than when the thread last looked.
    stats.requests_queued = admission_.requests();
    stats.requests_running = active_ - admission_.requests();
    stats.counters["requests_started"] += untaken_;
    return stats;
  }

  absl::Time LastTick() const {
    const int64_t tick = last_tick_;
    return tick < 0 ? absl::InfinitePast() : absl::FromUnixMillis(tick);
  }

  // Has the thread answer between two steps.
  template <typename T>
  absl::StatusOr<T> Ask(std::function<T(EngineCore* core)> question) {
    // Shared: the caller may have given up when the thread comes round.
    auto answer = std::make_shared<std::promise<T>>();
    std::future<T> coming = answer->get_future();
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (ended_) return stop_;
      questions_.push_back(
          [this, answer, question = std::move(question)] { answer->set_value(question(&core_)); });
    }
    WakeUp();
    if (coming.wait_for(absl::ToChronoMilliseconds(kAnswerTimeout)) == std::future_status::ready) {
      return coming.get();
    }
    return WithReason(absl::StatusCode::kUnavailable, "ENGINE_BUSY",
                      "the step loop did not come round in time: retry", absl::Seconds(1));
  }

  void Stop(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (stop_.ok()) stop_ = status.ok() ? absl::CancelledError("the engine stopped") : status;
      if (failure_.ok()) failure_ = stop_;
    }
    WakeUp();
    if (thread_.joinable()) thread_.join();
    bool ended;
    {
      std::lock_guard<std::mutex> lock(mu_);
      ended = ended_;
    }
    if (!ended) EndEverything();  // the thread was never started
  }

 private:
  struct Record {
    uint64_t body_digest = 0;
    int64_t prompt_tokens = 0;
    bool scheduled = false;
    bool finished = false;
    bool completed = false;  // finished with an answer: a failed or cancelled one frees its id
  };
  struct Arrival {
    GenerationSpec spec;
    std::shared_ptr<GenerationSink> sink;
    absl::Time submitted;
  };
  struct Cancellation {
    std::string request_id;
    absl::Status status;
  };

  absl::Status FitsPool(const GenerationSpec& spec) const {
    const int64_t prompt = static_cast<int64_t>(spec.prompt_ids.size());
    // The last token that is generated is never run.
    const int64_t blocks = BlocksFor(prompt + spec.max_tokens - 1);
    if (blocks > options_.kv_blocks) {
      ErrorDetail detail;
      detail.reason = "KV_CAPACITY_IMPOSSIBLE";
      detail.field = "sampling.max_tokens";
      detail.metadata = {{"blocks_needed", absl::StrCat(blocks)},
                         {"blocks_total", absl::StrCat(options_.kv_blocks)},
                         {"prompt_tokens", absl::StrCat(prompt)},
                         {"max_tokens", absl::StrCat(spec.max_tokens)}};
      return MakeError(
          absl::StatusCode::kInvalidArgument,
          absl::StrCat(prompt, " prompt tokens and ", spec.max_tokens, " new ones need ", blocks,
                       " KV blocks of ", kBlockPositions, " positions, the server has ",
                       options_.kv_blocks, ": shorten the prompt or lower max_tokens"),
          detail);
    }
    return absl::OkStatus();
  }

  // Requires mu_.
  absl::Status Admissible(const GenerationSpec& spec) const {
    if (!failure_.ok()) return failure_;
    const auto known = records_.find(spec.request_id);
    if (known != records_.end() && (known->second.completed || !known->second.finished)) {
      return RequestIdReused(spec.request_id, known->second.finished,
                             known->second.body_digest == spec.body_digest);
    }
    if (const absl::Status fits = FitsPool(spec); !fits.ok()) return fits;
    if (draining_) {
      return WithReason(absl::StatusCode::kUnavailable, "DRAINING",
                        "the server is draining: send the request elsewhere");
    }
    const int64_t prompt = static_cast<int64_t>(spec.prompt_ids.size());
    return admission_.Check(prompt, std::min(spec.deadline, spec.queue_deadline), core_.Now());
  }

  // Requires mu_. A new request; its record takes the place of the one that a failed request of
  // this id left.
  void Count(const GenerationSpec& spec) {
    Record record;
    record.body_digest = spec.body_digest;
    record.prompt_tokens = static_cast<int64_t>(spec.prompt_ids.size());
    ++active_;
    admission_.OnQueued(record.prompt_tokens, core_.Now());
    if (!records_.insert_or_assign(spec.request_id, record).second) {
      remembered_.erase(std::find(remembered_.begin(), remembered_.end(), spec.request_id));
    }
  }

  void WakeUp() {
    transport_->Wake();
    wake_.notify_all();
  }

  // ---- called by core_, on the thread, without mu_ ----
  void OnScheduled(const RequestState& request) {
    std::lock_guard<std::mutex> lock(mu_);
    Record& record = records_.at(request.spec.request_id);
    record.scheduled = true;
    admission_.OnScheduled(record.prompt_tokens, core_.Now());
  }
  void OnEnd(const RequestState& request) {
    std::lock_guard<std::mutex> lock(mu_);
    Record& record = records_.at(request.spec.request_id);
    if (!record.scheduled) admission_.OnRemoved(record.prompt_tokens, core_.Now());
    record.finished = true;
    record.completed = request.outputs_finished == request.spec.n;
    --active_;
    remembered_.push_back(request.spec.request_id);
    if (remembered_.size() > kRememberedRequests) {
      records_.erase(remembered_.front());
      remembered_.pop_front();
    }
    // Not steps_in_flight_: the step that ended it may not have given everything back yet.
    state_ = core_.state();
  }
  void PublishLocked() {
    state_ = core_.state();
    steps_in_flight_ = core_.steps_in_flight();
  }

  // ---- the thread ----
  void Run() {
    while (TakeInbox()) Turn();
    EndEverything();
  }

  void Turn() {
    core_.ExpireDeadlines(core_.Now());
    if (!Failure().ok()) return;
    if (suspended_) {
      AwaitEpoch();
      return;
    }
    const absl::Status status = Advance();
    if (!status.ok()) Suspend(status);
  }

  // False when the engine is to stop.
  bool TakeInbox() {
    std::deque<Arrival> arrivals;
    std::deque<Cancellation> cancels;
    std::deque<std::function<void()>> questions;
    bool failed = false;
    {
      std::unique_lock<std::mutex> lock(mu_);
      PublishLocked();
      if (!failure_.ok()) {
        wake_.wait_for(lock, absl::ToChronoMilliseconds(kLongestWait), [this] {
          return !stop_.ok() || !arrivals_.empty() || !cancels_.empty() || !questions_.empty();
        });
      }
      last_tick_ = absl::ToUnixMillis(absl::Now());
      if (!stop_.ok()) return false;
      arrivals.swap(arrivals_);
      cancels.swap(cancels_);
      questions.swap(questions_);
      failed = !failure_.ok();
    }
    Take(std::move(arrivals));
    for (const Cancellation& cancel : cancels) {
      core_.End(cancel.request_id, cancel.status, RequestEnd::kCancelled);
    }
    if (failed) core_.EndAll(Failure());
    for (const auto& question : questions) question();
    return true;
  }

  void Take(std::deque<Arrival> arrivals) {
    for (Arrival& arrival : arrivals) {
      core_.Add(std::move(arrival.spec), std::move(arrival.sink), arrival.submitted);
      std::lock_guard<std::mutex> lock(mu_);
      --untaken_;
      state_ = core_.state();
    }
  }

  // Queues steps and takes one result.
  absl::Status Advance() {
    // Also when nothing had to be replayed, or what had to has ended otherwise.
    if (const auto replayed = core_.TakeReplayReport()) {
      transport_->OnReplayed(replayed->requests, replayed->tokens);
    }
    while (core_.steps_in_flight() < options_.steps_in_flight) {
      const absl::optional<worker::v1::StepRequest> step = core_.PlanStep();
      if (!step) break;
      const absl::Status sent = transport_->Send(*step);
      if (!sent.ok()) return sent;
    }
    {
      std::lock_guard<std::mutex> lock(mu_);
      PublishLocked();
    }
    if (core_.steps_in_flight() == 0) {
      // With no step in flight every block is free or owned by a sequence that could be preempted.
      CHECK_EQ(core_.active_requests(), 0) << "nothing can be planned";
    }
    const absl::StatusOr<worker::v1::StepResult> result =
        transport_->Receive(absl::Now() + LongestWait());
    if (result.ok()) {
      const absl::Status applied = core_.ApplyResult(*result);
      if (!applied.ok()) transport_->Distrust(applied);
      return applied;
    }
    if (absl::IsDeadlineExceeded(result.status()) || absl::IsCancelled(result.status())) {
      return absl::OkStatus();
    }
    return result.status();
  }

  absl::Duration LongestWait() const {
    if (options_.clock) return kLongestWaitInjectedClock;
    const absl::Duration left = core_.NextDeadline() - absl::Now();
    return std::min(kLongestWait, std::max(left, absl::Milliseconds(1)));
  }

  // The group broke: everything goes back to its log until there is a new epoch.
  void Suspend(const absl::Status& cause) {
    suspended_ = true;
    broken_by_ = cause;
    core_.Suspend(transport_->last_fault());
    std::lock_guard<std::mutex> lock(mu_);
    recovering_ = WithReason(
        absl::StatusCode::kUnavailable, "RECOVERING",
        absl::StrCat("the workers are being brought together again after: ", cause.message()),
        absl::Seconds(1));
    PublishLocked();
  }

  void AwaitEpoch() {
    const absl::StatusOr<StepEpoch> epoch = transport_->AwaitEpoch(absl::Now() + LongestWait());
    if (epoch.ok()) {
      core_.BeginEpoch(epoch->term, epoch->epoch);
      suspended_ = false;
      std::lock_guard<std::mutex> lock(mu_);
      recovering_ = absl::OkStatus();
      return;
    }
    if (absl::IsDeadlineExceeded(epoch.status()) || absl::IsCancelled(epoch.status())) return;
    // A status with a reason of its own is for clients.
    Fail(ReasonOf(epoch.status()).empty()
             ? WithReason(
                   absl::StatusCode::kUnavailable, "ENGINE_FAILED",
                   absl::StrCat("the workers cannot run steps any more: ", broken_by_.message()))
             : epoch.status());
  }

  void Fail(const absl::Status& status) {
    LogError("engine: ", status.message());
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (failure_.ok()) failure_ = status;
    }
    core_.EndAll(status);
    core_.DropStepsInFlight();
  }

  void EndEverything() {
    absl::Status status;
    std::deque<Arrival> arrivals;
    {
      std::lock_guard<std::mutex> lock(mu_);
      status = stop_;
      arrivals.swap(arrivals_);
      cancels_.clear();
    }
    Take(std::move(arrivals));
    core_.EndAll(status);
    core_.DropStepsInFlight();
    std::deque<std::function<void()>> questions;
    {
      std::lock_guard<std::mutex> lock(mu_);
      PublishLocked();
      ended_ = true;
      questions.swap(questions_);
    }
    for (const auto& question : questions) question();
  }

  // Constant.
  const EngineOptions options_;
  StepTransport* const transport_;

  std::atomic<int64_t> last_tick_{-1};  // Unix milliseconds

  // Of the thread.
  EngineCore core_;
  std::thread thread_;
  bool suspended_ = false;  // between a fault and the next epoch
  absl::Status broken_by_;

  mutable std::mutex mu_;
  std::condition_variable wake_;
  // Guarded by mu_:
  std::deque<Arrival> arrivals_;
  std::deque<Cancellation> cancels_;
  std::deque<std::function<void()>> questions_;
  std::unordered_map<std::string, Record> records_;
  std::deque<std::string> remembered_;  // finished ones, oldest first
  int64_t active_ = 0;
  Admission admission_{options_.max_queued_requests, options_.max_queued_tokens};
  int64_t untaken_ = 0;  // submitted, but not counted by core_ yet
  int32_t steps_in_flight_ = 0;
  bool draining_ = false;
  bool ended_ = false;
  absl::Status failure_;     // why no request is taken
  absl::Status recovering_;  // why no step runs now
  absl::Status stop_;        // not OK: the thread is to end
  EngineCore::State state_;
};

Engine::Engine(const EngineOptions& options, StepTransport* transport, const Tokenizer* tokenizer)
    : impl_(std::make_unique<Impl>(options, transport, tokenizer)) {}
Engine::~Engine() = default;
void Engine::Start(uint64_t term, uint64_t epoch) { impl_->Start(term, epoch); }
void Engine::StartWithoutThread(uint64_t term, uint64_t epoch) {
  impl_->StartWithoutThread(term, epoch);
}
void Engine::RunOnce() { impl_->RunOnce(); }
void Engine::Restore(const RestoredRequest& restored, GenerationSink* shown,
                     std::shared_ptr<GenerationSink> sink) {
  impl_->Restore(restored, shown, std::move(sink));
}
absl::Status Engine::Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink) {
  return impl_->Submit(std::move(spec), std::move(sink));
}
Engine::CancelOutcome Engine::Cancel(const std::string& request_id, const absl::Status& status) {
  return impl_->Cancel(request_id, status);
}
void Engine::Drain() { impl_->SetDraining(true); }
void Engine::Undrain() { impl_->SetDraining(false); }
bool Engine::draining() const { return impl_->draining(); }
bool Engine::idle() const { return impl_->idle(); }
absl::Status Engine::Ready() const { return impl_->Ready(); }
absl::Status Engine::Failure() const { return impl_->Failure(); }
EngineStats Engine::stats() const { return impl_->stats(); }
absl::Time Engine::LastTick() const { return impl_->LastTick(); }
absl::StatusOr<std::vector<RequestInfo>> Engine::ListRequests() {
  return impl_->Ask<std::vector<RequestInfo>>(
      [](EngineCore* core) { return core->ListRequests(); });
}
absl::StatusOr<int64_t> Engine::ResetPrefixCache() {
  return impl_->Ask<int64_t>([](EngineCore* core) { return core->ResetPrefixCache(); });
}
void Engine::Stop(const absl::Status& status) { impl_->Stop(status); }

}  // namespace lockstep
