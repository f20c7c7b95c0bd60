// SoloCommGroup: the group of one rank (tensor parallelism 1). Sums are the data itself, gathers
// are copies, nothing is ever waited for. Abort breaks it like any other group.
#pragma once

#include <mutex>

#include "kernels/comm/comm_group.h"

namespace lockstep {

class SoloCommGroup : public CommGroup {
 public:
  explicit SoloCommGroup(uint64_t epoch) : epoch_(epoch) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  uint64_t epoch() const override { return epoch_; }
  void BeginStep(uint64_t, uint64_t) override {}
  absl::Status AllReduce(ExecContext* ctx, TensorView data) override;
  absl::Status AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) override;
  absl::Status Barrier(ExecContext* ctx) override;
  void Abort(absl::string_view reason) override;

 private:
  absl::Status Begin(ExecContext* ctx);

  const uint64_t epoch_;
  std::mutex mu_;
  absl::Status error_;  // guarded by mu_
};

}  // namespace lockstep
