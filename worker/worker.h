// Worker: the states of one worker process and the legal moves between them (proto/worker.proto),
// free of gRPC. Fences by (term, epoch): what is older than anything seen is refused with
// FailedPrecondition, the message beginning with STALE_TERM or STALE_EPOCH.
//
// A beat (Health with a term) may grant a lease. When it expires, the worker leaves its group as if
// the coordinator had died: collectives and the step stream end, caches and communicator are freed,
// the weights stay.
//
// Thread safe. GetInfo, Health, GetStats and AbortComm never wait for the executor or for another
// call; Health, which answers beats, does not ask the device either.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"
#include "kernels/comm/process_comm_listener.h"
#include "proto/worker.pb.h"
#include "worker/expiry_timer.h"
#include "worker/model_loader.h"
#include "worker/step_executor.h"

namespace lockstep {

struct WorkerOptions {
  std::string worker_id = "worker";
  DeviceType device = DeviceType::kCpu;
  int device_ordinal = 0;  // already selected (SelectDevice)
  int threads = 0;         // 0: max(1, hardware threads / world), decided at LoadModel
  ProcessCommOptions comm;
  ModelLoader loader;
  // Not OK when the device has failed for good; empty: GetDeviceInfo.
  std::function<absl::Status()> check_device;
  // Called once, from a thread of its own, when no coordinator has been heard of (a beat or any
  // accepted call) for this long, counted from the start. Zero: never.
  absl::Duration orphan_timeout = absl::ZeroDuration();
  std::function<void()> on_orphan;
};

// Who takes the steps of a stream: a Worker, or what a test puts in front of it.
class StepSink {
 public:
  virtual ~StepSink() = default;

  // The step stream of the epoch: one at a time. `ended` is called, at most once and from any
  // thread, when the worker ends the stream (abort, a new epoch). Gives the token that names the
  // stream below.
  virtual absl::StatusOr<uint64_t> OpenStream(std::function<void(const absl::Status&)> ended) = 0;
  virtual void Submit(uint64_t token, worker::v1::StepRequest request, StepExecutor::Done done) = 0;
  // The end of the stream ends the epoch. `status` is OK when the coordinator wished it; otherwise
  // collectives that run are aborted. Does not wait.
  virtual void CloseStream(uint64_t token, const absl::Status& status) = 0;
};

class Worker : public StepSink {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker() override;

  worker::v1::GetInfoResponse GetInfo();
  absl::StatusOr<worker::v1::HealthResponse> Health(const worker::v1::HealthRequest& request);
  worker::v1::GetStatsResponse GetStats();

  // Calls `progress` about every 0.5 s on the calling thread; false from it stops listening, not
  // the load, and gives Cancelled. The same request again joins the load that runs, or answers at
  // once.
  absl::StatusOr<worker::v1::LoadModelResult> LoadModel(
      const worker::v1::LoadModelRequest& request,
      const std::function<bool(const worker::v1::LoadModelProgress&)>& progress);

  absl::StatusOr<worker::v1::PrepareCommResponse> PrepareComm(
      const worker::v1::PrepareCommRequest& request);
  absl::StatusOr<worker::v1::InitCommResponse> InitComm(const worker::v1::InitCommRequest& request);
  absl::StatusOr<worker::v1::ConfigureResponse> Configure(
      const worker::v1::ConfigureRequest& request);
  absl::StatusOr<worker::v1::AbortCommResponse> AbortComm(
      const worker::v1::AbortCommRequest& request);
  absl::StatusOr<worker::v1::DrainResponse> Drain(const worker::v1::DrainRequest& request);
  absl::StatusOr<worker::v1::ProbeLinearResponse> ProbeLinear(
      const worker::v1::ProbeLinearRequest& request);

  absl::StatusOr<uint64_t> OpenStream(std::function<void(const absl::Status&)> ended) override;
  void Submit(uint64_t token, worker::v1::StepRequest request, StepExecutor::Done done) override;
  void CloseStream(uint64_t token, const absl::Status& status) override;

 private:
  struct Load;

  absl::Status FenceLocked(uint64_t term, uint64_t epoch);
  worker::v1::Identity IdentityLocked() const;
  worker::v1::WorkerState StateLocked() const;
  absl::Status WrongStateLocked(absl::string_view call, absl::string_view expected) const;
  void RunLoad(std::shared_ptr<Load> load);
  void EndGroupLocked(const absl::Status& reason, std::function<void(const absl::Status&)>* ended);
  absl::StatusOr<std::shared_ptr<CommGroup>> Connect(const worker::v1::InitCommRequest& request);
  // Makes `comm` the group of the epoch, unless that has ended meanwhile.
  absl::Status AdoptComm(const worker::v1::InitCommRequest& request,
                         std::shared_ptr<CommGroup> comm);
  absl::Status CheckDeviceUsable(absl::string_view call) const;
  void LeaseExpired();

  const WorkerOptions options_;
  const uint64_t incarnation_;
  Counters counters_;
  std::shared_ptr<void> resources_;  // of the model: outlives the executor
  StepExecutor executor_;

  // Serializes PrepareComm, InitComm, Configure and ProbeLinear. Taken before mu_.
  std::mutex setup_mu_;

  std::mutex mu_;
  std::condition_variable load_changed_;
  // Guarded by mu_.
  worker::v1::WorkerState state_ = worker::v1::NEW;
  bool draining_ = false;
  int rank_ = -1;
  int world_ = 0;
  uint64_t model_digest_ = 0;
  uint64_t term_ = 0;
  uint64_t epoch_ = 0;
  int threads_ = 0;
  std::string error_;
  std::shared_ptr<Load> load_;
  std::shared_ptr<ProcessCommListener> listener_;
  std::shared_ptr<CommGroup> comm_;
  int64_t fenced_steps_ = 0;  // refused before they reached the executor
  uint64_t stream_ = 0;       // token of the open one; 0: none
  uint64_t last_stream_ = 0;
  std::function<void(const absl::Status&)> stream_ended_;
  std::thread load_thread_;
  absl::Duration lease_ = absl::ZeroDuration();  // zero: none is granted
  uint64_t beat_epoch_ = 0;                      // of the last beat

  // Last: their functions use everything above.
  ExpiryTimer lease_timer_;
  ExpiryTimer orphan_timer_;
};

}  // namespace lockstep
