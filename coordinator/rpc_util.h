// Between gRPC and the rest: statuses with details, and messages as raw bytes. Requests are taken
// as bytes and parsed by ParseRequest, because the library's own parsing answers a broken message
// with UNIMPLEMENTED, which is no client fault.
#pragma once

#include <chrono>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/authorizer.h"
#include "coordinator/wire_check.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"

namespace lockstep {

// Code, message and details (grpc-status-details-bin).
grpc::Status ToGrpcStatus(const absl::Status& status);

absl::Status ReadMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
grpc::ByteBuffer WriteMessage(const google::protobuf::Message& message);

// InfiniteFuture when the client set none.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);

// A unary method whose answer is ready at once. `authorizer` nullptr: everybody may call it.
template <typename Request, typename Response, typename Handler>
grpc::ServerUnaryReactor* HandleUnary(const Authorizer* authorizer,
                                      grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request_bytes,
                                      grpc::ByteBuffer* response_bytes, const Handler& handler) {
  Request request;
  absl::Status status = authorizer == nullptr ? absl::OkStatus() : authorizer->Check(*context);
  if (status.ok()) status = ReadMessage(*request_bytes, &request);
  if (status.ok()) {
    Response response;
    status = handler(request, &response);
    if (status.ok()) *response_bytes = WriteMessage(response);
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace lockstep
