#include "tests/cluster.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "proto/error_details.pb.h"
#include "proto/health.grpc.pb.h"

namespace lockstep {
namespace testing {
namespace {

constexpr char kWorker[] = "worker/lockstep_worker";
constexpr char kCoordinator[] = "coordinator/lockstep_coordinator";
constexpr char kTestCoordinator[] = "tests/test_coordinator";

bool Has(const std::vector<std::string>& flags, const std::string& flag) {
  return std::find(flags.begin(), flags.end(), flag) != flags.end();
}

grpc::ChannelArguments ChannelArgs() {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(64 << 20);
  args.SetMaxSendMessageSize(64 << 20);
  // A channel of its own for every Cluster.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return args;
}

}  // namespace

std::string TestModel(const std::string& folder) { return absl::StrCat("tests/testdata/", folder); }

std::string TempPath(const std::string& stem) {
  static std::atomic<int> counter{0};
  return absl::StrCat(::testing::TempDir(), "/", stem, ".", getpid(), ".", counter++);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

absl::StatusOr<Workers> Workers::Start(int count, const std::vector<std::string>& flags) {
  Workers workers;
  std::vector<std::string> files;
  for (int rank = 0; rank < count; ++rank) {
    files.push_back(TempPath("worker-address"));
    workers.logs.push_back(TempPath("worker-log"));
    std::vector<std::string> argv = {kWorker, "--address-file", files.back()};
    argv.insert(argv.end(), flags.begin(), flags.end());
    if (!Has(flags, "--listen")) argv.insert(argv.end(), {"--listen", "127.0.0.1:0"});
    ChildProcess::Options options;
    options.stderr_path = workers.logs.back();
    ASSIGN_OR_RETURN(ChildProcess process, ChildProcess::Start(argv, options));
    workers.processes.push_back(std::move(process));
  }
  for (int rank = 0; rank < count; ++rank) {
    const size_t r = static_cast<size_t>(rank);
    auto address = WaitForAddressFile(files[r], &workers.processes[r], absl::Seconds(60));
    if (!address.ok()) {
      return absl::Status(address.status().code(), absl::StrCat(address.status().message(), "\n",
                                                                ReadFile(workers.logs[r])));
    }
    workers.addresses.push_back(*address);
  }
  return workers;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(const ClusterOptions& options) {
  ASSIGN_OR_RETURN(Workers workers, Workers::Start(options.tp, options.worker_flags));
  ASSIGN_OR_RETURN(auto cluster, StartCoordinator(options, workers.addresses));
  cluster->workers_ = std::move(workers);
  RETURN_IF_ERROR(cluster->WaitReady(absl::Seconds(120)));
  return cluster;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::StartCoordinator(
    const ClusterOptions& options, const std::vector<std::string>& addresses) {
  auto cluster = std::unique_ptr<Cluster>(new Cluster());
  const std::string file = TempPath("coordinator-address");
  cluster->coordinator_log_ = TempPath("coordinator-log");
  std::vector<std::string> argv = {options.NeedsTestCoordinator() ? kTestCoordinator : kCoordinator,
                                   "--model",
                                   options.model,
                                   "--workers",
                                   absl::StrJoin(addresses, ","),
                                   "--host",
                                   "127.0.0.1",
                                   "--address-file",
                                   file};
  if (!Has(options.coordinator_flags, "--port")) argv.insert(argv.end(), {"--port", "0"});
  // Machines that run tests are busy.
  if (!Has(options.coordinator_flags, "--lease-ms")) {
    argv.insert(argv.end(), {"--lease-ms", "10000"});
  }
  argv.insert(argv.end(), options.coordinator_flags.begin(), options.coordinator_flags.end());
  if (options.NeedsTestCoordinator()) {
    argv.insert(argv.end(), {"--chunk-policy", options.chunk_policy, "--preempt-every",
                             absl::StrCat(options.preempt_every), "--delay-results-ms",
                             absl::StrCat(options.delay_results_ms)});
  }
  ChildProcess::Options process;
  process.stderr_path = cluster->coordinator_log_;
  ASSIGN_OR_RETURN(cluster->coordinator_, ChildProcess::Start(argv, process));
  auto address = WaitForAddressFile(file, &cluster->coordinator_, absl::Seconds(60));
  if (!address.ok()) {
    return absl::Status(address.status().code(),
                        absl::StrCat(address.status().message(), "\n", cluster->coordinator_log()));
  }
  cluster->address_ = *address;
  cluster->channel_ =
      grpc::CreateCustomChannel(*address, grpc::InsecureChannelCredentials(), ChannelArgs());
  cluster->inference_ = inference::v1::InferenceService::NewStub(cluster->channel_);
  cluster->models_ = inference::v1::ModelService::NewStub(cluster->channel_);
  return cluster;
}

Cluster::~Cluster() {
  coordinator_.Signal(SIGTERM);
  if (!coordinator_.Wait(absl::Seconds(5))) coordinator_.Signal(SIGKILL);
  for (ChildProcess& worker : workers_.processes) worker.Signal(SIGTERM);
  for (ChildProcess& worker : workers_.processes) {
    if (!worker.Wait(absl::Seconds(5))) worker.Signal(SIGKILL);
  }
}

absl::Status Cluster::WaitReady(absl::Duration timeout) {
  auto health = grpc::health::v1::Health::NewStub(channel_);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  context.set_wait_for_ready(true);
  auto watch = health->Watch(&context, grpc::health::v1::HealthCheckRequest());
  grpc::health::v1::HealthCheckResponse response;
  while (watch->Read(&response)) {
    if (response.status() == grpc::health::v1::HealthCheckResponse::SERVING) {
      context.TryCancel();
      return absl::OkStatus();
    }
  }
  std::string logs;
  for (const std::string& log : workers_.logs) absl::StrAppend(&logs, ReadFile(log));
  return absl::UnavailableError(
      absl::StrCat("not ready: ", coordinator_.Outcome(), "\n", coordinator_log(), "\n", logs));
}

inference::v1::ServerStatus Cluster::Status() {
  grpc::ClientContext context;
  inference::v1::ServerStatus status;
  const grpc::Status result = models_->GetServerStatus(&context, {}, &status);
  EXPECT_TRUE(result.ok()) << result.error_message();
  return status;
}

void Cluster::ExpectIdle() {
  inference::v1::ServerStatus status;
  for (int i = 0; i < 1000; ++i) {
    status = Status();
    if (status.requests_running() + status.requests_queued() == 0 &&
        status.slots_free() == status.slots_total() &&
        status.kv_blocks_free() + status.kv_blocks_cached() == status.kv_blocks_total()) {
      break;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(status.requests_running(), 0);
  EXPECT_EQ(status.requests_queued(), 0);
  EXPECT_EQ(status.slots_free(), status.slots_total());
  EXPECT_EQ(status.kv_blocks_free() + status.kv_blocks_cached(), status.kv_blocks_total());
}

absl::StatusOr<inference::v1::GenerateResult> Cluster::Generate(
    const inference::v1::GenerateRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  inference::v1::GenerateResult result;
  const grpc::Status status = inference_->GenerateOnce(&context, request, &result);
  if (!status.ok()) return ToAbsl(status);
  return result;
}

std::vector<absl::StatusOr<inference::v1::GenerateResult>> Cluster::GenerateAll(
    const std::vector<inference::v1::GenerateRequest>& requests) {
  std::vector<absl::StatusOr<inference::v1::GenerateResult>> results(requests.size(),
                                                                     absl::UnknownError("not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < requests.size(); ++i) {
    // The last one arrives last.
    if (i + 1 == requests.size()) absl::SleepFor(absl::Milliseconds(20));
    threads.emplace_back([&, i] { results[i] = Generate(requests[i]); });
  }
  for (std::thread& t : threads) t.join();
  return results;
}

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    if (any.Is<google::rpc::ErrorInfo>() && any.UnpackTo(&info)) return info.reason();
  }
  return "";
}

}  // namespace testing
}  // namespace lockstep
