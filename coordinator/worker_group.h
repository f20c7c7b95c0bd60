// WorkerGroup: the ranks of one model replica, over gRPC. Brings them from "process listens" to
// "steps can run" and carries steps. Load, Join, Send, Receive and Shutdown are called by one
// thread at a time; Wake and the queries (GetInfo, Health, GetStats, ProbeLinear) by any thread at
// any time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/step_transport.h"
#include "grpcpp/security/credentials.h"
#include "proto/worker.pb.h"

namespace lockstep {

struct WorkerGroupOptions {
  std::vector<std::string> addresses;  // rank order; gRPC targets ("127.0.0.1:7000", "unix:/path")
  std::string model_path;              // as the workers see it
  uint64_t expected_digest = 0;
  worker::v1::ActivationDType activation_dtype = worker::v1::ACTIVATION_BF16;
  worker::v1::ActivationQuant activation_quant = worker::v1::ACTIVATION_QUANT_NONE;
  absl::Duration connect_timeout = absl::Minutes(10);  // ranks may come up minutes apart
  absl::Duration comm_timeout = absl::Seconds(30);
  int64_t max_message_bytes = 16 << 20;
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // nullptr: plaintext
};

class WorkerGroup : public StepTransport {
 public:
  using ProgressFn = std::function<void(int rank, const worker::v1::LoadModelProgress& progress)>;

  explicit WorkerGroup(const WorkerGroupOptions& options);
  ~WorkerGroup() override;

  int world() const;

  // Waits for every rank to answer GetInfo, then loads all ranks at once. On failure the status
  // names the rank, its address, the phase and the cause; the other ranks are told to stop. Results
  // in rank order.
  absl::StatusOr<std::vector<worker::v1::LoadModelResult>> Load(uint64_t term,
                                                                const ProgressFn& progress);

  // PrepareComm and InitComm on all ranks, Configure, and the step streams of `epoch`.
  absl::Status Join(uint64_t term, uint64_t epoch, const worker::v1::ConfigureRequest& limits);

  // StepTransport. After the first failure AbortComm has been sent to every rank.
  absl::Status Send(const worker::v1::StepRequest& request) override;
  absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) override;
  void Wake() override;

  // Queries of all ranks at once, answers in rank order. An error names the rank.
  absl::StatusOr<std::vector<worker::v1::GetInfoResponse>> GetInfo();
  // Each rank's own answer, rank order; the statuses of those that did not answer name them. Thread
  // safe.
  std::vector<absl::StatusOr<worker::v1::HealthResponse>> Health(absl::Duration timeout);
  absl::StatusOr<std::vector<worker::v1::GetStatsResponse>> GetStats();
  absl::StatusOr<std::vector<worker::v1::ProbeLinearResponse>> ProbeLinear(
      const worker::v1::ProbeLinearRequest& request);

  // Ends the streams in order. The workers keep their weights and wait for the next coordinator;
  // ending their processes is up to whoever started them.
  void Shutdown();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
