// Loading and applying linears.
#include "models/layers/linear.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

absl::StatusOr<std::unique_ptr<ResidentLinear>> Load(const LinearLoader& loader,
                                                     const LinearShard& shard) {
  LinearScheme scheme;  // stacks are unquantized
  if (shard.stack.count == 0) {
    ASSIGN_OR_RETURN(scheme, loader.resolver->Resolve(shard.module, shard.n, shard.k));
  }
  const LinearMethod& method = LinearMethodFor(scheme.weight);
  RETURN_IF_ERROR(method.Validate(scheme, shard));
  return method.Prepare(scheme, shard, loader.activation_quant, loader.store);
}

}  // namespace

absl::StatusOr<Linear> Linear::ColumnParallel(const LinearLoader& loader, const std::string& module,
                                              const std::string& module_class, int64_t n, int64_t k,
                                              const ShardSpec& rows) {
  CHECK_EQ(rows.full_size(), n) << module << " ";
  const absl::Status valid = rows.Validate(loader.store->world());
  if (!valid.ok()) return absl::Status(valid.code(), absl::StrCat(module, ": ", valid.message()));
  LinearShard shard;
  shard.module = module;
  shard.module_class = module_class;
  shard.n = n;
  shard.k = k;
  shard.rows = rows.Slices(loader.store->rank(), loader.store->world());
  shard.columns = {0, k};
  shard.virtual_shards = {1, k};
  Linear linear;
  ASSIGN_OR_RETURN(linear.resident_, Load(loader, shard));
  return linear;
}

absl::StatusOr<Linear> Linear::StackedColumnParallel(const LinearLoader& loader,
                                                     const std::string& module,
                                                     const std::string& module_class, int64_t n,
                                                     int64_t k, const Range& rows,
                                                     const LinearStack& stack) {
  const ShardSpec spec = ShardSpec::Split(rows.size, 1);
  const absl::Status valid = spec.Validate(loader.store->world());
  if (!valid.ok()) return absl::Status(valid.code(), absl::StrCat(module, ": ", valid.message()));
  LinearShard shard;
  shard.module = module;
  shard.module_class = module_class;
  shard.n = n;
  shard.k = k;
  shard.rows = spec.Slices(loader.store->rank(), loader.store->world());
  for (Range& r : shard.rows) r.begin += rows.begin;
  shard.columns = {0, k};
  shard.virtual_shards = {1, k};
  shard.stack = stack;
  Linear linear;
  ASSIGN_OR_RETURN(linear.resident_, Load(loader, shard));
  return linear;
}

absl::Status Linear::ValidateRowParallel(const std::string& module, int64_t k, int world) {
  return ValidateRowParallel(module, k, world, VirtualShardsOf(k));
}

absl::Status Linear::ValidateRowParallel(const std::string& module, int64_t k, int world,
                                         const VirtualShards& v) {
  if (world >= 1 && world <= v.count && v.count % world == 0) return absl::OkStatus();
  const char* why = v.count == VirtualShardsOf(k).count
                        ? "the largest power of two up to 8 that leaves a multiple of 16 in each"
                        : "the smallest V of the members of its layer";
  return absl::InvalidArgumentError(
      absl::StrCat(module, ": K = ", k, " is cut into V = ", v.count, " virtual shards of ", v.size,
                   " columns (", why, "); ", world,
                   " ranks cannot share them: use a power of two of at most ", v.count, " ranks"));
}

absl::StatusOr<Linear> Linear::RowParallel(const LinearLoader& loader, const std::string& module,
                                           const std::string& module_class, int64_t n, int64_t k) {
  return RowParallel(loader, module, module_class, n, k, VirtualShardsOf(k), {});
}

absl::StatusOr<Linear> Linear::RowParallel(const LinearLoader& loader, const std::string& module,
                                           const std::string& module_class, int64_t n, int64_t k,
                                           const VirtualShards& shards, const LinearStack& stack) {
  const int64_t world = loader.store->world();
  RETURN_IF_ERROR(ValidateRowParallel(module, k, loader.store->world(), shards));
  LinearShard shard;
  shard.module = module;
  shard.module_class = module_class;
  shard.n = n;
  shard.k = k;
  shard.rows = {{0, n}};
  shard.columns = {loader.store->rank() * (k / world), k / world};
  shard.row_parallel = true;
  shard.virtual_shards = shards;
  shard.stack = stack;
  Linear linear;
  ASSIGN_OR_RETURN(linear.resident_, Load(loader, shard));
  return linear;
}

absl::Status Linear::Apply(ExecContext* ctx, LinearInput* input, TensorView out) const {
  CHECK(!resident_->shard().row_parallel) << resident_->shard().module << " is row-parallel ";
  return resident_->Apply(ctx, input, out);
}

absl::Status Linear::ApplyReduce(ExecContext* ctx, CommGroup* comm, LinearInput* input,
                                 TensorView sum) const {
  CHECK(resident_->shard().row_parallel) << resident_->shard().module << " is column-parallel ";
  CHECK(sum.dtype == DType::kF32) << "partial sums are F32, not " << Name(sum.dtype) << " ";
  RETURN_IF_ERROR(resident_->Apply(ctx, input, sum));
  if (comm == nullptr || comm->size() == 1) return absl::OkStatus();
  return comm->AllReduce(ctx, sum);
}

absl::Status Linear::ApplyShards(ExecContext* ctx, LinearInput* input, TensorView sums) const {
  CHECK(resident_->shard().row_parallel) << resident_->shard().module << " is column-parallel ";
  return resident_->ApplyShards(ctx, input, sums);
}

}  // namespace lockstep
