// One listening gRPC server: what the public and the admin port have in common. Limits on messages,
// memory and threads, keepalive, TLS, unix sockets, and errors that name the flag to change.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "security/tls.h"

namespace lockstep {

struct ListenOptions {
  std::string address;  // "127.0.0.1:50051" (port 0: any free one) or "unix:/path"
  TlsFiles tls;
  std::string token_file;                         // who may call; empty: everybody who can connect
  int64_t max_message_bytes = int64_t{64} << 20;  // both ways
  // The flags that errors name.
  std::string address_flag = "--host and --port";
  std::string tls_flag = "--tls";
  std::string token_flag = "--auth-token-file";
};

struct BoundServer {
  std::unique_ptr<grpc::Server> server;
  int port = 0;  // 0 for a unix socket
};

// Starts a server of these services, which outlive it. A unix socket is made for its owner alone; a
// socket that a dead server left behind is replaced. FAILED_PRECONDITION when the address cannot be
// had; errors of security/tls.h.
absl::StatusOr<BoundServer> Listen(const ListenOptions& options,
                                   const std::vector<grpc::Service*>& services);

}  // namespace lockstep
