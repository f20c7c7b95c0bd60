// FaultInjector: makes a worker of the production libraries fail where rules say so. It stands
// between their parts: around the loader and the model that it gives, in front of the service's
// calls and of the steps. CPU only, where a step's result leaves on the thread that computed it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/fault_rule.h"
#include "worker/expiry_timer.h"
#include "worker/model_loader.h"
#include "worker/worker.h"
#include "worker/worker_service.h"

namespace lockstep {
namespace testing {

struct FaultOptions {
  std::vector<FaultRule> rules;
  // Faults that a test imposes while the worker runs: the first rule, one a line, of the file
  // PREFIX.RANK strikes the process that holds that rank, at the Nth occurrence since it was seen.
  // It leaves the file, which goes with the last one, before the fault is done. Empty: none.
  std::string strike_prefix;
  std::vector<int32_t> poison_ids;  // the process aborts when a step contains one
  // Rules that have fired, one a line: they never fire again, in whatever process. Empty: a process
  // begins anew.
  std::string once_file;
  // A line "epoch step slot generation position" is appended for every position that a result of
  // this worker samples, before the result leaves. Empty: none.
  std::string ledger;
};

class FaultInjector : public StepSink {
 public:
  explicit FaultInjector(FaultOptions options) : options_(std::move(options)) {}

  ModelLoader WrapLoader(ModelLoader inner);
  // Once. The service borrows both.
  std::unique_ptr<WorkerServiceImpl> MakeService(Worker* worker);

  // The phase occurs: does what the rules say, which may end the process. Not OK: what the call
  // ends with. Kinds that change a step are kept for it.
  absl::Status At(FaultPhase phase);
  // Whether the rows of logits of the step that runs lose one; asked once per step.
  bool TakeNan();
  void CheckPoison(const int32_t* ids, int64_t count) const;

  absl::StatusOr<uint64_t> OpenStream(std::function<void(const absl::Status&)> ended) override;
  void Submit(uint64_t token, worker::v1::StepRequest request, StepExecutor::Done done) override;
  void CloseStream(uint64_t token, const absl::Status& status) override;

 private:
  struct Held {
    worker::v1::StepResult result;
    StepExecutor::Done done;
  };

  bool TakeStrike(FaultPhase phase, FaultRule* rule);
  absl::Status Do(const FaultRule& rule);
  bool Fires(const FaultRule& rule, int64_t occurrence);
  void Deliver(const worker::v1::StepRequest& request,
               absl::StatusOr<worker::v1::StepResult> result, const StepExecutor::Done& done);
  void WriteLedger(const worker::v1::StepRequest& request) const;
  void ReleaseHeld();

  const FaultOptions options_;
  StepSink* steps_ = nullptr;

  std::mutex mu_;
  int rank_ = -1;                                   // guarded by mu_; -1: not known yet
  std::string strike_;                              // guarded by mu_; the rule that was seen
  int64_t strike_occurrences_ = 0;                  // guarded by mu_
  std::map<FaultPhase, int64_t> occurrences_;       // guarded by mu_
  std::vector<FaultKind> of_step_;                  // guarded by mu_; of the one that runs
  std::function<void(const absl::Status&)> ended_;  // guarded by mu_; of the open stream
  std::vector<Held> held_;                          // guarded by mu_
  // A result that waits for the next one to overtake it does not wait for ever.
  ExpiryTimer release_{[this] { ReleaseHeld(); }};
};

}  // namespace testing
}  // namespace lockstep
