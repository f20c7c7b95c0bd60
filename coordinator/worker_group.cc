// WorkerGroup: see worker_group.h. One connection, one step stream and one reader thread per rank.
#include "coordinator/worker_group.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "coordinator/errors.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "proto/worker.grpc.pb.h"

namespace lockstep {
namespace {

namespace pb = worker::v1;

// Zeroing a cache of hundreds of gigabytes takes minutes.
constexpr absl::Duration kConfigureTimeout = absl::Minutes(10);
constexpr absl::Duration kAbortTimeout = absl::Seconds(2);
constexpr absl::Duration kShutdownTimeout = absl::Seconds(2);
constexpr absl::Duration kGetInfoAttempt = absl::Seconds(5);
constexpr absl::Duration kRetryPause = absl::Milliseconds(100);

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                       int64_t max_message_bytes) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  args.SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Ranks may come up long after the first attempt.
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(
      address, credentials != nullptr ? credentials : grpc::InsecureChannelCredentials(), args);
}

}  // namespace

class WorkerGroup::Impl {
 public:
  explicit Impl(const WorkerGroupOptions& options) : options_(options) {
    CHECK(!options.addresses.empty());
    for (const std::string& address : options.addresses) {
      ranks_.push_back(std::make_unique<Rank>());
      ranks_.back()->address = address;
      ranks_.back()->stub = pb::WorkerService::NewStub(
          Connect(address, options.credentials, options.max_message_bytes));
    }
  }

  ~Impl() { CloseStreams(absl::ZeroDuration()); }

  int world() const { return static_cast<int>(ranks_.size()); }

  absl::StatusOr<std::vector<pb::LoadModelResult>> Load(uint64_t term, const ProgressFn& progress) {
    const absl::Time deadline = absl::Now() + options_.connect_timeout;
    RETURN_IF_ERROR(OnAllRanks(
        "GetInfo", [&](int rank, CallScope* scope) { return WaitForRank(rank, deadline, scope); }));
    std::vector<pb::LoadModelResult> results(ranks_.size());
    std::mutex progress_mu;
    RETURN_IF_ERROR(OnAllRanks("LoadModel", [&](int rank, CallScope* scope) {
      pb::LoadModelRequest request;
      request.set_term(term);
      request.set_path(options_.model_path);
      request.set_expected_digest(options_.expected_digest);
      request.set_rank(rank);
      request.set_world(world());
      request.set_activation_dtype(options_.activation_dtype);
      request.set_activation_quant(options_.activation_quant);
      grpc::ClientContext context;
      if (!scope->Enter(&context)) return absl::CancelledError("another rank failed");
      auto stream = ranks_[static_cast<size_t>(rank)]->stub->LoadModel(&context, request);
      pb::LoadModelProgress message;
      bool has_result = false;
      while (stream->Read(&message)) {
        if (message.has_result()) {
          results[static_cast<size_t>(rank)] = message.result();
          has_result = true;
        }
        std::lock_guard<std::mutex> lock(progress_mu);
        if (progress) progress(rank, message);
      }
      const grpc::Status status = stream->Finish();
      scope->Leave();
      if (status.ok() && !has_result) {
        return absl::InternalError("the load ended without a result");
      }
      return ToAbsl(status);
    }));
    RETURN_IF_ERROR(CheckSameModel(results));
    return results;
  }

  absl::Status Join(uint64_t term, uint64_t epoch, const pb::ConfigureRequest& limits) {
    CloseStreams(absl::ZeroDuration());
    term_ = term;
    epoch_ = epoch;
    absl::Status status = FormGroup(limits);
    if (!status.ok()) {
      AbortAll(status.message());
      return status;
    }
    OpenStreams();
    return absl::OkStatus();
  }

