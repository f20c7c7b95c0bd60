// WorkerGroup: see worker_group.h. A queue of events between gRPC's threads and the thread that
// runs GroupCore.
#include "coordinator/group/worker_group.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "coordinator/group/grpc_rank_link.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "proto/worker.grpc.pb.h"

namespace lockstep {
namespace {

namespace pb = worker::v1;

constexpr absl::Duration kShutdownTimeout = absl::Seconds(2);
constexpr absl::Duration kViewPeriod = absl::Milliseconds(50);
constexpr absl::Duration kReplaceTimeout = absl::Seconds(5);
// Of calls that read state only.
constexpr absl::Duration kQueryTimeout = absl::Seconds(10);
constexpr absl::Duration kProbeTimeout = absl::Seconds(60);

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace

class WorkerGroup::Impl {
 public:
  Impl(const WorkerGroupOptions& options, WorkerGroupHooks hooks)
      : options_(options), hooks_(std::move(hooks)) {
    if (hooks_.launcher)
      launcher_ = hooks_.launcher([this](RankEvent event) { Post(std::move(event)); });
    GroupCore::Hooks core_hooks;
    core_hooks.on_progress = [this](int rank, const pb::LoadModelProgress& progress) {
      if (progress_) progress_(rank, progress);
    };
    core_hooks.on_replaced = hooks_.on_replaced;
    core_hooks.on_fault = hooks_.on_fault;
    core_ = std::make_unique<GroupCore>(
        options_,
        [this](const std::string& address, int32_t link) {
          return MakeGrpcRankLink(
              ConnectWorker(address, options_.max_message_bytes, hooks_.credentials), link,
              [this](RankEvent event) { Post(std::move(event)); });
        },
        launcher_.get(), std::move(core_hooks));
    Publish();
  }

  int world() const { return static_cast<int>(options_.addresses.size()); }

  absl::StatusOr<std::vector<pb::LoadModelResult>> Load(uint64_t term, const ProgressFn& progress) {
    progress_ = progress;
    core_->StartLoad(term, absl::Now());
    RunUntil(absl::InfiniteFuture(),
             [this] { return core_->phase() != GroupCore::Phase::kLoading; });
    progress_ = nullptr;
    if (core_->phase() == GroupCore::Phase::kBroken) return core_->status();
    return core_->load_results();
  }

  absl::StatusOr<StepEpoch> Join(uint64_t epoch, const pb::ConfigureRequest& limits) {
    core_->StartJoin(epoch, limits, absl::Now());
    RunUntil(absl::InfiniteFuture(), [this] {
      return core_->phase() == GroupCore::Phase::kRunning ||
             core_->phase() == GroupCore::Phase::kBroken;
    });
    if (core_->phase() == GroupCore::Phase::kBroken) return core_->status();
    epoch_ = core_->epoch();
    return StepEpoch{core_->term(), epoch_};
  }

  absl::Status Send(const pb::StepRequest& request) {
    if (!InEpoch()) return Broken();
    core_->Send(request, absl::Now());
    return absl::OkStatus();
  }

  absl::StatusOr<pb::StepResult> Receive(absl::Time deadline) {
    absl::optional<pb::StepResult> result;
    RunUntil(deadline, [&] {
      if (!result && InEpoch()) result = core_->TakeResult(absl::Now());
      result_taken_ = result.has_value();
      return result || (!InEpoch() && core_->phase() != GroupCore::Phase::kAborting) || woken_;
    });
    if (result) return *std::move(result);
    if (!InEpoch() && core_->phase() != GroupCore::Phase::kAborting) return Broken();
    return TakeWake() ? absl::CancelledError("woken up")
                      : absl::DeadlineExceededError("no result of all ranks yet");
  }

  absl::StatusOr<StepEpoch> AwaitEpoch(absl::Time deadline) {
    RunUntil(deadline, [this] {
      return core_->phase() == GroupCore::Phase::kRunning ||
             core_->phase() == GroupCore::Phase::kBroken || woken_;
    });
    if (core_->phase() == GroupCore::Phase::kRunning) {
      epoch_ = core_->epoch();
      return StepEpoch{core_->term(), epoch_};
    }
    if (core_->phase() == GroupCore::Phase::kBroken) return core_->status();
    return TakeWake() ? absl::CancelledError("woken up")
                      : absl::DeadlineExceededError("the group is not whole yet");
  }

  void Distrust(const absl::Status& status) { core_->Distrust(status, absl::Now()); }
  Fault last_fault() const { return core_->last_fault(); }

  void OnReplayed(int64_t requests, int64_t tokens_recomputed) {
    core_->OnReplayed(requests, tokens_recomputed, absl::Now());
  }

  void Wake() {
    std::lock_guard<std::mutex> lock(mu_);
    woken_ = true;
    changed_.notify_all();
  }

