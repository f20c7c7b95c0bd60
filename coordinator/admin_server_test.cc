// The admin service over real gRPC, against a fake backend.
#include "coordinator/admin_server.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/listener.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/log.h"
#include "kernels/base/testing/matchers.h"
#include "proto/admin.grpc.pb.h"
#include "proto/error_details.pb.h"
#include "security/testing/certificates.h"

namespace lockstep {
namespace {

using admin::v1::AdminService;

class FakeAdminBackend : public AdminBackend {
 public:
  admin::v1::GetServerInfoResponse ServerInfo() const override {
    admin::v1::GetServerInfoResponse info;
    info.set_version("fake");
    (*info.mutable_flags())["port"] = "50051";
    info.mutable_limits()->set_max_public_message_bytes(1 << 26);
    return info;
  }
  inference::v1::ServerStatus Status() const override {
    inference::v1::ServerStatus status;
    status.set_requests_running(2);
    status.set_requests_queued(1);
    for (int rank = 0; rank < 2; ++rank) {
      auto* worker = status.add_workers();
      worker->set_rank(rank);
      worker->set_worker_id(absl::StrCat("worker-", rank));
    }
    return status;
  }
  absl::Status DrainRequests() override {
    draining = true;
    return absl::OkStatus();
  }
  absl::Status UndrainRequests() override {
    if (!undrain.ok()) return undrain;
    draining = false;
    return absl::OkStatus();
  }
  absl::Status Ready() const override {
    return draining ? absl::UnavailableError("draining") : absl::OkStatus();
  }
  absl::StatusOr<std::vector<RequestInfo>> ListRequests() override { return requests; }
  CancelResult Cancel(const std::string& request_id, const absl::Status& status) override {
    cancelled_with = status;
    return request_id == "running"    ? CancelResult::kCancelled
           : request_id == "finished" ? CancelResult::kAlreadyFinished
                                      : CancelResult::kNotFound;
  }
  absl::StatusOr<int64_t> ResetPrefixCache() override { return 7; }
  std::vector<admin::v1::FaultRecord> Faults() const override { return faults; }
  absl::Status ReplaceWorker(int rank, const std::string& reason) override {
    replaced = {rank, reason};
    return absl::OkStatus();
  }

  // Of the test, between calls.
  bool draining = false;
  absl::Status undrain;
  absl::StatusOr<std::vector<RequestInfo>> requests = std::vector<RequestInfo>();
  absl::Status cancelled_with;
  std::vector<admin::v1::FaultRecord> faults;
  std::pair<int, std::string> replaced = {-1, ""};
};

class AdminServerTest : public ::testing::Test {
 protected:
  void Start(const std::string& token_file = "") {
    ListenOptions options;
    options.address = "127.0.0.1:0";
    options.token_file = token_file;
    options.token_flag = "--admin-token-file";
    auto server = AdminServer::Start(options, &backend_);
    ASSERT_OK(server);
    server_ = *std::move(server);
    stub_ = AdminService::NewStub(grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                                      grpc::InsecureChannelCredentials()));
  }
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (AdminService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                    const Request& request, Response* response, const std::string& token = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    return (stub_.get()->*method)(&context, request, response);
  }
  static std::string Reason(const grpc::Status& status) {
    google::rpc::Status wire;
    google::rpc::ErrorInfo info;
    if (!wire.ParseFromString(status.error_details()) || wire.details().empty()) return "";
    return wire.details(0).UnpackTo(&info) ? info.reason() : "";
  }