  absl::Status Send(const pb::StepRequest& request) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!failure_.ok()) return failure_;
      if (!open_) return absl::FailedPreconditionError("no step stream is open: Join first");
    }
    for (int rank = 0; rank < world(); ++rank) {
      Rank& r = *ranks_[static_cast<size_t>(rank)];
      if (r.stream->Write(request)) continue;
      // The reader has the reason why the stream ended.
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(kAbortTimeout),
                        [this] { return !failure_.ok(); });
      if (!failure_.ok()) {
        WaitForAbort(&lock);
        return failure_;
      }
      lock.unlock();
      return Fail(RankError(rank, "StepStream", absl::UnavailableError("the stream is broken")));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<pb::StepResult> Receive(absl::Time deadline) {
    std::vector<pb::StepResult> results;
    {
      std::unique_lock<std::mutex> lock(mu_);
      const auto ready = [this] { return woken_ || !failure_.ok() || AllAnswered(); };
      changed_.wait_until(lock, absl::ToChronoTime(deadline), ready);
      if (woken_) {
        woken_ = false;
        return absl::CancelledError("woken up");
      }
      if (!AllAnswered()) {
        if (failure_.ok()) return absl::DeadlineExceededError("no result of all ranks yet");
        WaitForAbort(&lock);
        return failure_;
      }
      for (const auto& rank : ranks_) {
        results.push_back(std::move(rank->results.front()));
        rank->results.pop_front();
      }
      ++last_received_;
    }
    const absl::Status agreed = CheckAgreement(results);
    if (!agreed.ok()) return Fail(agreed);
    return std::move(results.front());
  }

  void Wake() {
    std::lock_guard<std::mutex> lock(mu_);
    woken_ = true;
    changed_.notify_all();
  }

  // One unary call on all ranks at once.
  template <typename Response, typename Request>
  absl::StatusOr<std::vector<Response>> Call(absl::string_view phase, absl::Duration timeout,
                                             grpc::Status (pb::WorkerService::Stub::*method)(
                                                 grpc::ClientContext*, const Request&, Response*),
                                             const std::function<Request(int rank)>& request) {
    std::vector<Response> responses(ranks_.size());
    RETURN_IF_ERROR(OnAllRanks(phase, [&](int rank, CallScope* scope) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
      if (!scope->Enter(&context)) return absl::CancelledError("another rank failed");
      pb::WorkerService::Stub* stub = ranks_[static_cast<size_t>(rank)]->stub.get();
      const grpc::Status status =
          (stub->*method)(&context, request(rank), &responses[static_cast<size_t>(rank)]);
      scope->Leave();
      return ToAbsl(status);
    }));
    return responses;
  }

  void Shutdown() { CloseStreams(kShutdownTimeout); }

  std::vector<absl::StatusOr<pb::HealthResponse>> Health(absl::Duration timeout) {
    std::vector<absl::StatusOr<pb::HealthResponse>> answers(ranks_.size(),
                                                            absl::UnavailableError("not asked"));
    ForEachRank([&](int rank) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
      pb::HealthResponse response;
      const grpc::Status status =
          ranks_[static_cast<size_t>(rank)]->stub->Health(&context, {}, &response);
      if (status.ok()) {
        answers[static_cast<size_t>(rank)] = response;
      } else {
        answers[static_cast<size_t>(rank)] = RankError(rank, "Health", ToAbsl(status));
      }
    });
    return answers;
  }

 private:
  struct Rank {
    std::string address;
    std::unique_ptr<pb::WorkerService::Stub> stub;
    std::unique_ptr<grpc::ClientContext> context;  // of the stream
    std::unique_ptr<grpc::ClientReaderWriter<pb::StepRequest, pb::StepResult>> stream;
    std::thread reader;
    std::deque<pb::StepResult> results;  // guarded by mu_
    bool ended = true;                   // guarded by mu_: the reader has left
  };

  // The calls of one phase: when one rank fails the others' are cancelled.
  class CallGroup {
   public:
    bool Enter(grpc::ClientContext* context) {
      std::lock_guard<std::mutex> lock(mu_);
      if (cancelled_) return false;
      contexts_.insert(context);
      return true;
    }
    void Leave(grpc::ClientContext* context) {
      std::lock_guard<std::mutex> lock(mu_);
      contexts_.erase(context);
    }
    // Keeps the first error.
    void Fail(const absl::Status& status) {
      std::lock_guard<std::mutex> lock(mu_);
      if (cancelled_) return;
      cancelled_ = true;
      status_ = status;
      for (grpc::ClientContext* context : contexts_) context->TryCancel();
      changed_.notify_all();
    }
    // False when the group has failed.
    bool Sleep(absl::Duration duration) {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(duration), [this] { return cancelled_; });
      return !cancelled_;
    }
    absl::Status status() {
      std::lock_guard<std::mutex> lock(mu_);
      return status_;
    }

   private:
    std::mutex mu_;
    std::condition_variable changed_;
    bool cancelled_ = false;
    absl::Status status_;
    std::set<grpc::ClientContext*> contexts_;
  };

  // One rank's part in a CallGroup: at most one call at a time.
  class CallScope {
   public:
    explicit CallScope(CallGroup* group) : group_(group) {}
    bool Enter(grpc::ClientContext* context) {
      context_ = context;
      return group_->Enter(context);
    }
    void Leave() { group_->Leave(context_); }
    bool Sleep(absl::Duration duration) { return group_->Sleep(duration); }

   private:
    CallGroup* group_;
    grpc::ClientContext* context_ = nullptr;
  };

  absl::Status RankError(int rank, absl::string_view phase, const absl::Status& cause) const {
    absl::Status status(
        cause.code(),
        absl::StrCat("rank ", rank, " (", ranks_[static_cast<size_t>(rank)]->address, "), ", phase,
                     ": ", absl::StatusCodeToString(cause.code()), ": ", cause.message()));
    cause.ForEachPayload([&status](absl::string_view type, const absl::Cord& payload) {
      status.SetPayload(type, payload);
    });
    return status;
  }

  void ForEachRank(const std::function<void(int rank)>& call) {
    std::vector<std::thread> threads;
    for (int rank = 1; rank < world(); ++rank) threads.emplace_back([&call, rank] { call(rank); });
    call(0);
    for (std::thread& thread : threads) thread.join();
  }

  absl::Status OnAllRanks(absl::string_view phase,
                          const std::function<absl::Status(int rank, CallScope* scope)>& call) {
    CallGroup group;
    ForEachRank([&](int rank) {
      CallScope scope(&group);
      const absl::Status status = call(rank, &scope);
      if (!status.ok()) group.Fail(RankError(rank, phase, status));
    });
    return group.status();
  }

  // Retries until the rank answers GetInfo.
  absl::Status WaitForRank(int rank, absl::Time deadline, CallScope* scope) {
    int64_t attempts = 0;
    while (true) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(std::min(deadline, absl::Now() + kGetInfoAttempt)));
      if (!scope->Enter(&context)) return absl::CancelledError("another rank failed");
      pb::GetInfoResponse response;
      const grpc::Status status = ranks_[static_cast<size_t>(rank)]->stub->GetInfo(
          &context, pb::GetInfoRequest(), &response);
      scope->Leave();
      if (status.ok()) return absl::OkStatus();
      const bool retry = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      if (!retry) return ToAbsl(status);
      if (attempts++ == 0) {
        LogInfo("waiting for rank ", rank, " at ", ranks_[static_cast<size_t>(rank)]->address);
      }
      if (absl::Now() + kRetryPause >= deadline) {
        ErrorDetail detail;
        detail.reason = "WORKER_UNREACHABLE";
        return MakeError(
            absl::StatusCode::kDeadlineExceeded,
            absl::StrCat("the worker did not answer within ",
                         absl::FormatDuration(options_.connect_timeout), " (", attempts,
                         " attempts); the last one gave: ", status.error_message()),
            detail);
      }
      if (!scope->Sleep(kRetryPause)) return absl::CancelledError("another rank failed");
    }
  }

  absl::Status CheckSameModel(const std::vector<pb::LoadModelResult>& results) const {
    for (int rank = 1; rank < world(); ++rank) {
      const pb::LoadModelResult& first = results[0];
      const pb::LoadModelResult& other = results[static_cast<size_t>(rank)];
      if (first.identity().model_digest() == other.identity().model_digest() &&
          first.architecture() == other.architecture() &&
          first.vocab_size() == other.vocab_size()) {
        continue;
      }
      return RankError(rank, "LoadModel",
                       absl::FailedPreconditionError(absl::StrCat(
                           "it loaded ", other.architecture(), " with digest ",
                           absl::Hex(other.identity().model_digest(), absl::kZeroPad16),
                           ", rank 0 loaded ", first.architecture(), " with digest ",
                           absl::Hex(first.identity().model_digest(), absl::kZeroPad16),
                           ": give all ranks the same checkpoint")));
    }
    return absl::OkStatus();
  }

  absl::Status FormGroup(const pb::ConfigureRequest& limits) {
    pb::PrepareCommRequest prepare;
    prepare.set_term(term_);
    prepare.set_epoch(epoch_);
    using Stub = pb::WorkerService::Stub;
    ASSIGN_OR_RETURN(const std::vector<pb::PrepareCommResponse> prepared,
                     (Call<pb::PrepareCommResponse, pb::PrepareCommRequest>(
                         "PrepareComm", options_.comm_timeout, &Stub::PrepareComm,
                         [&](int) { return prepare; })));
    pb::InitCommRequest init;
    init.set_term(term_);
    init.set_epoch(epoch_);
    init.set_timeout_ms(absl::ToInt64Milliseconds(options_.comm_timeout));
    for (const pb::PrepareCommResponse& response : prepared) {
      init.add_addresses(response.address());
    }
    // The workers' own bound is to end first: its message says which peer is missing.
    ASSIGN_OR_RETURN(
        const std::vector<pb::InitCommResponse> joined,
        (Call<pb::InitCommResponse, pb::InitCommRequest>(
            "InitComm", options_.comm_timeout + absl::Seconds(5), &Stub::InitComm, [&](int rank) {
              pb::InitCommRequest request = init;
              request.set_rank(rank);
              return request;
            })));
    for (int rank = 1; rank < world(); ++rank) {
      const uint64_t found = joined[static_cast<size_t>(rank)].self_test();
      if (found == joined[0].self_test()) continue;
      return RankError(
          rank, "InitComm",
          absl::InternalError(absl::StrCat("its self-test gave ", absl::Hex(found),
                                           ", rank 0's gave ", absl::Hex(joined[0].self_test()))));
    }
    pb::ConfigureRequest configure = limits;
    configure.set_term(term_);
    configure.set_epoch(epoch_);
    return Call<pb::ConfigureResponse, pb::ConfigureRequest>(
               "Configure", kConfigureTimeout, &Stub::Configure, [&](int) { return configure; })
        .status();
  }

  // ---- step streams ----

  void OpenStreams() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      failure_ = absl::OkStatus();
      abort_done_ = false;
      closing_ = false;
      open_ = true;
      last_received_ = 0;
      for (const auto& rank : ranks_) {
        rank->results.clear();
        rank->ended = false;
      }
    }
    for (int rank = 0; rank < world(); ++rank) {
      Rank* r = ranks_[static_cast<size_t>(rank)].get();
      r->context = std::make_unique<grpc::ClientContext>();
      r->stream = r->stub->StepStream(r->context.get());
      r->reader = std::thread([this, rank, r] { ReadResults(rank, r); });
    }
  }

  void ReadResults(int rank, Rank* r) {
    pb::StepResult result;
    while (r->stream->Read(&result)) {
      std::lock_guard<std::mutex> lock(mu_);
      r->results.push_back(std::move(result));
      result.Clear();
      changed_.notify_all();
    }
    const grpc::Status status = r->stream->Finish();
    bool expected;
    {
      std::lock_guard<std::mutex> lock(mu_);
      expected = closing_;
    }
    if (!expected) {
      Fail(RankError(rank, "StepStream",
                     status.ok() ? absl::UnavailableError("the worker ended the stream")
                                 : ToAbsl(status)))
          .IgnoreError();
    }
    std::lock_guard<std::mutex> lock(mu_);
    r->ended = true;
    changed_.notify_all();
  }

  // Ends the streams; the workers have `patience` to end them in order.
  void CloseStreams(absl::Duration patience) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      closing_ = true;
      open_ = false;
    }
    if (patience > absl::ZeroDuration()) {
      for (const auto& rank : ranks_) {
        if (rank->stream) rank->stream->WritesDone();
      }
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(patience), [this] {
        return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return r->ended; });
      });
    }
    for (const auto& rank : ranks_) {
      if (rank->context) rank->context->TryCancel();
      if (rank->reader.joinable()) rank->reader.join();
      rank->stream.reset();
      rank->context.reset();
    }
  }

  // Requires mu_.
  bool AllAnswered() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const auto& rank) { return !rank->results.empty(); });
  }

  absl::Status CheckAgreement(const std::vector<pb::StepResult>& results) const {
    for (int rank = 0; rank < world(); ++rank) {
      const pb::StepResult& found = results[static_cast<size_t>(rank)];
      if (found.step_id() != last_received_ || found.epoch() != epoch_) {
        return RankError(
            rank, "StepStream",
            absl::InternalError(absl::StrCat("a result of step ", last_received_, " of epoch ",
                                             epoch_, " was expected, found step ", found.step_id(),
                                             " of epoch ", found.epoch())));
      }
      const pb::StepResult& first = results[0];
      const bool same_batch = found.batch_digest() == first.batch_digest();
      if (same_batch && found.result_digest() == first.result_digest()) continue;
      const uint64_t ours = same_batch ? first.result_digest() : first.batch_digest();
      const uint64_t theirs = same_batch ? found.result_digest() : found.batch_digest();
      return absl::InternalError(absl::StrCat(
          "step ", found.step_id(), ": ranks 0 (", ranks_[0]->address, ") and ", rank, " (",
          ranks_[static_cast<size_t>(rank)]->address, ") disagree on the ",
          same_batch ? "result" : "batch", " digest: ", absl::Hex(ours, absl::kZeroPad16), " and ",
          absl::Hex(theirs, absl::kZeroPad16)));
    }
    return absl::OkStatus();
  }

  // Notes the first failure and aborts the group. Returns that failure.
  absl::Status Fail(const absl::Status& status) {
    std::unique_lock<std::mutex> lock(mu_);
    if (!failure_.ok()) {
      WaitForAbort(&lock);
      return failure_;
    }
    // DEADLINE_EXCEEDED and CANCELLED mean "nothing yet" to the caller of Receive; a rank that
    // failed with one of them has failed all the same.
    failure_ = absl::IsDeadlineExceeded(status) || absl::IsCancelled(status)
                   ? absl::UnavailableError(status.message())
                   : status;
    lock.unlock();
    LogError(status.ToString());
    AbortAll(status.message());
    lock.lock();
    abort_done_ = true;
    changed_.notify_all();
    return failure_;
  }

  // Requires that failure_ is set; `lock` holds mu_.
  void WaitForAbort(std::unique_lock<std::mutex>* lock) {
    changed_.wait(*lock, [this] { return abort_done_; });
  }

  // Best effort, bounded by kAbortTimeout.
  void AbortAll(absl::string_view reason) {
    pb::AbortCommRequest request;
    request.set_term(term_);
    request.set_epoch(epoch_);
    request.set_reason(std::string(reason));
    ForEachRank([&](int rank) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + kAbortTimeout));
      pb::AbortCommResponse response;
      const grpc::Status status =
          ranks_[static_cast<size_t>(rank)]->stub->AbortComm(&context, request, &response);
      if (!status.ok()) LogWarning(RankError(rank, "AbortComm", ToAbsl(status)).ToString());
    });
  }

  // Constant after construction, but for the streams, which Join and Shutdown change.
  const WorkerGroupOptions options_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t term_ = 0;
  uint64_t epoch_ = 0;

  std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  absl::Status failure_;
  bool abort_done_ = false;
  bool closing_ = false;
  bool open_ = false;
  bool woken_ = false;
  uint64_t last_received_ = 0;
};

