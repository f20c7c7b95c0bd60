// PublicServer: the gRPC server that clients talk to: InferenceService, ModelService, the standard
// health service and reflection on one port.
//
// Health names: "" and "lockstep.inference.v1.InferenceService" (readiness), "liveness" (true as
// long as the server runs), and what SetHealth adds ("worker/<rank>"). Watch stays open over
// transitions, until Shutdown. Health and reflection are open to everybody who can connect; all
// other methods ask for a token when there is a token file.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/authorizer.h"
#include "coordinator/generation_table.h"
#include "coordinator/health_service.h"
#include "coordinator/inference_service.h"
#include "coordinator/listener.h"
#include "coordinator/model_service.h"
#include "coordinator/serving_backend.h"
#include "grpcpp/grpcpp.h"

namespace lockstep {

class PublicServer {
 public:
  // Not ready at first. `backend` outlives the server. Errors as of Listen and Authorizer::Open.
  static absl::StatusOr<std::unique_ptr<PublicServer>> Start(
      const ListenOptions& options, ServingBackend* backend,
      const GenerationTableOptions& generations = {});
  ~PublicServer();

  int port() const { return port_; }
  GenerationTable& generations() { return inference_.generations(); }
  void SetReady(bool ready);
  void SetHealth(const std::string& name, bool serving);

  // Takes no new calls and ends every Watch; ends what still runs at `deadline`. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  PublicServer(ServingBackend* backend, std::unique_ptr<Authorizer> authorizer,
               const GenerationTableOptions& generations)
      : authorizer_(std::move(authorizer)),
        inference_(backend, authorizer_.get(), generations),
        model_(backend, authorizer_.get()) {}

  const std::unique_ptr<Authorizer> authorizer_;
  InferenceServiceImpl inference_;
  ModelServiceImpl model_;
  HealthServiceImpl health_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace lockstep
