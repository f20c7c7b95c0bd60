#include "models/nemotron_h/relu2_mlp.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/pointwise/pointwise.h"

namespace lockstep {
namespace nemotron_h {

absl::StatusOr<Relu2Mlp> Relu2Mlp::Load(const LinearLoader& loader, const Relu2MlpConfig& c,
                                        const std::string& name) {
  Relu2Mlp m;
  ASSIGN_OR_RETURN(m.up_proj_,
                   Linear::ColumnParallel(loader, name + "up_proj", c.module_class, c.inner_size,
                                          c.outer_size, ShardSpec::Split(c.inner_size, 1)));
  ASSIGN_OR_RETURN(m.down_proj_, Linear::RowParallel(loader, name + "down_proj", c.module_class,
                                                     c.outer_size, c.inner_size, c.shards, {}));
  return m;
}

absl::StatusOr<TensorView> Relu2Mlp::Activate(ExecContext* ctx, ConstTensorView x) const {
  const int64_t tokens = x.rows(), inner = up_proj_.local_n();
  TensorView up = ctx->workspace->Take(DType::kF32, {tokens, inner});
  TensorView act = ctx->workspace->Take(x.dtype, {tokens, inner});
  LinearInput input(x);
  RETURN_IF_ERROR(up_proj_.Apply(ctx, &input, up));
  RETURN_IF_ERROR(Relu2(ctx, up, act));
  return act;
}

absl::Status Relu2Mlp::Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView x,
                             TensorView sum) const {
  ASSIGN_OR_RETURN(const TensorView act, Activate(ctx, x));
  LinearInput input(act);
  return down_proj_.ApplyReduce(ctx, comm, &input, sum);
}

absl::Status Relu2Mlp::ApplyShards(ExecContext* ctx, ConstTensorView x, TensorView sums) const {
  ASSIGN_OR_RETURN(const TensorView act, Activate(ctx, x));
  LinearInput input(act);
  return down_proj_.ApplyShards(ctx, &input, sums);
}

void Relu2Mlp::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  visit(up_proj_);
  visit(down_proj_);
}

absl::StatusOr<std::unique_ptr<Block>> Relu2MlpBlock::Load(const BlockLoader& loader,
                                                           int64_t hidden_size, int64_t inner_size,
                                                           const std::string& name) {
  auto block = std::make_unique<Relu2MlpBlock>();
  const Relu2MlpConfig config = {hidden_size, inner_size, VirtualShardsOf(inner_size), "mlp"};
  ASSIGN_OR_RETURN(block->mlp_, Relu2Mlp::Load(loader.linear, config, name));
  return std::unique_ptr<Block>(std::move(block));
}

absl::Status Relu2MlpBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch&,
                                  const CacheViews&, ConstTensorView u, TensorView sum) const {
  return mlp_.Apply(ctx, comm, u, sum);
}

void Relu2MlpBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  mlp_.ForEachLinear(visit);
}

}  // namespace nemotron_h
}  // namespace lockstep
