#include "worker/worker_service.h"

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

namespace pb = worker::v1;

constexpr int kMaxUnanswered = 2;

// "STALE_TERM" of "STALE_TERM: ...", else empty.
std::string ReasonOf(absl::string_view message) {
  size_t end = 0;
  while (end < message.size() &&
         (absl::ascii_isupper(static_cast<unsigned char>(message[end])) || message[end] == '_')) {
    ++end;
  }
  const bool is_reason = end > 2 && end < message.size() && message[end] == ':';
  return is_reason ? std::string(message.substr(0, end)) : "";
}

template <typename Response>
grpc::Status Answer(absl::StatusOr<Response> result, Response* response) {
  if (!result.ok()) return ToGrpcStatus(result.status());
  *response = *std::move(result);
  return grpc::Status::OK;
}

// One step stream. Reads, results and the worker's own wish to end it come from different threads;
// the last of them to go (OnDone) frees it. Callbacks of the executor may come later still: they
// hold the link, not the reactor.
class StepReactor : public grpc::ServerBidiReactor<pb::StepRequest, pb::StepResult> {
 public:
  explicit StepReactor(StepSink* steps) : steps_(steps), link_(std::make_shared<Link>()) {
    link_->reactor = this;
    const auto opened = steps_->OpenStream([link = link_](const absl::Status& status) {
      std::lock_guard<std::mutex> lock(link->mu);
      if (link->reactor != nullptr) link->reactor->EndLocked(status);
    });
    std::lock_guard<std::mutex> lock(link_->mu);
    if (!opened.ok()) {
      EndLocked(opened.status());
      return;
    }
    token_ = *opened;
    if (ending_) return;
    // So that the caller of StepStream knows that the worker listens before it sends anything.
    StartSendInitialMetadata();
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    pb::StepRequest request;
    {
      std::lock_guard<std::mutex> lock(link_->mu);
      if (!ok) {
        input_ended_ = true;
        FinishIfDoneLocked();
        return;
      }
      if (ending_) return;
      if (unanswered_ == kMaxUnanswered) {
        EndLocked(absl::FailedPreconditionError(absl::StrCat("step ", request_.step_id(),
                                                             " was sent while ", kMaxUnanswered,
                                                             " steps were unanswered")));
        return;
      }
      ++unanswered_;
      request.Swap(&request_);
    }
    steps_->Submit(token_, std::move(request),
                   [link = link_](absl::StatusOr<pb::StepResult> result) {
                     std::lock_guard<std::mutex> lock(link->mu);
                     if (link->reactor != nullptr) link->reactor->ResultLocked(std::move(result));
                   });
    std::lock_guard<std::mutex> lock(link_->mu);
    if (!ending_) StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(link_->mu);
    writing_ = false;
    results_.pop_front();
    if (!ok) results_.clear();
    WriteLocked();
    FinishIfDoneLocked();
  }

  void OnCancel() override {
    const absl::Status status = absl::CancelledError("the step stream broke");
    {
      std::lock_guard<std::mutex> lock(link_->mu);
      EndLocked(status);
    }
    if (token_ != 0) steps_->CloseStream(token_, status);
  }

  void OnDone() override {
    absl::Status status;
    {
      std::lock_guard<std::mutex> lock(link_->mu);
      link_->reactor = nullptr;
      status = status_;
    }
    if (token_ != 0) steps_->CloseStream(token_, status);
    delete this;
  }

 private:
  struct Link {
    std::mutex mu;
    StepReactor* reactor = nullptr;  // null: gone
  };

  void ResultLocked(absl::StatusOr<pb::StepResult> result) {
    --unanswered_;
    if (!result.ok()) {
      EndLocked(result.status());
      return;
    }
    results_.push_back(*std::move(result));
    WriteLocked();
  }
  void WriteLocked() {
    if (writing_ || finished_ || results_.empty()) return;
    writing_ = true;
    StartWrite(&results_.front());
  }
  // No more steps; results that are ready still go out.
  void EndLocked(const absl::Status& status) {
    if (!ending_) status_ = status;
    ending_ = true;
    FinishIfDoneLocked();
  }
  void FinishIfDoneLocked() {
    const bool done = ending_ || (input_ended_ && unanswered_ == 0);
    if (!done || finished_ || writing_ || !results_.empty()) return;
    finished_ = true;
    Finish(ToGrpcStatus(status_));
  }

