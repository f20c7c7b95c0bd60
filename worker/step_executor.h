// StepExecutor: the one thread that owns a rank's device: model, caches, workspace and collectives.
// It runs steps in the order in which they were submitted; a step that does not follow from the
// ones before is refused before anything of it runs. On a GPU up to StepSampler::kTickets steps are
// queued on the device, so that the next one begins when the last one ends.
//
// Life: SetModel; then per epoch SetComm, Configure, Submit..., EndEpoch. After the first failed
// step of an epoch every later one fails with the same status. All methods are thread safe;
// callbacks run on the executor thread, or, for steps that EndEpoch drops, on its caller's.
//
// After every failure the device is asked whether it still works. One that does not is lost for the
// life of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"
#include "kernels/runtime/counters.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/exec_context.h"
#include "models/model.h"
#include "proto/step.pb.h"
#include "worker/batch_builder.h"
#include "worker/cache_arena.h"
#include "worker/slot_table.h"
#include "worker/step_sampler.h"

namespace lockstep {

class StepExecutor {
 public:
  using Done = std::function<void(absl::StatusOr<worker::v1::StepResult>)>;
  struct Sizes {
    int64_t cache_bytes = 0;
    int64_t workspace_bytes = 0;
  };
  struct Stats {
    uint64_t steps = 0;
    uint64_t refused_steps = 0;
    uint64_t last_step = 0;      // of the epoch; 0 before the first
    int64_t step_micros = 0;     // sum over steps
    int64_t idle_micros = 0;     // with an open stream and nothing queued
    int64_t idle_waits = 0;      // times the queue was empty after a step
    int64_t running_millis = 0;  // of the step that runs; 0 when none
    bool running = false;
  };

  // `check_device`: not OK when the device has failed for good; empty: GetDeviceInfo. Called by any
  // thread.
  StepExecutor(DeviceType device, Counters* counters,
               std::function<absl::Status()> check_device = nullptr);
  ~StepExecutor();

  // Once. `threads` of the CPU arms.
  void SetModel(std::unique_ptr<Model> model, int threads);
  // The group of a new epoch; nullptr when it ended. Waits for a step that runs.
  void SetComm(std::shared_ptr<CommGroup> comm);
  // Ends the group and frees caches, workspace and sampling state; the model stays. Waits for a
  // step that runs.
  void Release();
  // Allocates caches and workspace (kept when the limits stay), zeroes them, and expects step 1 of
  // the group's epoch. InvalidArgument for bad limits, ResourceExhausted when memory does not
  // suffice.
  absl::StatusOr<Sizes> Configure(BatchLimits limits);
  // Calls fn on the executor thread, between steps, and gives its status.
  absl::Status Run(
      const std::function<absl::Status(ExecContext* ctx, const Model* model, CommGroup* comm)>& fn);

  // Queues a step. `done` is called once.
  void Submit(worker::v1::StepRequest request, Done done);
  // Steps may be expected from now on (for the idle times).
  void OpenStream();
  // Drops queued steps: their callbacks get `reason`. Does not wait for the one that runs.
  void EndEpoch(const absl::Status& reason);
  // False when the queue was not empty, or a step still ran, at `deadline`.
  bool WaitUntilIdle(absl::Time deadline);

  Stats stats() const;

  // Asks the device; once lost it stays so. Called by any thread.
  void CheckDevice();
  bool device_lost() const { return device_lost_; }

 private:
  struct Job {
    std::function<void()> fn;  // empty: a step
    worker::v1::StepRequest request;
    Done done;
    absl::Time queued;
  };

  // A step whose work is queued on the device.
  struct InFlight {
    PlannedStep plan;
    int ticket = 0;
    worker::v1::StepResult result;
    std::vector<std::string> logits;  // per sequence, when asked for
    Done done;
    absl::Time queued;
    absl::Time launched;
  };

  // A captured decode step.
  struct StepGraph {
    bool seen = false;  // ran once, op by op
    DeviceGraph graph;
    int64_t op_launches = 0;
  };

  void Loop();
  absl::Status OpenDevice();
  void RunJob(Job job);
  void Fail(const absl::Status& status);
  // Guarded by mu_.
  void SetBusy(bool busy);
  // Hands the result of the oldest step in flight out. False when it has not ended and `wait` is
  // false.
  bool CollectOldest(bool wait);
  absl::Status LaunchStep(const worker::v1::StepRequest& request, InFlight* step, bool* refused);
  absl::Status CollectStep(InFlight* step);
  absl::Status CheckRequest(const worker::v1::StepRequest& request) const;
  absl::Status BeginSequences(ExecContext* ctx, const worker::v1::StepPlan& plan,
                              const PlannedStep& step);
  // `gathered`: the logits, F32 [world, R, L], until the scope of the caller ends.
  absl::Status Compute(ExecContext* ctx, const ForwardBatch& batch, const CacheViews& caches,
                       StepSampler* sampler, ConstTensorView* gathered);
  absl::Status ComputeOrReplay(ExecContext* ctx, const ForwardBatch& batch, const PlannedStep& plan,
                               ConstTensorView* gathered);
  absl::Status CopyLogits(ConstTensorView gathered, InFlight* step);
  absl::Status SizeWorkspace(const BatchLimits& limits, int64_t* bytes);
  // Runs on the executor thread; waits.
  void RunAndWait(const std::function<void()>& fn);
  ExecContext Context(Workspace* workspace);

  const DeviceType device_;
  Counters* const counters_;
  const std::function<absl::Status()> check_device_;
  std::atomic<bool> device_lost_{false};

  // Of the executor thread.
  std::unique_ptr<Model> model_;
  std::unique_ptr<ThreadPool> pool_;
  absl::Status device_status_;  // of opening the device
  std::unique_ptr<DeviceStream> stream_;
  DeviceEvent events_[StepSampler::kTickets];
  std::shared_ptr<CommGroup> comm_;
  BatchLimits limits_;
  CacheArena arena_;
  BatchBuilder builder_;
  Workspace workspace_;
  std::unique_ptr<SlotTable> slots_;  // null: not configured for this epoch
  std::unique_ptr<StepSampler> sampler_;
  std::map<std::pair<int64_t, int64_t>, StepGraph> graphs_;  // by sequences, columns of the table
  std::deque<InFlight> in_flight_;                           // oldest first
  absl::Time last_collected_ = absl::InfinitePast();
  absl::Status broken_;
  uint64_t next_step_ = 1;
  uint64_t digest_ = 0;

  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> refused_steps_{0};
  std::atomic<uint64_t> last_step_{0};
  std::atomic<int64_t> step_micros_{0};
  std::atomic<int64_t> idle_micros_{0};
  std::atomic<int64_t> idle_waits_{0};
  std::atomic<int64_t> running_since_{0};  // nanoseconds since the epoch of time; 0: no step runs

  // What the executor thread looks at without mu_ while steps are in flight.
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> has_function_{false};  // the queue begins with one

  mutable std::mutex mu_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Job> queue_;     // guarded by mu_
  bool busy_ = false;         // guarded by mu_: a job runs, or steps are in flight
  bool stream_open_ = false;  // guarded by mu_
  bool stop_ = false;         // guarded by mu_
  std::thread thread_;
};

}  // namespace lockstep
