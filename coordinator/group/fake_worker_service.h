// FakeWorker: a WorkerService in this process on a port of its own, for tests of WorkerGroup.
// Answers every call at once, with faults where they are asked for.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/worker.grpc.pb.h"

namespace lockstep {

struct FakeWorkerFaults {
  absl::Duration load_time = absl::ZeroDuration();
  grpc::Status load_status;       // not OK: LoadModel ends with it
  grpc::Status init_status;       // InitComm
  grpc::Status configure_status;  // Configure
  uint64_t self_test = 42;
  uint64_t model_digest = 7;
  uint64_t refuse_step = 0;  // the stream ends with `refusal` at this step
  grpc::Status refusal{grpc::StatusCode::FAILED_PRECONDITION, "refused by the test"};
  absl::Duration refusal_delay = absl::ZeroDuration();
  uint64_t end_stream_at_step = 0;  // the stream ends with OK
  uint64_t wrong_result_at_step = 0;
  uint64_t wrong_batch_at_step = 0;
  absl::Duration step_time = absl::ZeroDuration();
};

class FakeWorker : public worker::v1::WorkerService::Service {
 public:
  explicit FakeWorker(const FakeWorkerFaults& faults = FakeWorkerFaults()) : faults_(faults) {}
  ~FakeWorker() override { Stop(); }

  // Listens on `address` ("127.0.0.1:0": any port, "unix:/path"). Returns the address to call.
  std::string Start(const std::string& address = "127.0.0.1:0",
                    const std::shared_ptr<grpc::ServerCredentials>& credentials =
                        grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, credentials, &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    return address.rfind("unix:", 0) == 0 ? address : "127.0.0.1:" + std::to_string(port);
  }

  // As a process that dies: open calls break off.
  void Stop() {
    if (server_) server_->Shutdown(absl::ToChronoTime(absl::Now()));
    server_.reset();
  }

  struct Seen {
    int aborts = 0;
    int drains = 0;
    int cancelled_loads = 0;
    std::string abort_reason;
    std::vector<std::string> addresses;
    worker::v1::LoadModelRequest load;
    worker::v1::ConfigureRequest configure;
    std::vector<std::string> steps;  // serialized requests
  };
  Seen seen() const {
    std::lock_guard<std::mutex> lock(mu_);
    return seen_;
  }

  grpc::Status GetInfo(grpc::ServerContext*, const worker::v1::GetInfoRequest*,
                       worker::v1::GetInfoResponse* response) override {
    response->set_device("cpu");
    response->mutable_identity()->set_incarnation(reinterpret_cast<uintptr_t>(this));
    return grpc::Status::OK;
  }

  grpc::Status LoadModel(grpc::ServerContext* context, const worker::v1::LoadModelRequest* request,
                         grpc::ServerWriter<worker::v1::LoadModelProgress>* writer) override {
    {
      std::lock_guard<std::mutex> lock(mu_);
      seen_.load = *request;
    }
    worker::v1::LoadModelProgress progress;
    progress.set_phase("load");
    writer->Write(progress);
    const absl::Time end = absl::Now() + faults_.load_time;
    while (absl::Now() < end) {
      if (context->IsCancelled()) {
        std::lock_guard<std::mutex> lock(mu_);
        ++seen_.cancelled_loads;
        return grpc::Status(grpc::StatusCode::CANCELLED, "load cancelled");
      }
      absl::SleepFor(absl::Milliseconds(2));
    }
    if (!faults_.load_status.ok()) return faults_.load_status;
    progress.set_phase("done");
    progress.mutable_result()->set_architecture("fake");
    progress.mutable_result()->set_vocab_size(300);
    progress.mutable_result()->set_max_positions(256);
    progress.mutable_result()->mutable_identity()->set_model_digest(faults_.model_digest);
    progress.mutable_result()->mutable_identity()->set_rank(request->rank());
    writer->Write(progress);
    return grpc::Status::OK;
  }

  grpc::Status PrepareComm(grpc::ServerContext*, const worker::v1::PrepareCommRequest* request,
                           worker::v1::PrepareCommResponse* response) override {
    std::lock_guard<std::mutex> lock(mu_);
    response->set_address("peer " + std::to_string(seen_.load.rank()) + " of epoch " +
                          std::to_string(request->epoch()));
    return grpc::Status::OK;
  }

  grpc::Status InitComm(grpc::ServerContext*, const worker::v1::InitCommRequest* request,
                        worker::v1::InitCommResponse* response) override {
    std::lock_guard<std::mutex> lock(mu_);
    seen_.addresses.assign(request->addresses().begin(), request->addresses().end());
    response->set_self_test(faults_.self_test);
    return faults_.init_status;
  }

  grpc::Status Configure(grpc::ServerContext*, const worker::v1::ConfigureRequest* request,
                         worker::v1::ConfigureResponse*) override {
    std::lock_guard<std::mutex> lock(mu_);
    seen_.configure = *request;
    return faults_.configure_status;
  }

  grpc::Status StepStream(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<worker::v1::StepResult, worker::v1::StepRequest>* stream) override {
    worker::v1::StepRequest request;
    while (stream->Read(&request)) {
      const uint64_t step = request.step_id();
      {
        std::lock_guard<std::mutex> lock(mu_);
        seen_.steps.push_back(request.SerializeAsString());
      }
      if (step == faults_.refuse_step) {
        absl::SleepFor(faults_.refusal_delay);
        return faults_.refusal;
      }
      if (step == faults_.end_stream_at_step) return grpc::Status::OK;
      absl::SleepFor(faults_.step_time);
      worker::v1::StepResult result;
      result.set_epoch(request.epoch());
      result.set_step_id(step);
      result.set_batch_digest(request.batch_digest() +
                              (step == faults_.wrong_batch_at_step ? 1 : 0));
      result.set_result_digest(1000 + step + (step == faults_.wrong_result_at_step ? 1 : 0));
      if (!stream->Write(result)) break;
    }
    return grpc::Status::OK;
  }

  grpc::Status AbortComm(grpc::ServerContext*, const worker::v1::AbortCommRequest* request,
                         worker::v1::AbortCommResponse* response) override {
    std::lock_guard<std::mutex> lock(mu_);
    ++seen_.aborts;
    seen_.abort_reason = request->reason();
    response->set_aborted(true);
    return grpc::Status::OK;
  }

  grpc::Status Health(grpc::ServerContext*, const worker::v1::HealthRequest*,
                      worker::v1::HealthResponse* response) override {
    response->set_state(worker::v1::READY);
    response->mutable_identity()->set_incarnation(reinterpret_cast<uintptr_t>(this));
    return grpc::Status::OK;
  }

  grpc::Status GetStats(grpc::ServerContext*, const worker::v1::GetStatsRequest*,
                        worker::v1::GetStatsResponse* response) override {
    std::lock_guard<std::mutex> lock(mu_);
    response->set_steps(seen_.steps.size());
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext*, const worker::v1::DrainRequest*,
                     worker::v1::DrainResponse*) override {
    std::lock_guard<std::mutex> lock(mu_);
    ++seen_.drains;
    return grpc::Status::OK;
  }

  grpc::Status ProbeLinear(grpc::ServerContext*, const worker::v1::ProbeLinearRequest* request,
                           worker::v1::ProbeLinearResponse* response) override {
    response->set_local_n(request->tokens());
    return grpc::Status::OK;
  }

 private:
  const FakeWorkerFaults faults_;
  std::unique_ptr<grpc::Server> server_;
  mutable std::mutex mu_;
  Seen seen_;  // guarded by mu_
};

}  // namespace lockstep
