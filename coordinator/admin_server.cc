// AdminServer: see admin_server.h.
#include "coordinator/admin_server.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/rpc_util.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using namespace admin::v1;  // NOLINT: the messages of one service

const char* LevelName(Severity severity) {
  switch (severity) {
    case Severity::kInfo:
      return "info";
    case Severity::kWarning:
      return "warning";
    case Severity::kError:
      break;
  }
  return "error";
}

absl::Status NotFound(absl::string_view reason, absl::string_view message) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  return MakeError(absl::StatusCode::kNotFound, message, detail);
}

absl::Status DoCancel(AdminBackend* backend, const CancelRequestRequest& in,
                      CancelRequestResponse* out) {
  if (in.request_id().empty()) {
    return InvalidField("REQUEST_ID_INVALID", "request_id", "request_id is empty");
  }
  ErrorDetail detail;
  detail.reason = "ADMIN";
  const absl::Status ending =
      MakeError(absl::StatusCode::kCancelled,
                in.reason().empty() ? "cancelled by an operator"
                                    : absl::StrCat("cancelled by an operator: ", in.reason()),
                detail);
  switch (backend->Cancel(in.request_id(), ending)) {
    case CancelResult::kCancelled: {
      LogFields fields;
      fields.request_id = in.request_id();
      Log(Severity::kInfo, "cancelled by an operator", fields);
      out->set_outcome(CancelRequestResponse::CANCELLED);
      return absl::OkStatus();
    }
    case CancelResult::kAlreadyFinished:
      out->set_outcome(CancelRequestResponse::ALREADY_FINISHED);
      return absl::OkStatus();
    case CancelResult::kNotFound:
      break;
  }
  return NotFound("REQUEST_NOT_FOUND",
                  absl::StrCat("request ", in.request_id(),
                               " is not known here: it was never submitted or ended long ago"));
}

absl::Status DoListRequests(AdminBackend* backend, ListRequestsResponse* out) {
  ASSIGN_OR_RETURN(const std::vector<RequestInfo> list, backend->ListRequests());
  for (const RequestInfo& info : list) {
    Request* request = out->add_requests();
    request->set_request_id(info.request_id);
    request->set_state(info.scheduled ? Request::RUNNING : Request::QUEUED);
    request->set_age_ms(absl::ToInt64Milliseconds(info.age));
    request->set_prompt_tokens(info.prompt_tokens);
    request->set_cached_tokens(info.cached_tokens);
    request->set_generated_tokens(info.generated_tokens);
    request->set_outputs(info.outputs);
    request->set_priority(info.priority);
    request->set_preemptions(info.preemptions);
    if (info.deadline < absl::InfiniteFuture()) {
      request->set_deadline_ms(
          std::max<int64_t>(1, absl::ToInt64Milliseconds(info.deadline - absl::Now())));
    }
  }
  return absl::OkStatus();
}

absl::Status DoReplaceWorker(AdminBackend* backend, const ReplaceWorkerRequest& in) {
  const inference::v1::ServerStatus status = backend->Status();
  if (in.rank() < 0 || in.rank() >= status.workers_size()) {
    return NotFound("WORKER_NOT_FOUND", absl::StrCat("there is no rank ", in.rank(), ", only 0 to ",
                                                     status.workers_size() - 1));
  }
  const std::string& now = status.workers(in.rank()).worker_id();
  if (!in.worker_id().empty() && in.worker_id() != now) {
    return NotFound("WORKER_NOT_FOUND", absl::StrCat("the worker of rank ", in.rank(), " is ", now,
                                                     ", not ", in.worker_id()));
  }
  RETURN_IF_ERROR(backend->ReplaceWorker(in.rank(), in.reason()));
  LogFields fields;
  fields.rank = in.rank();
  Log(Severity::kInfo, absl::StrCat("an operator has the worker replaced: ", in.reason()), fields);
  return absl::OkStatus();
}

absl::Status DoSetLogLevel(const SetLogLevelRequest& in, SetLogLevelResponse* out) {
  for (const Severity level : {Severity::kInfo, Severity::kWarning, Severity::kError}) {
    if (in.level() != LevelName(level)) continue;
    out->set_previous(LevelName(LogLevel()));
    SetLogLevel(level);
    return absl::OkStatus();
  }
  return InvalidField("LOG_LEVEL_UNKNOWN", "level",
                      absl::StrCat("level is \"", in.level(), "\"; use info, warning or error"));
}

}  // namespace

