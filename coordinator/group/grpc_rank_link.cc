#include "coordinator/group/grpc_rank_link.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/string_view.h"
#include "proto/worker.grpc.pb.h"

namespace lockstep {
namespace {

namespace pb = worker::v1;

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// What the link and its open calls share.
class Shared {
 public:
  Shared(int32_t link, RankEventSink sink) : link_(link), sink_(std::move(sink)) {}

  void Post(RankEvent event) {
    event.link = link_;
    std::lock_guard<std::mutex> lock(mu_);
    if (sink_) sink_(std::move(event));
  }
  // A call begins, is cancelled no more, and is gone with its context, which holds the channel.
  // CancelCalls does not reach calls without a context.
  void Enter(grpc::ClientContext* context) {
    std::lock_guard<std::mutex> lock(mu_);
    ++open_;
    if (context != nullptr) contexts_.insert(context);
  }
  void Forget(grpc::ClientContext* context) {
    std::lock_guard<std::mutex> lock(mu_);
    contexts_.erase(context);
  }
  void Leave() {
    std::lock_guard<std::mutex> lock(mu_);
    --open_;
    changed_.notify_all();
  }
  void CancelCalls() {
    std::lock_guard<std::mutex> lock(mu_);
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
  }
  void Close() {
    std::lock_guard<std::mutex> lock(mu_);
    sink_ = nullptr;
  }
  // A channel must not be destroyed by one of gRPC's threads, as it would be were it released by a
  // call that ends.
  void WaitForCalls() {
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait(lock, [this] { return open_ == 0; });
  }

 private:
  const int32_t link_;
  std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  RankEventSink sink_;  // null: closed
  int open_ = 0;
  std::set<grpc::ClientContext*> contexts_;
};

void SetTimeout(grpc::ClientContext* context, absl::Duration timeout) {
  if (timeout != absl::InfiniteDuration()) {
    context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  }
}

template <typename Request, typename Response>
struct UnaryCall {
  std::shared_ptr<Shared> shared;
  grpc::ClientContext context;
  Request request;
  Response response;
};

template <typename Response, typename Request, typename Start>
void StartUnary(const std::shared_ptr<Shared>& shared, uint64_t id, const Request& request,
                absl::Duration timeout, const Start& start) {
  auto call = std::make_shared<UnaryCall<Request, Response>>();
  call->shared = shared;
  call->request = request;
  SetTimeout(&call->context, timeout);
  shared->Enter(&call->context);
  UnaryCall<Request, Response>* const raw = call.get();
  start(&raw->context, &raw->request, &raw->response,
        [call = std::move(call), id](grpc::Status status) mutable {
          RankEvent event;
          event.kind = RankEvent::Kind::kAnswer;
          event.id = id;
          event.status = ToAbsl(status);
          if (status.ok()) event.payload = std::move(call->response);
          const std::shared_ptr<Shared> mine = call->shared;
          mine->Post(std::move(event));
          mine->Forget(&call->context);
          call.reset();
          mine->Leave();
        });
}

class LoadCall : public grpc::ClientReadReactor<pb::LoadModelProgress> {
 public:
  LoadCall(std::shared_ptr<Shared> shared, pb::WorkerService::Stub* stub, uint64_t id,
           const pb::LoadModelRequest& request, absl::Duration timeout)
      : shared_(std::move(shared)), id_(id), request_(request) {
    SetTimeout(&context_, timeout);
    shared_->Enter(&context_);
    stub->async()->LoadModel(&context_, &request_, this);
    StartRead(&progress_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (progress_.has_result()) {
      result_ = progress_.result();
      has_result_ = true;
    }
    RankEvent event;
    event.kind = RankEvent::Kind::kProgress;
    event.id = id_;
    event.payload = std::move(progress_);
    shared_->Post(std::move(event));
    progress_.Clear();
    StartRead(&progress_);
  }
  void OnDone(const grpc::Status& status) override {
    RankEvent event;
    event.kind = RankEvent::Kind::kAnswer;
    event.id = id_;
    event.status = ToAbsl(status);
    if (status.ok() && !has_result_) {
      event.status = absl::InternalError("the load ended without a result");
    } else if (status.ok()) {
      event.payload = std::move(result_);
    }
    const std::shared_ptr<Shared> shared = shared_;
    shared->Post(std::move(event));
    shared->Forget(&context_);
    delete this;
    shared->Leave();
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const uint64_t id_;
  grpc::ClientContext context_;
  const pb::LoadModelRequest request_;
  pb::LoadModelProgress progress_;
  pb::LoadModelResult result_;
  bool has_result_ = false;
};

// Held by the link until it is closed, and by gRPC until OnDone.
class StepStreamCall : public grpc::ClientBidiReactor<pb::StepRequest, pb::StepResult>,
                       public std::enable_shared_from_this<StepStreamCall> {
 public:
  StepStreamCall(std::shared_ptr<Shared> shared, uint64_t id)
      : shared_(std::move(shared)), id_(id) {}

  void Start(pb::WorkerService::Stub* stub) {
    self_ = shared_from_this();
    shared_->Enter(nullptr);
    stub->async()->StepStream(&context_, this);
    // Writes may begin at any time until Close.
    AddHold();
    StartRead(&result_);
    StartCall();
  }
  void Write(const pb::StepRequest& request) {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    waiting_.push_back(request);
    WriteLocked();
  }
  void Close(bool orderly) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (closed_) {
        if (!orderly) context_.TryCancel();
        return;
      }
      closed_ = true;
      waiting_.erase(waiting_.begin() + (writing_ ? 1 : 0), waiting_.end());
      if (!orderly) {
        context_.TryCancel();
      } else if (!writing_) {
        StartWritesDone();
      } else {
        writes_done_ = true;
      }
    }
    RemoveHold();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(mu_);
    writing_ = false;
    waiting_.pop_front();
    if (!ok) {
      waiting_.clear();
      return;
    }
    if (writes_done_) {
      writes_done_ = false;
      StartWritesDone();
      return;
    }
    WriteLocked();
  }
  void OnReadDone(bool ok) override {
    if (!ok) {
      // The worker has ended it: the hold would keep it from ending here.
      Close(/*orderly=*/false);
      return;
    }
    RankEvent event;
    event.kind = RankEvent::Kind::kStepResult;
    event.id = id_;
    event.payload = std::move(result_);
    shared_->Post(std::move(event));
    result_.Clear();
    StartRead(&result_);
  }
  void OnDone(const grpc::Status& status) override {
    RankEvent event;
    event.kind = RankEvent::Kind::kStreamEnded;
    event.id = id_;
    event.status = ToAbsl(status);
    const std::shared_ptr<Shared> shared = shared_;
    shared->Post(std::move(event));
    self_.reset();  // may be the last holder of *this
    shared->Leave();
  }

