// ModelService as a gRPC service: what is served, and the state of the server.
#pragma once

#include "coordinator/authorizer.h"
#include "coordinator/serving_backend.h"
#include "grpcpp/grpcpp.h"
#include "proto/model.grpc.pb.h"

namespace lockstep {

// Largest message of the public services, both ways.
constexpr int64_t kPublicMessageBytes = int64_t{64} << 20;

namespace internal {
// Every method takes its request as bytes (see rpc_util.h).
using RawModel = inference::v1::ModelService;
using ModelServiceBase =
    RawModel::WithRawCallbackMethod_GetModel<RawModel::WithRawCallbackMethod_ListModels<
        RawModel::WithRawCallbackMethod_GetServerStatus<RawModel::Service>>>;
}  // namespace internal

class ModelServiceImpl final : public internal::ModelServiceBase {
 public:
  // `backend` and `authorizer` outlive the service.
  ModelServiceImpl(ServingBackend* backend, const Authorizer* authorizer)
      : backend_(backend), authorizer_(authorizer) {}

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  // Empty while the model is loading.
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  // Answers in every state.
  grpc::ServerUnaryReactor* GetServerStatus(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;

 private:
  ServingBackend* const backend_;
  const Authorizer* const authorizer_;
};

}  // namespace lockstep
