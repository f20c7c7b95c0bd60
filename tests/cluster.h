// Cluster: a coordinator and its workers as real processes on real sockets, for tests. Binaries
// come from the test's runfiles; ports are chosen by the system; everything is ended by process id
// at the end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"
#include "tools/process/child_process.h"

namespace lockstep {
namespace testing {

// Path of a checkpoint of tests/testdata in the runfiles.
std::string TestModel(const std::string& folder);
// A fresh file name in the test's own folder.
std::string TempPath(const std::string& stem);
std::string ReadFile(const std::string& path);

struct Workers {
  std::vector<ChildProcess> processes;
  std::vector<std::string> addresses;
  std::vector<std::string> logs;  // stderr, by rank

  // Starts `count` lockstep_worker processes and waits until they listen.
  static absl::StatusOr<Workers> Start(int count, const std::vector<std::string>& flags = {});
};

struct ClusterOptions {
  std::string model;  // a directory
  int tp = 1;
  std::vector<std::string> coordinator_flags;  // of the product
  std::vector<std::string> worker_flags;
  // With any of these the coordinator is the test binary, which links the same libraries.
  std::string chunk_policy;  // "", "grid" (64), "one" (1), "random:<seed>"
  int preempt_every = 0;
  int delay_results_ms = 0;  // between a result's arrival and the engine seeing it

  bool NeedsTestCoordinator() const {
    return !chunk_policy.empty() || preempt_every > 0 || delay_results_ms > 0;
  }
};

class Cluster {
 public:
  // Starts workers and coordinator and waits until the server is ready.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const ClusterOptions& options);
  // The coordinator alone, for workers at these addresses; does not wait for readiness.
  static absl::StatusOr<std::unique_ptr<Cluster>> StartCoordinator(
      const ClusterOptions& options, const std::vector<std::string>& addresses);
  absl::Status WaitReady(absl::Duration timeout);
  ~Cluster();

  const std::string& address() const { return address_; }
  std::shared_ptr<grpc::Channel> channel() const { return channel_; }
  inference::v1::InferenceService::Stub* inference() const { return inference_.get(); }
  inference::v1::ModelService::Stub* models() const { return models_.get(); }
  Workers& workers() { return workers_; }
  ChildProcess& coordinator() { return coordinator_; }
  std::string coordinator_log() const { return ReadFile(coordinator_log_); }

  inference::v1::ServerStatus Status();
  // Everything that requests held is back, within a bound: it returns just after a stream has
  // ended.
  void ExpectIdle();
  // One whole generation; the status carries the gRPC code.
  absl::StatusOr<inference::v1::GenerateResult> Generate(
      const inference::v1::GenerateRequest& request, absl::Duration timeout = absl::Minutes(2));
  // All at once, the last one a moment later; results in order.
  std::vector<absl::StatusOr<inference::v1::GenerateResult>> GenerateAll(
      const std::vector<inference::v1::GenerateRequest>& requests);

 private:
  Cluster() = default;

  Workers workers_;
  ChildProcess coordinator_;
  std::string coordinator_log_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<inference::v1::InferenceService::Stub> inference_;
  std::unique_ptr<inference::v1::ModelService::Stub> models_;
};

// absl code of a grpc status, message kept.
absl::Status ToAbsl(const grpc::Status& status);
// The google.rpc.ErrorInfo reason in a status' details, or "".
std::string ReasonOf(const grpc::Status& status);

}  // namespace testing
}  // namespace lockstep
