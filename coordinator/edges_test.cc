// The edges of a whole coordinator over fake workers: admin port, metrics endpoint, mutual TLS with
// workers, liveness.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/coordinator.h"
#include "coordinator/errors.h"
#include "coordinator/group/fake_worker_service.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/admin.grpc.pb.h"
#include "proto/health.grpc.pb.h"
#include "proto/inference.grpc.pb.h"
#include "security/testing/certificates.h"
#include "security/tls.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::lockstep::testing::TestCa;
using ::lockstep::testing::WriteTlsFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

using admin::v1::AdminService;
using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class EdgesTest : public ::testing::Test {
 protected:
  EdgesTest() {
    options_.model_path = ::testing::TempDir();
    options_.served_model_name = "tiny";
    options_.port = 0;
    options_.edges.admin_port = 0;
    options_.edges.flags = {{"model", "tiny"}, {"auth-token-file", "/etc/tokens"}};
  }
  void AddWorker(const std::shared_ptr<grpc::ServerCredentials>& credentials =
                     grpc::InsecureServerCredentials()) {
    workers_.push_back(std::make_unique<FakeWorker>());
    options_.workers.push_back(workers_.back()->Start("127.0.0.1:0", credentials));
  }
  void Start() {
    auto coordinator = Coordinator::Start(options_);
    ASSERT_OK(coordinator);
    coordinator_ = *std::move(coordinator);
    channel_ = grpc::CreateChannel(coordinator_->address(), grpc::InsecureChannelCredentials());
    admin_ = AdminService::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", coordinator_->admin_port()),
                            grpc::InsecureChannelCredentials()));
  }
  // The state that a Watch tells next.
  HealthCheckResponse::ServingStatus Next(grpc::ClientReader<HealthCheckResponse>* reader) {
    HealthCheckResponse response;
    return reader->Read(&response) ? response.status() : HealthCheckResponse::UNKNOWN;
  }
  template <typename Request, typename Response>
  grpc::Status Admin(grpc::Status (AdminService::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                     Response* response) {
    grpc::ClientContext context;
    return (admin_.get()->*method)(&context, Request(), response);
  }
  std::string GenerateReason() {
    grpc::ClientContext context;
    inference::v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    request.mutable_sampling()->set_max_tokens(1);
    inference::v1::GenerateResult result;
    const grpc::Status status = inference::v1::InferenceService::NewStub(channel_)->GenerateOnce(
        &context, request, &result);
    return status.ok() ? "OK" : status.error_message();
  }

  CoordinatorOptions options_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::unique_ptr<Coordinator> coordinator_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<AdminService::Stub> admin_;
};

// T93: readiness comes back, and a Watch sees it.
TEST_F(EdgesTest, UndrainAfterDrainServesAgain) {
  AddWorker();
  Start();
  admin::v1::ListRequestsResponse requests;
  EXPECT_EQ(Admin(&AdminService::Stub::ListRequests, &requests).error_code(),
            grpc::StatusCode::UNAVAILABLE)
      << "loading";
  ASSERT_OK(coordinator_->Load());
  grpc::ClientContext context;
  auto reader = Health::NewStub(channel_)->Watch(&context, HealthCheckRequest());
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::SERVING);
  admin::v1::DrainResponse drained;
  ASSERT_TRUE(Admin(&AdminService::Stub::Drain, &drained).ok());
  EXPECT_EQ(drained.requests_left(), 0);
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::NOT_SERVING);
  EXPECT_THAT(GenerateReason(), HasSubstr("draining"));
  admin::v1::UndrainResponse undrained;
  ASSERT_TRUE(Admin(&AdminService::Stub::Undrain, &undrained).ok());
  EXPECT_TRUE(undrained.ready());
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::SERVING);
  EXPECT_THAT(GenerateReason(), ::testing::Not(HasSubstr("draining")));
  // A server that is about to end is not undrained.
  coordinator_->Drain();
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Admin(&AdminService::Stub::Undrain, &undrained).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  context.TryCancel();
  coordinator_->Stop();
}

TEST_F(EdgesTest, InfoWorkersAndDescription) {
  options_.edges.metrics_port = 0;
  AddWorker();
  AddWorker();
  Start();
  ASSERT_OK(coordinator_->Load());
  admin::v1::GetServerInfoResponse info;
  ASSERT_TRUE(Admin(&AdminService::Stub::GetServerInfo, &info).ok());
  EXPECT_EQ(info.state(), "READY");
  EXPECT_EQ(info.address(), coordinator_->address());
  EXPECT_EQ(info.metrics_port(), coordinator_->metrics_port());
  EXPECT_EQ(info.limits().max_public_message_bytes(), 64 << 20);
  EXPECT_EQ(info.limits().max_worker_message_bytes(), 16 << 20);
  EXPECT_EQ(info.limits().max_context(), 256);
  EXPECT_EQ(info.limits().max_queued_requests(), 1024);
  EXPECT_EQ(info.flags().at("auth-token-file"), "/etc/tokens");
  admin::v1::ListWorkersResponse workers;
  ASSERT_TRUE(Admin(&AdminService::Stub::ListWorkers, &workers).ok());
  ASSERT_EQ(workers.workers_size(), 2);
  EXPECT_TRUE(workers.workers(1).up());
  EXPECT_GE(workers.workers(1).lease_age_ms(), 0);
  EXPECT_THAT(coordinator_->Describe(),
              AllOf(HasSubstr(absl::StrCat("admin         127.0.0.1:", coordinator_->admin_port())),
                    HasSubstr(absl::StrCat("metrics       http://127.0.0.1:",
                                           coordinator_->metrics_port(), "/metrics"))));
  EXPECT_THAT(coordinator_->StatusLine(), HasSubstr("ready; requests: 0 running"));
}

