// InferenceService as a gRPC service: thin adapters from messages to the validator and the backend.
#pragma once

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/synchronization/mutex.h"
#include "coordinator/authorizer.h"
#include "coordinator/generation_table.h"
#include "coordinator/request_validator.h"
#include "coordinator/serving_backend.h"
#include "grpcpp/grpcpp.h"
#include "proto/inference.grpc.pb.h"

namespace lockstep {

namespace internal {
// Every method takes its request as bytes (see rpc_util.h).
using RawInference = inference::v1::InferenceService;
using InferenceServiceBase =
    RawInference::WithRawCallbackMethod_Generate<RawInference::WithRawCallbackMethod_GenerateOnce<
        RawInference::WithRawCallbackMethod_AttachGeneration<
            RawInference::WithRawCallbackMethod_CancelGeneration<
                RawInference::WithRawCallbackMethod_Tokenize<
                    RawInference::WithRawCallbackMethod_Detokenize<
                        RawInference::WithRawCallbackMethod_CountTokens<
                            RawInference::Service>>>>>>>;
}  // namespace internal

class InferenceServiceImpl final : public internal::InferenceServiceBase {
 public:
  // `backend` and `authorizer` outlive the service.
  InferenceServiceImpl(ServingBackend* backend, const Authorizer* authorizer,
                       const GenerationTableOptions& generations = {},
                       const RequestLimits& limits = {});

  GenerationTable& generations() { return generations_; }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* GenerateOnce(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* AttachGeneration(
      grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* CancelGeneration(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CountTokens(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

 private:
  // Bytes of a GenerateRequest to a spec that may be submitted.
  absl::StatusOr<GenerationSpec> Prepare(const grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request);
  void FillFresh(RequestContext* context) ABSL_LOCKS_EXCLUDED(mutex_);

  ServingBackend* const backend_;
  const Authorizer* const authorizer_;
  GenerationTable generations_;
  const RequestLimits limits_;
  absl::Mutex mutex_;
  absl::BitGen random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lockstep
