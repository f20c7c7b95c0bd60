// PublicServer: see public_server.h.
#include "coordinator/public_server.h"

#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr char kInferenceName[] = "lockstep.inference.v1.InferenceService";

}  // namespace

absl::StatusOr<std::unique_ptr<PublicServer>> PublicServer::Start(
    const ListenOptions& options, ServingBackend* backend,
    const GenerationTableOptions& generations) {
  ASSIGN_OR_RETURN(std::unique_ptr<Authorizer> authorizer,
                   Authorizer::Open(options.token_file, options.token_flag));
  std::unique_ptr<PublicServer> result(
      new PublicServer(backend, std::move(authorizer), generations));
  ASSIGN_OR_RETURN(BoundServer bound,
                   Listen(options, {&result->inference_, &result->model_, &result->health_}));
  result->server_ = std::move(bound.server);
  result->port_ = bound.port;
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
