// AdminServer: the gRPC server that operators talk to: AdminService and reflection on a port of
// their own, with tokens of their own.
#pragma once

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/admin_backend.h"
#include "coordinator/authorizer.h"
#include "coordinator/listener.h"
#include "grpcpp/grpcpp.h"
#include "proto/admin.grpc.pb.h"

namespace lockstep {

namespace internal {
// Every method takes its request as bytes (see rpc_util.h).
using RawAdmin = admin::v1::AdminService;
using AdminServiceBase = RawAdmin::WithRawCallbackMethod_GetServerInfo<
    RawAdmin::WithRawCallbackMethod_ListWorkers<RawAdmin::WithRawCallbackMethod_Drain<
        RawAdmin::WithRawCallbackMethod_Undrain<RawAdmin::WithRawCallbackMethod_ListRequests<
            RawAdmin::WithRawCallbackMethod_CancelRequest<
                RawAdmin::WithRawCallbackMethod_ResetPrefixCache<
                    RawAdmin::WithRawCallbackMethod_GetStats<
                        RawAdmin::WithRawCallbackMethod_ListFaults<
                            RawAdmin::WithRawCallbackMethod_ReplaceWorker<
                                RawAdmin::WithRawCallbackMethod_SetLogLevel<
                                    RawAdmin::Service>>>>>>>>>>>;
}  // namespace internal

class AdminServiceImpl final : public internal::AdminServiceBase {
 public:
  // Both outlive the service.
  AdminServiceImpl(AdminBackend* backend, const Authorizer* authorizer)
      : backend_(backend), authorizer_(authorizer) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;
  Reactor* GetServerInfo(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ListWorkers(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* Drain(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* Undrain(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ListRequests(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* CancelRequest(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ResetPrefixCache(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* GetStats(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ListFaults(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ReplaceWorker(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* SetLogLevel(Context* context, const Bytes* request, Bytes* response) override;

 private:
  AdminBackend* const backend_;
  const Authorizer* const authorizer_;
};

class AdminServer {
 public:
  // `backend` outlives the server. Errors as of Listen and Authorizer::Open.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const ListenOptions& options,
                                                            AdminBackend* backend);
  ~AdminServer();

  int port() const { return port_; }
  // Ends what still runs at `deadline`. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  AdminServer(AdminBackend* backend, std::unique_ptr<Authorizer> authorizer)
      : authorizer_(std::move(authorizer)), service_(backend, authorizer_.get()) {}

  const std::unique_ptr<Authorizer> authorizer_;
  AdminServiceImpl service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace lockstep