namespace {

// Of calls that read state only.
constexpr absl::Duration kQueryTimeout = absl::Seconds(10);
constexpr absl::Duration kProbeTimeout = absl::Seconds(60);

}  // namespace

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
WorkerGroup::~WorkerGroup() = default;

int WorkerGroup::world() const { return impl_->world(); }

absl::StatusOr<std::vector<pb::LoadModelResult>> WorkerGroup::Load(uint64_t term,
                                                                   const ProgressFn& progress) {
  return impl_->Load(term, progress);
}

absl::Status WorkerGroup::Join(uint64_t term, uint64_t epoch, const pb::ConfigureRequest& limits) {
  return impl_->Join(term, epoch, limits);
}

absl::Status WorkerGroup::Send(const pb::StepRequest& request) { return impl_->Send(request); }

absl::StatusOr<pb::StepResult> WorkerGroup::Receive(absl::Time deadline) {
  return impl_->Receive(deadline);
}

void WorkerGroup::Wake() { impl_->Wake(); }

absl::StatusOr<std::vector<pb::GetInfoResponse>> WorkerGroup::GetInfo() {
  return impl_->Call<pb::GetInfoResponse, pb::GetInfoRequest>(
      "GetInfo", kQueryTimeout, &pb::WorkerService::Stub::GetInfo,
      [](int) { return pb::GetInfoRequest(); });
}

std::vector<absl::StatusOr<pb::HealthResponse>> WorkerGroup::Health(absl::Duration timeout) {
  return impl_->Health(timeout);
}

absl::StatusOr<std::vector<pb::GetStatsResponse>> WorkerGroup::GetStats() {
  return impl_->Call<pb::GetStatsResponse, pb::GetStatsRequest>(
      "GetStats", kQueryTimeout, &pb::WorkerService::Stub::GetStats,
      [](int) { return pb::GetStatsRequest(); });
}

absl::StatusOr<std::vector<pb::ProbeLinearResponse>> WorkerGroup::ProbeLinear(
    const pb::ProbeLinearRequest& request) {
  return impl_->Call<pb::ProbeLinearResponse, pb::ProbeLinearRequest>(
      "ProbeLinear", kProbeTimeout, &pb::WorkerService::Stub::ProbeLinear,
      [&request](int) { return request; });
}

void WorkerGroup::Shutdown() { impl_->Shutdown(); }

}  // namespace lockstep
