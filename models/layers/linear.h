// The linears that models are written with: column-parallel (full K, the rank's rows) and
// row-parallel (the rank's columns, an all-reduce joins the partial sums). Formats stay behind
// LinearMethod.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/comm/comm_group.h"
#include "kernels/runtime/exec_context.h"
#include "models/quant/linear_method.h"
#include "models/quant/scheme.h"
#include "models/weights/shard_spec.h"
#include "models/weights/weight_store.h"

namespace lockstep {

// What loading a linear needs besides its name and shape.
struct LinearLoader {
  WeightStore* store = nullptr;
  const SchemeResolver* resolver = nullptr;
  ActivationQuant activation_quant = ActivationQuant::kNone;
};

class Linear {
 public:
  // Rows of [n, k] split by `rows` (ShardSpec over n).
  static absl::StatusOr<Linear> ColumnParallel(const LinearLoader& loader,
                                               const std::string& module,
                                               const std::string& module_class, int64_t n,
                                               int64_t k, const ShardSpec& rows);
  // Columns of [n, k] split into the rank's share of the virtual shards of k.
  static absl::StatusOr<Linear> RowParallel(const LinearLoader& loader, const std::string& module,
                                            const std::string& module_class, int64_t n, int64_t k);
  // The same with the virtual shards of a larger unit (all experts of a layer have one V). `stack`:
  // where the matrix lies when it is one of a stack.
  static absl::StatusOr<Linear> RowParallel(const LinearLoader& loader, const std::string& module,
                                            const std::string& module_class, int64_t n, int64_t k,
                                            const VirtualShards& shards, const LinearStack& stack);
  // Rows [rows.begin, rows.begin + rows.size) of each matrix [n, k] of a stack, split by rows.
  static absl::StatusOr<Linear> StackedColumnParallel(const LinearLoader& loader,
                                                      const std::string& module,
                                                      const std::string& module_class, int64_t n,
                                                      int64_t k, const Range& rows,
                                                      const LinearStack& stack);
  // InvalidArgument when k cannot be cut for `world` ranks (world > V), with V and the reason.
  static absl::Status ValidateRowParallel(const std::string& module, int64_t k, int world);
  static absl::Status ValidateRowParallel(const std::string& module, int64_t k, int world,
                                          const VirtualShards& shards);

  Linear() = default;
  Linear(Linear&&) = default;
  Linear& operator=(Linear&&) = default;

  int64_t local_n() const { return resident_->shard().local_n(); }
  const ResidentLinear& resident() const { return *resident_; }

  // out [T, local_n] F32: the sums, not rounded; or BF16: rounded once. Column-parallel only.
  absl::Status Apply(ExecContext* ctx, LinearInput* input, TensorView out) const;
  // sum [T, n] F32: complete on every rank (the all-reduce is inside). Row-parallel only.
  absl::Status ApplyReduce(ExecContext* ctx, CommGroup* comm, LinearInput* input,
                           TensorView sum) const;
  // sums F32 [local virtual shards, T, n]: the rank's partial sums, neither joined nor reduced; the
  // row stride between shards is honoured. Row-parallel only.
  absl::Status ApplyShards(ExecContext* ctx, LinearInput* input, TensorView sums) const;

 private:
  std::unique_ptr<ResidentLinear> resident_;
};

}  // namespace lockstep