  StepSink* const steps_;
  const std::shared_ptr<Link> link_;
  uint64_t token_ = 0;
  pb::StepRequest request_;
  // Guarded by link_->mu.
  std::deque<pb::StepResult> results_;  // the first one is being written when writing_
  absl::Status status_;
  int unanswered_ = 0;
  bool writing_ = false;
  bool input_ended_ = false;
  bool ending_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const grpc::StatusCode code = static_cast<grpc::StatusCode>(status.code());
  const std::string message(status.message());
  const std::string reason = ReasonOf(message);
  if (reason.empty()) return grpc::Status(code, message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("lockstep");
  google::rpc::Status details;
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  details.add_details()->PackFrom(info);
  return grpc::Status(code, message, details.SerializeAsString());
}

grpc::Status WorkerServiceImpl::GetInfo(grpc::ServerContext*, const pb::GetInfoRequest*,
                                        pb::GetInfoResponse* response) {
  *response = worker_->GetInfo();
  return grpc::Status::OK;
}

grpc::Status WorkerServiceImpl::LoadModel(grpc::ServerContext*, const pb::LoadModelRequest* request,
                                          grpc::ServerWriter<pb::LoadModelProgress>* writer) {
  auto result = worker_->LoadModel(
      *request, [&](const pb::LoadModelProgress& progress) { return writer->Write(progress); });
  if (!result.ok()) return ToGrpcStatus(result.status());
  pb::LoadModelProgress last;
  last.set_phase("done");
  last.set_bytes_done(result->checkpoint_bytes());
  last.set_bytes_total(result->checkpoint_bytes());
  *last.mutable_result() = *std::move(result);
  writer->Write(last);
  return grpc::Status::OK;
}

grpc::Status WorkerServiceImpl::PrepareComm(grpc::ServerContext*,
                                            const pb::PrepareCommRequest* request,
                                            pb::PrepareCommResponse* response) {
  return Answer(worker_->PrepareComm(*request), response);
}

grpc::Status WorkerServiceImpl::InitComm(grpc::ServerContext*, const pb::InitCommRequest* request,
                                         pb::InitCommResponse* response) {
  return Answer(worker_->InitComm(*request), response);
}

grpc::Status WorkerServiceImpl::Configure(grpc::ServerContext*, const pb::ConfigureRequest* request,
                                          pb::ConfigureResponse* response) {
  return Answer(worker_->Configure(*request), response);
}

grpc::Status WorkerServiceImpl::AbortComm(grpc::ServerContext*, const pb::AbortCommRequest* request,
                                          pb::AbortCommResponse* response) {
  return Answer(worker_->AbortComm(*request), response);
}

grpc::Status WorkerServiceImpl::Health(grpc::ServerContext*, const pb::HealthRequest* request,
                                       pb::HealthResponse* response) {
  return Answer(worker_->Health(*request), response);
}

grpc::Status WorkerServiceImpl::GetStats(grpc::ServerContext*, const pb::GetStatsRequest*,
                                         pb::GetStatsResponse* response) {
  *response = worker_->GetStats();
  return grpc::Status::OK;
}

grpc::Status WorkerServiceImpl::Drain(grpc::ServerContext*, const pb::DrainRequest* request,
                                      pb::DrainResponse* response) {
  return Answer(worker_->Drain(*request), response);
}

grpc::Status WorkerServiceImpl::ProbeLinear(grpc::ServerContext*,
                                            const pb::ProbeLinearRequest* request,
                                            pb::ProbeLinearResponse* response) {
  return Answer(worker_->ProbeLinear(*request), response);
}

grpc::ServerBidiReactor<pb::StepRequest, pb::StepResult>* WorkerServiceImpl::StepStream(
    grpc::CallbackServerContext*) {
  return new StepReactor(steps_);
}

}  // namespace lockstep
