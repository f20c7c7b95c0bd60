// WorkerServiceImpl: gRPC on one side, Worker on the other; nothing is decided here. Statuses keep
// code and message; a message that begins with an upper-case reason ("STALE_TERM: ...") also
// carries it as google.rpc.ErrorInfo.
#pragma once

#include "absl/status/status.h"
#include "proto/worker.grpc.pb.h"
#include "worker/worker.h"

namespace lockstep {

grpc::Status ToGrpcStatus(const absl::Status& status);

class WorkerServiceImpl : public worker::v1::WorkerService::WithCallbackMethod_StepStream<
                              worker::v1::WorkerService::Service> {
 public:
  // Both outlive the service. `steps`: who takes the steps; null: the worker.
  explicit WorkerServiceImpl(Worker* worker, StepSink* steps = nullptr)
      : worker_(worker), steps_(steps != nullptr ? steps : worker) {}

  grpc::Status GetInfo(grpc::ServerContext*, const worker::v1::GetInfoRequest*,
                       worker::v1::GetInfoResponse* response) override;
  grpc::Status LoadModel(grpc::ServerContext*, const worker::v1::LoadModelRequest* request,
                         grpc::ServerWriter<worker::v1::LoadModelProgress>* writer) override;
  grpc::Status PrepareComm(grpc::ServerContext*, const worker::v1::PrepareCommRequest* request,
                           worker::v1::PrepareCommResponse* response) override;
  grpc::Status InitComm(grpc::ServerContext*, const worker::v1::InitCommRequest* request,
                        worker::v1::InitCommResponse* response) override;
  grpc::Status Configure(grpc::ServerContext*, const worker::v1::ConfigureRequest* request,
                         worker::v1::ConfigureResponse* response) override;
  grpc::Status AbortComm(grpc::ServerContext*, const worker::v1::AbortCommRequest* request,
                         worker::v1::AbortCommResponse* response) override;
  grpc::Status Health(grpc::ServerContext*, const worker::v1::HealthRequest* request,
                      worker::v1::HealthResponse* response) override;
  grpc::Status GetStats(grpc::ServerContext*, const worker::v1::GetStatsRequest*,
                        worker::v1::GetStatsResponse* response) override;
  grpc::Status Drain(grpc::ServerContext*, const worker::v1::DrainRequest* request,
                     worker::v1::DrainResponse* response) override;
  grpc::Status ProbeLinear(grpc::ServerContext*, const worker::v1::ProbeLinearRequest* request,
                           worker::v1::ProbeLinearResponse* response) override;
  grpc::ServerBidiReactor<worker::v1::StepRequest, worker::v1::StepResult>* StepStream(
      grpc::CallbackServerContext*) override;

 private:
  Worker* const worker_;
  StepSink* const steps_;
};

}  // namespace lockstep
