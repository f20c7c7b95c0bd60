// Between gRPC and the rest: see rpc_util.h.
#include "coordinator/rpc_util.h"

#include <string>
#include <vector>

#include "coordinator/errors.h"

namespace lockstep {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
                      DetailsOf(status));
}

absl::Status ReadMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  if (!bytes.Valid()) {
    return InvalidField("MALFORMED_MESSAGE", "",
                        "no request message: the call's input ended without one; send exactly one");
  }
  std::vector<grpc::Slice> slices;
  const grpc::Status dumped = bytes.Dump(&slices);
  if (!dumped.ok()) {
    return InvalidField("MALFORMED_MESSAGE", "", "the request could not be decompressed");
  }
  std::string flat;
  flat.reserve(bytes.Length());
  for (const grpc::Slice& slice : slices) {
    flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return ParseRequest(flat, message);
}

grpc::ByteBuffer WriteMessage(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const std::chrono::system_clock::time_point deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

}  // namespace lockstep
