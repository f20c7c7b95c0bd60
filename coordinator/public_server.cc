// PublicServer: see public_server.h.
#include "coordinator/public_server.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"

namespace lockstep {
namespace {

constexpr char kInferenceName[] = "lockstep.inference.v1.InferenceService";
constexpr int kMinPingIntervalMs = 10 * 1000;

void Configure(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(kPublicMessageBytes));
  builder->SetMaxSendMessageSize(static_cast<int>(kPublicMessageBytes));
  // Clients may ping an idle connection; the library's default is to cut them off.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Two servers on one port would share its connections silently.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PublicServer>> PublicServer::Start(
    const std::string& address, ServingBackend* backend,
    const GenerationTableOptions& generations) {
  grpc::EnableDefaultHealthCheckService(false);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  std::unique_ptr<PublicServer> result(new PublicServer(backend, generations));
  grpc::ServerBuilder builder;
  Configure(&builder);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &result->port_);
  builder.RegisterService(&result->inference_);
  builder.RegisterService(&result->model_);
  builder.RegisterService(&result->health_);
  result->server_ = builder.BuildAndStart();
  if (result->server_ == nullptr || result->port_ == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot listen on ", address,
                     ": the port is in use, or the address is none of this machine; choose another "
                     "with --host and --port"));
  }
  result->SetReady(false);
  result->SetHealth("liveness", true);
  return result;
}

PublicServer::~PublicServer() { Shutdown(absl::Now()); }

void PublicServer::SetReady(bool ready) {
  SetHealth("", ready);
  SetHealth(kInferenceName, ready);
}

void PublicServer::SetHealth(const std::string& name, bool serving) { health_.Set(name, serving); }

void PublicServer::Shutdown(absl::Time deadline) {
  health_.Shutdown();
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(deadline));
}

}  // namespace lockstep
