// Steps of any bytes for a worker's executor with a small model: each runs, or is refused as it
// should be, and after a refusal nothing runs any more. The input is a list of plans, each behind
// two bytes of its length; numbers and digests are right, so that the plans are looked at.
#include <future>
#include <memory>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/comm/solo_comm_group.h"
#include "proto/step.pb.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/fake_model.h"
#include "worker/step_executor.h"

namespace lockstep {
namespace fuzz {
namespace {

constexpr uint64_t kEpoch = 1;

BatchLimits Limits() {
  BatchLimits limits;
  limits.kv_blocks = 8;
  limits.slots = 4;
  limits.snapshots = 2;
  limits.max_tokens = 128;
  limits.max_sequences = 4;
  limits.max_logit_rows = 16;
  limits.max_sequence_blocks = 4;
  return limits;
}

class Rank {
 public:
  Rank() : executor_(DeviceType::kCpu, &counters_) {
    executor_.SetModel(std::make_unique<FakeModel>(FakeModelOptions()), 1);
  }
  // A new epoch: whatever the input before has left is gone.
  void Begin() {
    executor_.SetComm(std::make_shared<SoloCommGroup>(kEpoch));
    CHECK_OK(executor_.Configure(Limits()).status());
    step_ = digest_ = 0;
  }
  absl::StatusOr<worker::v1::StepResult> Run(absl::string_view plan) {
    worker::v1::StepRequest request;
    request.set_epoch(kEpoch);
    request.set_step_id(++step_);
    request.set_plan(std::string(plan));
    digest_ = Fold64(digest_, HashBytes(request.plan()));
    request.set_batch_digest(digest_);
    std::promise<absl::StatusOr<worker::v1::StepResult>> promise;
    auto future = promise.get_future();
    executor_.Submit(std::move(request), [&](absl::StatusOr<worker::v1::StepResult> result) {
      promise.set_value(std::move(result));
    });
    return future.get();
  }

 private:
  Counters counters_;
  StepExecutor executor_;
  uint64_t step_ = 0, digest_ = 0;
};

void CheckResult(absl::string_view bytes, const worker::v1::StepResult& result) {
  worker::v1::StepPlan plan;
  CHECK(plan.ParseFromString(std::string(bytes)));
  CHECK_EQ(result.sequences_size(), plan.sequences_size());
  for (int i = 0; i < result.sequences_size(); ++i) {
    const auto& sequence = result.sequences(i);
    CHECK_EQ(sequence.slot(), plan.sequences(i).slot());
    CHECK_EQ(sequence.digests_size(), plan.sequences(i).num_logits());
    CHECK(sequence.sampled_id() >= -1 && sequence.sampled_id() < FakeModelOptions().vocab_size);
  }
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;  // NOLINT: an entry point outside of it
  static fuzz::Rank& rank = *new fuzz::Rank();
  fuzz::FuzzInput input(data, size);
  rank.Begin();
  bool refused = false;
  while (!input.empty()) {
    const size_t length = input.Byte() + size_t{256} * input.Byte();
    const absl::string_view plan = input.Bytes(length);
    const auto result = rank.Run(plan);
    if (result.ok()) {
      CHECK(!refused);
      fuzz::CheckResult(plan, *result);
    } else {
      CHECK(absl::IsInvalidArgument(result.status()) || absl::IsFailedPrecondition(result.status()))
          << result.status().ToString();
      refused = true;
    }
  }
  return 0;
}
