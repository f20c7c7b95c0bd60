// FakeStepTransport: a StepTransport with a tiny deterministic model in it, for tests.
//
// It checks every plan as strictly as a worker would, and more: step numbers and digests, slot
// generations, positions, that no row is written without a block, that no block has two writers or
// is handed on while a step that names its old owner is in flight, that what a sequence reads is
// what its own tokens wrote, that snapshots lie on the grid and are restored only when they hold
// the state of the prefix. The first violation is kept in error() and breaks the transport.
//
// The logits of a position are a hash of all tokens up to it; the sampled id is a hash of these, of
// the sampling parameters and of the counts that penalties would need. So a wrong token, position,
// restored state or penalty state anywhere changes the output.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/step_transport.h"

namespace lockstep {

struct FakeStepOptions {
  int64_t kv_blocks = 0;
  int64_t slots = 0;
  int64_t snapshots = 0;
  int64_t max_batch_tokens = 0;
  int64_t max_logit_rows = 0;
  int64_t snapshot_interval = 1024;
  int32_t vocab_size = 1000;
  uint64_t term = 1;
  uint64_t epoch = 1;
  // Called with each result before it is given out; may change it (a NaN, another digest).
  std::function<void(const worker::v1::StepPlan& plan, worker::v1::StepResult* result)> change;
  // The same once the digest is in it: what a rank that errs alone would do.
  std::function<void(worker::v1::StepResult* result)> change_agreed;
};

class FakeStepTransport : public StepTransport {
 public:
  explicit FakeStepTransport(const FakeStepOptions& options);

  absl::Status Send(const worker::v1::StepRequest& request) override;
  absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) override;
  void Wake() override;

  // Results wait from now on until Allow or Resume.
  void Pause();
  // Lets `steps` more results through.
  void Allow(int64_t steps);
  void Resume();
  // Every result takes this long after the one before it.
  void SetDelay(absl::Duration delay);
  // Send of step `step`, or Receive of its result, fails with `status`.
  void FailSend(uint64_t step, const absl::Status& status);
  void FailReceive(uint64_t step, const absl::Status& status);

  // The first violation found.
  absl::Status error() const;
  int64_t steps_sent() const;
  int64_t steps_received() const;
  int64_t most_in_flight() const;
  // Plans so far, when recording was asked for before the first step.
  void RecordPlans();
  std::vector<worker::v1::StepPlan> plans() const;

  // What the model gives for `prompt` when nothing else runs: ids and digests of `count` tokens.
  struct Expected {
    std::vector<int32_t> ids;
    std::vector<uint64_t> digests;
  };
  static Expected Run(const std::vector<int32_t>& prompt, const worker::v1::SamplingSpec& sampling,
                      int32_t vocab_size, int64_t count);

 private:
  struct Slot {
    bool live = false;
    uint64_t generation = 0;
    std::vector<int32_t> table;
    std::vector<uint64_t> history;  // state after each position
    worker::v1::SamplingSpec sampling;
    std::vector<int32_t> outputs;
    uint64_t sampled_in = 0;  // the step that sampled outputs.back()
  };
  struct Pending {
    worker::v1::StepPlan plan;
    worker::v1::StepResult result;
  };
  using Owner = std::pair<int32_t, uint64_t>;  // slot, generation

  absl::Status Check(const worker::v1::StepRequest& request, worker::v1::StepPlan* plan);
  absl::Status CheckNotInFlight(const worker::v1::SequenceEntry& entry) const;
  absl::Status Begin(const worker::v1::SequenceEntry& entry, Slot* slot);
  absl::Status CheckEntry(const worker::v1::SequenceEntry& entry, const Slot& slot) const;
  absl::Status RunEntry(uint64_t step, const worker::v1::SequenceEntry& entry, Slot* slot,
                        worker::v1::SequenceResult* result);
  absl::Status CheckReads(const worker::v1::SequenceEntry& entry, const Slot& slot) const;
  absl::Status CheckWriters(const worker::v1::StepPlan& plan) const;

  const FakeStepOptions options_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  absl::Status error_;
  std::vector<Slot> slots_;
  std::vector<std::vector<uint64_t>> blocks_;  // state after each position that was written
  struct SavedState {
    bool written = false;
    int64_t position = 0;
    uint64_t state = 0;
  };
  std::vector<SavedState> snapshots_;
  std::deque<Pending> pending_;
  uint64_t last_step_ = 0;
  uint64_t last_digest_ = 0;
  int64_t received_ = 0;
  int64_t most_in_flight_ = 0;
  bool paused_ = false;
  int64_t allowed_ = 0;
  bool woken_ = false;
  absl::Duration delay_ = absl::ZeroDuration();
  std::map<uint64_t, absl::Status> fail_send_;
  std::map<uint64_t, absl::Status> fail_receive_;
  bool record_ = false;
  std::vector<worker::v1::StepPlan> plans_;
};

}  // namespace lockstep