 private:
  void WriteLocked() {
    if (writing_ || waiting_.empty()) return;
    writing_ = true;
    StartWrite(&waiting_.front());
  }

  const std::shared_ptr<Shared> shared_;
  const uint64_t id_;
  grpc::ClientContext context_;
  pb::StepResult result_;
  std::shared_ptr<StepStreamCall> self_;
  std::mutex mu_;
  // Guarded by mu_:
  std::deque<pb::StepRequest> waiting_;  // the first one is being written when writing_
  bool writing_ = false;
  bool writes_done_ = false;  // to be sent after the write that runs
  bool closed_ = false;
};

class GrpcRankLink : public RankLink {
 public:
  GrpcRankLink(std::shared_ptr<grpc::Channel> channel, int32_t link, RankEventSink sink)
      : stub_(pb::WorkerService::NewStub(std::move(channel))),
        shared_(std::make_shared<Shared>(link, std::move(sink))) {}
  ~GrpcRankLink() override {
    shared_->Close();
    shared_->CancelCalls();
    if (stream_) stream_->Close(/*orderly=*/false);
    shared_->WaitForCalls();
  }

  void Call(uint64_t id, const RankRequest& request, absl::Duration timeout) override {
    absl::visit([&](const auto& message) { Start(id, message, timeout); }, request);
  }
  void CancelCalls() override { shared_->CancelCalls(); }

  void OpenStream(uint64_t id) override {
    stream_ = std::make_shared<StepStreamCall>(shared_, id);
    stream_id_ = id;
    stream_->Start(stub_.get());
  }
  void Write(uint64_t id, const pb::StepRequest& request) override {
    if (stream_ && id == stream_id_) stream_->Write(request);
  }
  void CloseStream(uint64_t id, bool orderly) override {
    if (stream_ && id == stream_id_) stream_->Close(orderly);
  }

 private:
  void Start(uint64_t id, const pb::GetInfoRequest& request, absl::Duration timeout) {
    StartUnary<pb::GetInfoResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->GetInfo(std::move(args)...);
    });
  }
  void Start(uint64_t id, const pb::LoadModelRequest& request, absl::Duration timeout) {
    new LoadCall(shared_, stub_.get(), id, request, timeout);
  }
  void Start(uint64_t id, const pb::PrepareCommRequest& request, absl::Duration timeout) {
    StartUnary<pb::PrepareCommResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->PrepareComm(std::move(args)...);
    });
  }
  void Start(uint64_t id, const pb::InitCommRequest& request, absl::Duration timeout) {
    StartUnary<pb::InitCommResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->InitComm(std::move(args)...);
    });
  }
  void Start(uint64_t id, const pb::ConfigureRequest& request, absl::Duration timeout) {
    StartUnary<pb::ConfigureResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->Configure(std::move(args)...);
    });
  }
  void Start(uint64_t id, const pb::AbortCommRequest& request, absl::Duration timeout) {
    StartUnary<pb::AbortCommResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->AbortComm(std::move(args)...);
    });
  }
  void Start(uint64_t id, const pb::HealthRequest& request, absl::Duration timeout) {
    StartUnary<pb::HealthResponse>(shared_, id, request, timeout, [&](auto... args) {
      stub_->async()->Health(std::move(args)...);
    });
  }

  const std::unique_ptr<pb::WorkerService::Stub> stub_;
  const std::shared_ptr<Shared> shared_;
  std::shared_ptr<StepStreamCall> stream_;
  uint64_t stream_id_ = 0;
};

}  // namespace

std::shared_ptr<grpc::Channel> ConnectWorker(
    const std::string& address, int64_t max_message_bytes,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  args.SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Ranks may come up long after the first attempt.
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // How long an attempt may take: a busy machine is slow to shake hands.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 10000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(
      address, credentials ? credentials : grpc::InsecureChannelCredentials(), args);
}

std::unique_ptr<RankLink> MakeGrpcRankLink(std::shared_ptr<grpc::Channel> channel, int32_t link,
                                           RankEventSink sink) {
  return std::make_unique<GrpcRankLink>(std::move(channel), link, std::move(sink));
}

}  // namespace lockstep