  FakeAdminBackend backend_;
  std::unique_ptr<AdminServer> server_;
  std::unique_ptr<AdminService::Stub> stub_;
};

TEST_F(AdminServerTest, DrainsAndUndrains) {
  Start();
  admin::v1::DrainResponse drained;
  ASSERT_TRUE(Call(&AdminService::Stub::Drain, {}, &drained).ok());
  EXPECT_TRUE(backend_.draining);
  EXPECT_EQ(drained.requests_left(), 3);
  admin::v1::UndrainResponse undrained;
  ASSERT_TRUE(Call(&AdminService::Stub::Undrain, {}, &undrained).ok());
  EXPECT_FALSE(backend_.draining);
  EXPECT_TRUE(undrained.ready());
  backend_.undrain = absl::FailedPreconditionError("about to end");
  EXPECT_EQ(Call(&AdminService::Stub::Undrain, {}, &undrained).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(AdminServerTest, ListsRequestsAndCancelsThem) {
  Start();
  RequestInfo running;
  running.request_id = "running";
  running.scheduled = true;
  running.age = absl::Milliseconds(1234);
  running.prompt_tokens = 5;
  running.generated_tokens = 9;
  running.deadline = absl::Now() + absl::Minutes(1);
  RequestInfo queued;
  queued.request_id = "queued";
  backend_.requests = std::vector<RequestInfo>{running, queued};
  admin::v1::ListRequestsResponse list;
  ASSERT_TRUE(Call(&AdminService::Stub::ListRequests, {}, &list).ok());
  ASSERT_EQ(list.requests_size(), 2);
  EXPECT_EQ(list.requests(0).state(), admin::v1::Request::RUNNING);
  EXPECT_EQ(list.requests(0).age_ms(), 1234);
  EXPECT_EQ(list.requests(0).generated_tokens(), 9);
  EXPECT_GT(list.requests(0).deadline_ms(), 30000);
  EXPECT_EQ(list.requests(1).state(), admin::v1::Request::QUEUED);
  EXPECT_EQ(list.requests(1).deadline_ms(), 0);

  admin::v1::CancelRequestRequest request;
  admin::v1::CancelRequestResponse response;
  request.set_request_id("running");
  request.set_reason("too long");
  ASSERT_TRUE(Call(&AdminService::Stub::CancelRequest, request, &response).ok());
  EXPECT_EQ(response.outcome(), admin::v1::CancelRequestResponse::CANCELLED);
  EXPECT_TRUE(absl::IsCancelled(backend_.cancelled_with));
  EXPECT_EQ(ReasonOf(backend_.cancelled_with), "ADMIN");
  EXPECT_EQ(backend_.cancelled_with.message(), "cancelled by an operator: too long");
  request.set_request_id("finished");
  ASSERT_TRUE(Call(&AdminService::Stub::CancelRequest, request, &response).ok());
  EXPECT_EQ(response.outcome(), admin::v1::CancelRequestResponse::ALREADY_FINISHED);
  request.set_request_id("unknown");
  grpc::Status status = Call(&AdminService::Stub::CancelRequest, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(status), "REQUEST_NOT_FOUND");
  request.clear_request_id();
  status = Call(&AdminService::Stub::CancelRequest, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "REQUEST_ID_INVALID");

  backend_.requests = absl::UnavailableError("loading");
  EXPECT_EQ(Call(&AdminService::Stub::ListRequests, {}, &list).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(AdminServerTest, WorkersAndFaults) {
  Start();
  admin::v1::ListWorkersResponse workers;
  ASSERT_TRUE(Call(&AdminService::Stub::ListWorkers, {}, &workers).ok());
  ASSERT_EQ(workers.workers_size(), 2);
  EXPECT_EQ(workers.workers(1).worker_id(), "worker-1");

  admin::v1::ReplaceWorkerRequest replace;
  admin::v1::ReplaceWorkerResponse replaced;
  replace.set_rank(1);
  replace.set_worker_id("worker-1");
  replace.set_reason("odd noises");
  ASSERT_TRUE(Call(&AdminService::Stub::ReplaceWorker, replace, &replaced).ok());
  EXPECT_EQ(backend_.replaced, std::make_pair(1, std::string("odd noises")));
  backend_.replaced.first = -1;
  for (const auto& [rank, id] :
       std::vector<std::pair<int, std::string>>{{2, ""}, {-1, ""}, {0, "worker-1"}}) {
    replace.set_rank(rank);
    replace.set_worker_id(id);
    const grpc::Status status = Call(&AdminService::Stub::ReplaceWorker, replace, &replaced);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << rank;
    EXPECT_EQ(Reason(status), "WORKER_NOT_FOUND");
  }
  EXPECT_EQ(backend_.replaced.first, -1);

  for (uint64_t id : {3, 2, 1}) {
    admin::v1::FaultRecord fault;
    fault.set_id(id);
    fault.mutable_phases()->set_detect(0.5);
    backend_.faults.push_back(fault);
  }
  admin::v1::ListFaultsRequest limited;
  limited.set_limit(2);
  admin::v1::ListFaultsResponse faults;
  ASSERT_TRUE(Call(&AdminService::Stub::ListFaults, limited, &faults).ok());
  ASSERT_EQ(faults.faults_size(), 2);
  EXPECT_EQ(faults.faults(0).id(), 3u);
  ASSERT_TRUE(Call(&AdminService::Stub::ListFaults, {}, &faults).ok());
  EXPECT_EQ(faults.faults_size(), 3);
  limited.set_limit(-1);
  EXPECT_EQ(Call(&AdminService::Stub::ListFaults, limited, &faults).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(AdminServerTest, ServerInfoStatsCacheAndLogLevel) {
  Start();
  admin::v1::GetServerInfoResponse info;
  ASSERT_TRUE(Call(&AdminService::Stub::GetServerInfo, {}, &info).ok());
  EXPECT_EQ(info.flags().at("port"), "50051");
  EXPECT_EQ(info.limits().max_public_message_bytes(), 1 << 26);
  EXPECT_EQ(info.log_level(), "info");
  admin::v1::GetStatsResponse stats;
  ASSERT_TRUE(Call(&AdminService::Stub::GetStats, {}, &stats).ok());
  EXPECT_EQ(stats.status().requests_running(), 2);
  admin::v1::ResetPrefixCacheResponse reset;
  ASSERT_TRUE(Call(&AdminService::Stub::ResetPrefixCache, {}, &reset).ok());
  EXPECT_EQ(reset.blocks_freed(), 7);

  admin::v1::SetLogLevelRequest level;
  admin::v1::SetLogLevelResponse before;
  level.set_level("error");
  ASSERT_TRUE(Call(&AdminService::Stub::SetLogLevel, level, &before).ok());
  EXPECT_EQ(before.previous(), "info");
  EXPECT_EQ(LogLevel(), Severity::kError);
  level.set_level("loud");
  const grpc::Status status = Call(&AdminService::Stub::SetLogLevel, level, &before);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "LOG_LEVEL_UNKNOWN");
  EXPECT_EQ(LogLevel(), Severity::kError);
  SetLogLevel(Severity::kInfo);
}

TEST_F(AdminServerTest, EveryMethodAsksForTheAdminToken) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/admin-tokens");
  testing::WriteFile(path, "operator\n");
  Start(path);
  const auto expect = [this](auto method, auto request, auto response) {
    const grpc::Status status = Call(method, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(Call(method, request, &response, "wrong").error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
    return 1;
  };
  using Stub = AdminService::Stub;
  using namespace admin::v1;  // NOLINT
  int checked = 0;
  checked += expect(&Stub::GetServerInfo, GetServerInfoRequest(), GetServerInfoResponse());
  checked += expect(&Stub::ListWorkers, ListWorkersRequest(), ListWorkersResponse());
  checked += expect(&Stub::Drain, DrainRequest(), DrainResponse());
  checked += expect(&Stub::Undrain, UndrainRequest(), UndrainResponse());
  checked += expect(&Stub::ListRequests, ListRequestsRequest(), ListRequestsResponse());
  checked += expect(&Stub::CancelRequest, CancelRequestRequest(), CancelRequestResponse());
  checked += expect(&Stub::ResetPrefixCache, ResetPrefixCacheRequest(), ResetPrefixCacheResponse());
  checked += expect(&Stub::GetStats, GetStatsRequest(), GetStatsResponse());
  checked += expect(&Stub::ListFaults, ListFaultsRequest(), ListFaultsResponse());
  checked += expect(&Stub::ReplaceWorker, ReplaceWorkerRequest(), ReplaceWorkerResponse());
  checked += expect(&Stub::SetLogLevel, SetLogLevelRequest(), SetLogLevelResponse());
  EXPECT_EQ(checked, DrainRequest::descriptor()->file()->service(0)->method_count());
  EXPECT_FALSE(backend_.draining);
  GetStatsResponse stats;
  EXPECT_TRUE(Call(&Stub::GetStats, GetStatsRequest(), &stats, "operator").ok());
}

}  // namespace
}  // namespace lockstep