  absl::Status Replace(int rank, const std::string& reason) {
    std::unique_lock<std::mutex> lock(mu_);
    if (replace_) return absl::UnavailableError("another replacement is asked for: try again");
    replace_ = std::make_shared<ReplaceRequest>();
    const std::shared_ptr<ReplaceRequest> request = replace_;
    request->rank = rank;
    request->reason = reason;
    changed_.notify_all();
    changed_.wait_for(lock, absl::ToChronoMilliseconds(kReplaceTimeout),
                      [&] { return request->done; });
    if (request->done) return request->status;
    if (replace_ == request) replace_ = nullptr;
    return absl::FailedPreconditionError("the group is not running");
  }

  View view() const {
    std::lock_guard<std::mutex> lock(view_mu_);
    return view_;
  }

  // Of queries, which any thread may make.
  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    std::lock_guard<std::mutex> lock(view_mu_);
    std::shared_ptr<grpc::Channel>& channel = channels_[address];
    if (channel == nullptr) {
      channel = ConnectWorker(address, options_.max_message_bytes, hooks_.credentials);
    }
    return channel;
  }

  // One unary call on all ranks at once.
  template <typename Response, typename Request>
  std::vector<absl::StatusOr<Response>> CallAll(
      absl::string_view phase, absl::Duration timeout,
      grpc::Status (pb::WorkerService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
      const Request& request) {
    const View now = view();
    std::vector<absl::StatusOr<Response>> answers(
        now.members.size(), absl::StatusOr<Response>(absl::UnavailableError("not asked")));
    const auto call = [&](size_t rank) {
      const std::string& address = now.members[rank].address;
      const auto stub = pb::WorkerService::NewStub(ChannelTo(address));
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
      Response response;
      const grpc::Status status = (stub.get()->*method)(&context, request, &response);
      if (status.ok()) {
        answers[rank] = std::move(response);
      } else {
        answers[rank] = absl::Status(ToAbsl(status).code(),
                                     absl::StrCat("rank ", rank, " (", address, "), ", phase, ": ",
                                                  absl::StatusCodeToString(ToAbsl(status).code()),
                                                  ": ", status.error_message()));
      }
    };
    std::vector<std::thread> threads;
    for (size_t rank = 1; rank < answers.size(); ++rank) threads.emplace_back(call, rank);
    if (!answers.empty()) call(0);
    for (std::thread& thread : threads) thread.join();
    return answers;
  }

  template <typename Response, typename Request>
  absl::StatusOr<std::vector<Response>> Call(absl::string_view phase, absl::Duration timeout,
                                             grpc::Status (pb::WorkerService::Stub::*method)(
                                                 grpc::ClientContext*, const Request&, Response*),
                                             const Request& request) {
    std::vector<absl::StatusOr<Response>> answers =
        CallAll<Response, Request>(phase, timeout, method, request);
    std::vector<Response> responses;
    for (absl::StatusOr<Response>& answer : answers) {
      RETURN_IF_ERROR(answer.status());
      responses.push_back(*std::move(answer));
    }
    return responses;
  }

  void Shutdown() {
    core_->Close();
    RunUntil(absl::Now() + kShutdownTimeout, [this] { return core_->streams_ended(); });
    epoch_ = 0;
    Publish();
  }

 private:
  struct ReplaceRequest {
    int rank = 0;
    std::string reason;
    bool done = false;
    absl::Status status;
  };

  // Any thread.
  void Post(RankEvent event) {
    std::lock_guard<std::mutex> lock(mu_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }

  // The epoch that the caller knows is the one that runs.
  bool InEpoch() const {
    return core_->phase() == GroupCore::Phase::kRunning && core_->epoch() == epoch_;
  }
  absl::Status Broken() const {
    if (!core_->status().ok()) return core_->status();
    return absl::FailedPreconditionError("no step stream is open: Join first");
  }
  bool TakeWake() {
    std::lock_guard<std::mutex> lock(mu_);
    const bool woken = woken_;
    woken_ = false;
    return woken;
  }

  // Feeds the core until `done` or `deadline`.
  void RunUntil(absl::Time deadline, const std::function<bool()>& done) {
    while (true) {
      std::deque<RankEvent> events;
      std::shared_ptr<ReplaceRequest> replace;
      bool finished = done();
      {
        std::unique_lock<std::mutex> lock(mu_);
        const absl::Time until =
            finished ? absl::InfinitePast() : std::min(deadline, core_->next_time());
        const auto ready = [this] { return !events_.empty() || woken_ || replace_ != nullptr; };
        if (finished || woken_) {
          // What has come is taken, without waiting.
        } else if (until == absl::InfiniteFuture()) {
          changed_.wait(lock, ready);
        } else {
          changed_.wait_until(lock, absl::ToChronoTime(until), ready);
        }
        events.swap(events_);
        replace.swap(replace_);
        finished = finished || woken_;
      }
      const absl::Time now = absl::Now();
      while (!events.empty() && !(finished && result_taken_)) {
        core_->OnEvent(std::move(events.front()), now);
        events.pop_front();
        // What was agreed on before a fault is taken before the fault is.
        finished = done() || finished;
      }
      result_taken_ = false;
      if (!events.empty()) {
        std::lock_guard<std::mutex> lock(mu_);
        events_.insert(events_.begin(), std::make_move_iterator(events.begin()),
                       std::make_move_iterator(events.end()));
      }
      if (replace) {
        const absl::Status status = core_->Replace(replace->rank, replace->reason, now);
        std::lock_guard<std::mutex> lock(mu_);
        replace->status = status;
        replace->done = true;
        changed_.notify_all();
      }
      if (now >= core_->next_time()) core_->OnTime(now);
      if (now >= next_view_ || core_->phase() != published_) Publish();
      if (finished || now >= deadline) {
        done();
        return;
      }
    }
  }

  void Publish() {
    View view;
    view.phase = published_ = core_->phase();
    view.status = core_->status();
    view.term = core_->term();
    view.epoch = core_->epoch();
    view.stale_messages = core_->stale_messages();
    view.members = core_->members();
    view.spares = core_->spares();
    if (view.members.empty()) {  // before Load
      for (const std::string& address : options_.addresses) {
        view.members.emplace_back();
        view.members.back().address = address;
        view.members.back().state = "UNKNOWN";
      }
    }
    next_view_ = absl::Now() + kViewPeriod;
    std::lock_guard<std::mutex> lock(view_mu_);
    view_ = std::move(view);
  }

  const WorkerGroupOptions options_;
  const WorkerGroupHooks hooks_;

  std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  std::deque<RankEvent> events_;
  std::atomic<bool> woken_{false};  // written with mu_ held, read without
  std::shared_ptr<ReplaceRequest> replace_;

  mutable std::mutex view_mu_;
  View view_;                                                       // guarded by view_mu_
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_;  // guarded by view_mu_

  // Of the group's thread. Destroyed before the queue that they post to.
  ProgressFn progress_;
  uint64_t epoch_ = 0;  // that the caller knows of
  bool result_taken_ = false;
  GroupCore::Phase published_ = GroupCore::Phase::kIdle;
  absl::Time next_view_ = absl::InfinitePast();
  std::unique_ptr<WorkerLauncher> launcher_;
  std::unique_ptr<GroupCore> core_;
};

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options, WorkerGroupHooks hooks)
    : impl_(std::make_unique<Impl>(options, std::move(hooks))) {}
WorkerGroup::~WorkerGroup() = default;

int WorkerGroup::world() const { return impl_->world(); }

absl::StatusOr<std::vector<pb::LoadModelResult>> WorkerGroup::Load(uint64_t term,
                                                                   const ProgressFn& progress) {
  return impl_->Load(term, progress);
}
absl::StatusOr<StepEpoch> WorkerGroup::Join(uint64_t epoch, const pb::ConfigureRequest& limits) {
  return impl_->Join(epoch, limits);
}
absl::Status WorkerGroup::Send(const pb::StepRequest& request) { return impl_->Send(request); }
absl::StatusOr<pb::StepResult> WorkerGroup::Receive(absl::Time deadline) {
  return impl_->Receive(deadline);
}
void WorkerGroup::Wake() { impl_->Wake(); }
absl::StatusOr<StepEpoch> WorkerGroup::AwaitEpoch(absl::Time deadline) {
  return impl_->AwaitEpoch(deadline);
}
void WorkerGroup::Distrust(const absl::Status& status) { impl_->Distrust(status); }
Fault WorkerGroup::last_fault() const { return impl_->last_fault(); }
void WorkerGroup::OnReplayed(int64_t requests, int64_t tokens_recomputed) {
  impl_->OnReplayed(requests, tokens_recomputed);
}
absl::Status WorkerGroup::Replace(int rank, const std::string& reason) {
  return impl_->Replace(rank, reason);
}
WorkerGroup::View WorkerGroup::view() const { return impl_->view(); }

absl::StatusOr<std::vector<pb::GetInfoResponse>> WorkerGroup::GetInfo() {
  return impl_->Call<pb::GetInfoResponse, pb::GetInfoRequest>(
      "GetInfo", kQueryTimeout, &pb::WorkerService::Stub::GetInfo, pb::GetInfoRequest());
}
std::vector<absl::StatusOr<pb::HealthResponse>> WorkerGroup::Health(absl::Duration timeout) {
  return impl_->CallAll<pb::HealthResponse, pb::HealthRequest>(
      "Health", timeout, &pb::WorkerService::Stub::Health, pb::HealthRequest());
}
absl::StatusOr<std::vector<pb::GetStatsResponse>> WorkerGroup::GetStats() {
  return impl_->Call<pb::GetStatsResponse, pb::GetStatsRequest>(
      "GetStats", kQueryTimeout, &pb::WorkerService::Stub::GetStats, pb::GetStatsRequest());
}
absl::StatusOr<std::vector<pb::ProbeLinearResponse>> WorkerGroup::ProbeLinear(
    const pb::ProbeLinearRequest& request) {
  return impl_->Call<pb::ProbeLinearResponse, pb::ProbeLinearRequest>(
      "ProbeLinear", kProbeTimeout, &pb::WorkerService::Stub::ProbeLinear, request);
}

void WorkerGroup::Shutdown() { impl_->Shutdown(); }

}  // namespace lockstep
