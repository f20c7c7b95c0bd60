// WorkerGroup: the ranks of one model replica, over gRPC. Brings them from "process listens" to
// "steps can run", carries steps, and replaces ranks that are lost (GroupCore decides; this class
// gives it links, a clock and a thread to run on). Load, Join, Send, Receive, AwaitEpoch,
// OnReplayed and Shutdown are called by one thread at a time, which runs the group while it waits
// there; Wake, Replace and the queries by any thread at any time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/group/fault.h"
#include "coordinator/group/group_core.h"
#include "coordinator/group/group_options.h"
#include "coordinator/group/rank_link.h"
#include "coordinator/step_transport.h"
#include "grpcpp/grpcpp.h"
#include "proto/worker.pb.h"

namespace lockstep {

// What a group needs from outside. All may be empty.
struct WorkerGroupHooks {
  // Makes the launcher of local workers, whose events go to the sink.
  std::function<std::unique_ptr<WorkerLauncher>(RankEventSink)> launcher;
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // of the links; null: plaintext
  // Called on the group's thread.
  std::function<void(int rank, const Fault& fault)> on_replaced;
  std::function<void(const FaultRecord& record)> on_fault;
};

class WorkerGroup : public StepTransport {
 public:
  using ProgressFn = GroupCore::ProgressFn;

  explicit WorkerGroup(const WorkerGroupOptions& options,
                       WorkerGroupHooks hooks = WorkerGroupHooks());
  ~WorkerGroup() override;

  int world() const;

  // Waits for every rank to answer GetInfo, then loads all ranks at once. On failure the status
  // names the rank, its address, the phase and the cause; the other ranks are told to stop. Results
  // in rank order. Takes the larger of `term` and one more than any rank has seen.
  absl::StatusOr<std::vector<worker::v1::LoadModelResult>> Load(uint64_t term,
                                                                const ProgressFn& progress);

  // PrepareComm and InitComm on all ranks, Configure, and the step streams of `epoch`, or of a
  // higher one where a rank has seen that.
  absl::StatusOr<StepEpoch> Join(uint64_t epoch, const worker::v1::ConfigureRequest& limits);

  // StepTransport. After the first failure AbortComm has been sent to every rank.
  absl::Status Send(const worker::v1::StepRequest& request) override;
  absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) override;
  void Wake() override;
  absl::StatusOr<StepEpoch> AwaitEpoch(absl::Time deadline) override;
  void Distrust(const absl::Status& status) override;
  Fault last_fault() const override;
  void OnReplayed(int64_t requests, int64_t tokens_recomputed) override;

  // Gives up the process of a rank, as after a fault. Returns once that has begun, or why it
  // cannot. NOT_FOUND: no such rank. FAILED_PRECONDITION: the group is not running.
  absl::Status Replace(int rank, const std::string& reason);

  // What is known of the group, without asking anybody. Thread safe.
  struct View {
    GroupCore::Phase phase = GroupCore::Phase::kIdle;
    absl::Status status;
    uint64_t term = 0;
    uint64_t epoch = 0;
    int64_t stale_messages = 0;
    std::vector<GroupCore::MemberView> members;  // rank order
    std::vector<GroupCore::MemberView> spares;
  };
  View view() const;

  // Queries of all ranks at once, answers in rank order. An error names the rank.
  absl::StatusOr<std::vector<worker::v1::GetInfoResponse>> GetInfo();
  // Each rank's own answer, rank order; the statuses of those that did not answer name them.
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