grpc::ServerUnaryReactor* AdminServiceImpl::GetServerInfo(Context* context, const Bytes* request,
                                                          Bytes* response) {
  return HandleUnary<GetServerInfoRequest, GetServerInfoResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) {
        *out = backend_->ServerInfo();
        out->set_log_level(LevelName(LogLevel()));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListWorkers(Context* context, const Bytes* request,
                                                        Bytes* response) {
  return HandleUnary<ListWorkersRequest, ListWorkersResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) {
        *out->mutable_workers() = backend_->Status().workers();
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::Drain(Context* context, const Bytes* request,
                                                  Bytes* response) {
  return HandleUnary<DrainRequest, DrainResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) -> absl::Status {
        RETURN_IF_ERROR(backend_->DrainRequests());
        const inference::v1::ServerStatus status = backend_->Status();
        out->set_requests_left(status.requests_running() + status.requests_queued());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::Undrain(Context* context, const Bytes* request,
                                                    Bytes* response) {
  return HandleUnary<UndrainRequest, UndrainResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) -> absl::Status {
        RETURN_IF_ERROR(backend_->UndrainRequests());
        out->set_ready(backend_->Ready().ok());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListRequests(Context* context, const Bytes* request,
                                                         Bytes* response) {
  return HandleUnary<ListRequestsRequest, ListRequestsResponse>(
      authorizer_, context, request, response,
      [this](const auto&, auto* out) { return DoListRequests(backend_, out); });
}

grpc::ServerUnaryReactor* AdminServiceImpl::CancelRequest(Context* context, const Bytes* request,
                                                          Bytes* response) {
  return HandleUnary<CancelRequestRequest, CancelRequestResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto* out) { return DoCancel(backend_, in, out); });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ResetPrefixCache(Context* context, const Bytes* request,
                                                             Bytes* response) {
  return HandleUnary<ResetPrefixCacheRequest, ResetPrefixCacheResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) -> absl::Status {
        ASSIGN_OR_RETURN(const int64_t freed, backend_->ResetPrefixCache());
        out->set_blocks_freed(freed);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetStats(Context* context, const Bytes* request,
                                                     Bytes* response) {
  return HandleUnary<GetStatsRequest, GetStatsResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) {
        *out->mutable_status() = backend_->Status();
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListFaults(Context* context, const Bytes* request,
                                                       Bytes* response) {
  return HandleUnary<ListFaultsRequest, ListFaultsResponse>(
      authorizer_, context, request, response, [this](const auto& in, auto* out) -> absl::Status {
        if (in.limit() < 0) {
          return InvalidField("LIMIT_EXCEEDED", "limit", "limit is negative; 0 means all");
        }
        for (const admin::v1::FaultRecord& fault : backend_->Faults()) {
          if (in.limit() > 0 && out->faults_size() >= in.limit()) break;
          *out->add_faults() = fault;
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ReplaceWorker(Context* context, const Bytes* request,
                                                          Bytes* response) {
  return HandleUnary<ReplaceWorkerRequest, ReplaceWorkerResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto*) { return DoReplaceWorker(backend_, in); });
}

grpc::ServerUnaryReactor* AdminServiceImpl::SetLogLevel(Context* context, const Bytes* request,
                                                        Bytes* response) {
  return HandleUnary<SetLogLevelRequest, SetLogLevelResponse>(
      authorizer_, context, request, response,
      [](const auto& in, auto* out) { return DoSetLogLevel(in, out); });
}

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const ListenOptions& options,
                                                                AdminBackend* backend) {
  ASSIGN_OR_RETURN(std::unique_ptr<Authorizer> authorizer,
                   Authorizer::Open(options.token_file, options.token_flag));
  std::unique_ptr<AdminServer> result(new AdminServer(backend, std::move(authorizer)));
  ASSIGN_OR_RETURN(BoundServer bound, Listen(options, {&result->service_}));
  result->server_ = std::move(bound.server);
  result->port_ = bound.port;
  return result;
}

AdminServer::~AdminServer() { Shutdown(absl::Now()); }

void AdminServer::Shutdown(absl::Time deadline) {
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(deadline));
}

}  // namespace lockstep
