// PublicServer: the gRPC server that clients talk to: InferenceService, ModelService, the standard
// health service and reflection on one port.
//
// Health names: "" and "lockstep.inference.v1.InferenceService" (readiness), "liveness" (true as
// long as the server runs), and what SetHealth adds ("worker/<rank>"). Watch stays open over
// transitions, until Shutdown.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/generation_table.h"
#include "coordinator/health_service.h"
#include "coordinator/inference_service.h"
#include "coordinator/model_service.h"
#include "coordinator/serving_backend.h"
#include "grpcpp/grpcpp.h"

namespace lockstep {

class PublicServer {
 public:
  // Listens on `address` ("127.0.0.1:50051", port 0: any free one). Not ready at first. `backend`
  // outlives the server. FAILED_PRECONDITION when the address cannot be had.
  static absl::StatusOr<std::unique_ptr<PublicServer>> Start(
      const std::string& address, ServingBackend* backend,
      const GenerationTableOptions& generations = {});
  ~PublicServer();

  int port() const { return port_; }
  GenerationTable& generations() { return inference_.generations(); }
  void SetReady(bool ready);
  void SetHealth(const std::string& name, bool serving);

  // Takes no new calls and ends every Watch; ends what still runs at `deadline`. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  PublicServer(ServingBackend* backend, const GenerationTableOptions& generations)
      : inference_(backend, generations), model_(backend) {}

  InferenceServiceImpl inference_;
  ModelServiceImpl model_;
  HealthServiceImpl health_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace lockstep
