// HealthServiceImpl: see health_service.h.
#include "coordinator/health_service.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "coordinator/errors.h"
#include "coordinator/rpc_util.h"

namespace lockstep {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch. What it has told is compared with what is true whenever either may have changed, so
// the state that a client sees last is the true one, and a slow client misses only what did not
// last. Its state is guarded by the service's mutex; library calls are made outside it.
class HealthServiceImpl::Watcher final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  Watcher(HealthServiceImpl* service, absl::Status refusal, std::string name)
      : service_(service), name_(std::move(name)), end_(std::move(refusal)) {}

  void Update() {
    Action action;
    {
      absl::MutexLock lock(&service_->mutex_);
      action = Next();
    }
    if (action == Action::kWrite) StartWrite(&current_);
    if (action == Action::kFinish) Finish(ToGrpcStatus(end_));
  }
  void OnWriteDone(bool) override {
    {
      absl::MutexLock lock(&service_->mutex_);
      writing_ = false;
    }
    Update();
  }
  void OnCancel() override {
    {
      absl::MutexLock lock(&service_->mutex_);
      if (end_.ok()) end_ = absl::CancelledError("the client ended the watch");
    }
    Update();
  }
  void OnDone() override {
    // Freed after the mutex is released, unless TellWatchers still holds it.
    std::shared_ptr<Watcher> self;
    absl::MutexLock lock(&service_->mutex_);
    for (const auto& watcher : service_->watchers_) {
      if (watcher.get() == this) self = watcher;
    }
    service_->watchers_.erase(self);
  }

 private:
  enum class Action { kNone, kWrite, kFinish };

  Action Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(service_->mutex_) {
    if (writing_ || finished_) return Action::kNone;
    if (end_.ok()) {
      const State state = service_->StateOf(name_);
      if (told_ != state) {
        told_ = state;
        HealthCheckResponse response;
        response.set_status(state);
        current_ = WriteMessage(response);
        writing_ = true;
        return Action::kWrite;
      }
      if (!service_->shut_down_) return Action::kNone;
      ErrorDetail detail;
      detail.reason = "DRAINING";
      end_ = MakeError(absl::StatusCode::kUnavailable, "the server is stopping", detail);
    }
    finished_ = true;
    return Action::kFinish;
  }

  HealthServiceImpl* const service_;
  const std::string name_;
  grpc::ByteBuffer current_;  // the message being written; owned by whoever set writing_
  absl::optional<State> told_ ABSL_GUARDED_BY(service_->mutex_);
  absl::Status end_;  // not OK: how the call ends; unchanged once finished_
  bool writing_ ABSL_GUARDED_BY(service_->mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(service_->mutex_) = false;
};

HealthServiceImpl::State HealthServiceImpl::StateOf(const std::string& name) const {
  const auto found = states_.find(name);
  if (found == states_.end()) return HealthCheckResponse::SERVICE_UNKNOWN;
  return shut_down_ ? HealthCheckResponse::NOT_SERVING : found->second;
}

void HealthServiceImpl::Set(const std::string& name, bool serving) {
  {
    absl::MutexLock lock(&mutex_);
    states_[name] = serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  }
  TellWatchers();
}

void HealthServiceImpl::Shutdown() {
  {
    absl::MutexLock lock(&mutex_);
    shut_down_ = true;
  }
  TellWatchers();
}

void HealthServiceImpl::TellWatchers() {
  std::vector<std::shared_ptr<Watcher>> watchers;
  {
    absl::MutexLock lock(&mutex_);
    watchers.assign(watchers_.begin(), watchers_.end());
  }
  for (const auto& watcher : watchers) watcher->Update();
}

grpc::ServerUnaryReactor* HealthServiceImpl::Check(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  return HandleUnary<HealthCheckRequest, HealthCheckResponse>(
      /*authorizer=*/nullptr, context, request, response, [this](const auto& in, auto* out) {
        {
          absl::MutexLock lock(&mutex_);
          out->set_status(StateOf(in.service()));
        }
        if (out->status() != HealthCheckResponse::SERVICE_UNKNOWN) return absl::OkStatus();
        ErrorDetail detail;
        detail.reason = "SERVICE_UNKNOWN";
        return MakeError(absl::StatusCode::kNotFound,
                         absl::StrCat("no health is kept of \"", in.service(), "\""), detail);
      });
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HealthServiceImpl::Watch(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* request) {
  HealthCheckRequest message;
  absl::Status status = ReadMessage(*request, &message);
  auto watcher = std::make_shared<Watcher>(this, std::move(status), message.service());
  {
    absl::MutexLock lock(&mutex_);
    watchers_.insert(watcher);
  }
  watcher->Update();
  return watcher.get();
}

}  // namespace lockstep