TEST_F(EdgesTest, TakenPortsAreErrorsThatNameTheFlag) {
  options_.edges.metrics_port = 0;
  AddWorker();
  Start();
  CoordinatorOptions second = options_;
  second.edges.admin_port = coordinator_->admin_port();
  EXPECT_THAT(Coordinator::Start(second).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("--admin-port")));
  second.edges.admin_port = 0;
  second.edges.metrics_port = coordinator_->metrics_port();
  EXPECT_THAT(Coordinator::Start(second).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("--metrics-port")));
}

TEST_F(EdgesTest, WorkersAreKnownByTheirCertificates) {
  const TestCa ca("workers"), other("others");
  const auto path = [](const std::string& name) {
    return absl::StrCat(::testing::TempDir(), "/", name);
  };
  const auto server = [&](const std::string& stem, const TestCa& issuer, const std::string& names) {
    auto credentials =
        MakeServerCredentials(WriteTlsFiles(path(stem), issuer.Issue(names), ca.cert()), "--tls");
    EXPECT_OK(credentials);
    return *credentials;
  };
  options_.group.connect_timeout = absl::Milliseconds(700);
  options_.edges.worker_tls =
      WriteTlsFiles(path("coordinator"), ca.Issue("DNS:coordinator"), ca.cert());
  const auto load = [this]() {
    auto coordinator = Coordinator::Start(options_);
    EXPECT_OK(coordinator);
    return (*coordinator)->Load();
  };
  AddWorker(server("good", ca, "IP:127.0.0.1"));
  EXPECT_OK(load());

  // The wrong name, the wrong CA, no TLS at all: none of them is reached.
  for (const auto& credentials :
       {server("elsewhere", ca, "IP:127.0.0.9,DNS:elsewhere"),
        server("stranger", other, "IP:127.0.0.1"), grpc::InsecureServerCredentials()}) {
    options_.workers.clear();
    AddWorker(credentials);
    const absl::Status status = load();
    EXPECT_EQ(ReasonOf(status), "WORKER_UNREACHABLE") << status;
  }
  // And a worker takes no coordinator that has no certificate of its CA.
  options_.workers.clear();
  AddWorker(server("good", ca, "IP:127.0.0.1"));
  const std::string worker = options_.workers[0];
  options_.edges.worker_tls =
      WriteTlsFiles(path("coordinator"), other.Issue("DNS:coordinator"), ca.cert());
  EXPECT_EQ(ReasonOf(load()), "WORKER_UNREACHABLE");
  options_.edges.worker_tls = TlsFiles();
  EXPECT_EQ(ReasonOf(load()), "WORKER_UNREACHABLE");
  EXPECT_EQ(workers_.back()->seen().load.path(), "") << "nobody of them has got through";
}

// A transport whose Send hangs while the test says so.
class StuckTransport : public StepTransport {
 public:
  StuckTransport(StepTransport* transport, std::atomic<bool>* stuck)
      : transport_(transport), stuck_(stuck) {}
  absl::Status Send(const worker::v1::StepRequest& request) override {
    while (*stuck_) absl::SleepFor(absl::Milliseconds(5));
    return transport_->Send(request);
  }
  absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) override {
    return transport_->Receive(deadline);
  }
  void Wake() override { transport_->Wake(); }

 private:
  StepTransport* const transport_;
  std::atomic<bool>* const stuck_;
};

TEST_F(EdgesTest, AStepLoopThatHangsIsNotAlive) {
  std::atomic<bool> stuck{true};
  options_.liveness_bound = absl::Seconds(3);  // the idle loop ticks each second
  options_.wrap_transport = [&stuck](StepTransport* transport) {
    return std::make_unique<StuckTransport>(transport, &stuck);
  };
  AddWorker();
  Start();
  HealthCheckRequest request;
  request.set_service("liveness");
  grpc::ClientContext context;
  auto reader = Health::NewStub(channel_)->Watch(&context, request);
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::SERVING) << "while the model is loading";
  ASSERT_OK(coordinator_->Load());
  EXPECT_TRUE(coordinator_->Alive());
  std::thread client([this]() { GenerateReason(); });
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(coordinator_->Alive());
  stuck = false;
  EXPECT_EQ(Next(reader.get()), HealthCheckResponse::SERVING);
  context.TryCancel();
  client.join();
}

}  // namespace
}  // namespace lockstep
