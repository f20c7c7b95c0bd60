// The gRPC library's log: see grpc_log.h.
#include "security/grpc_log.h"

#include <grpc/support/log.h>

#include "absl/strings/string_view.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace {

void Forward(gpr_log_func_args* args) {
  absl::string_view message = args->message;
  // What follows in braces are a time and places in the library's source, different each time.
  message = message.substr(0, message.find(" {"));
  if (args->severity == GPR_LOG_SEVERITY_ERROR) {
    LogWarning("gRPC: ", message);
  } else {
    LogInfo("gRPC: ", message);
  }
}

}  // namespace

void SendGrpcLogsToOurs() { gpr_set_log_function(Forward); }

}  // namespace lockstep
