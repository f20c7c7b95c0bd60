// One listening gRPC server: see listener.h.
#include "coordinator/listener.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr int kMinPingIntervalMs = 10 * 1000;
// Of all connections together: a dozen messages of the largest size and what lies in buffers.
constexpr size_t kMemoryBytes = size_t{1} << 30;
constexpr int kMaxThreads = 256;
constexpr char kUnix[] = "unix:";

// An error when a server answers on the socket, or its path cannot be one.
absl::Status CheckUnixSocket(const std::string& path, const std::string& flag) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": a socket's path has 1 to ",
                                                   sizeof(address.sun_path) - 1,
                                                   " characters, this one has ", path.size()));
  }
  memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool answered =
      fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  if (fd >= 0) close(fd);
  if (!answered) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot listen on ", kUnix, path,
                   ": another server answers there; stop it, or choose another path with ", flag));
}

void Configure(const ListenOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  // Clients may ping an idle connection; the library's default is to cut them off.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Two servers on one port would share its connections silently.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  grpc::ResourceQuota quota("lockstep");
  quota.Resize(kMemoryBytes).SetMaxThreads(kMaxThreads);
  builder->SetResourceQuota(quota);
}

}  // namespace

absl::StatusOr<BoundServer> Listen(const ListenOptions& options,
                                   const std::vector<grpc::Service*>& services) {
  grpc::EnableDefaultHealthCheckService(false);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> credentials,
                   MakeServerCredentials(options.tls, options.tls_flag));
  const bool is_unix = absl::StartsWith(options.address, kUnix);
  if (is_unix) {
    RETURN_IF_ERROR(CheckUnixSocket(options.address.substr(strlen(kUnix)), options.address_flag));
  }
  grpc::ServerBuilder builder;
  Configure(options, &builder);
  BoundServer bound;
  builder.AddListeningPort(options.address, credentials, &bound.port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  // The socket is reachable from the moment it exists.
  const mode_t mask = is_unix ? umask(S_IRWXG | S_IRWXO) : 0;
  bound.server = builder.BuildAndStart();
  if (is_unix) {
    umask(mask);
    bound.port = 0;
  }
  if (bound.server == nullptr || (bound.port == 0 && !is_unix)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on ", options.address,
        is_unix ? ": the folder does not exist, or the path is taken by a file that is no socket"
                : ": the port is in use, or the address is none of this machine",
        "; choose another with ", options.address_flag));
  }
  return bound;
}

}  // namespace lockstep
