#include "models/layers/gated_mlp.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/pointwise/pointwise.h"

namespace lockstep {

absl::StatusOr<GatedMlp> GatedMlp::Load(const LinearLoader& loader, const GatedMlpConfig& c,
                                        const std::string& name) {
  GatedMlp m;
  const ShardSpec rows = ShardSpec::Split(c.inner_size, 1);
  ASSIGN_OR_RETURN(m.gate_proj_, Linear::ColumnParallel(loader, name + "gate_proj", c.module_class,
                                                        c.inner_size, c.hidden_size, rows));
  ASSIGN_OR_RETURN(m.up_proj_, Linear::ColumnParallel(loader, name + "up_proj", c.module_class,
                                                      c.inner_size, c.hidden_size, rows));
  ASSIGN_OR_RETURN(m.down_proj_, Linear::RowParallel(loader, name + "down_proj", c.module_class,
                                                     c.hidden_size, c.inner_size, c.shards, {}));
  return m;
}

absl::StatusOr<GatedMlp> GatedMlp::LoadStacked(const LinearLoader& loader, const GatedMlpConfig& c,
                                               const std::string& stack_name, int64_t index,
                                               int64_t count, const std::string& name) {
  GatedMlp m;
  const LinearStack gate_up = {stack_name + "gate_up_proj", index, count};
  const LinearStack down = {stack_name + "down_proj", index, count};
  const int64_t inner = c.inner_size, hidden = c.hidden_size;
  ASSIGN_OR_RETURN(m.gate_proj_,
                   Linear::StackedColumnParallel(loader, name + "gate_proj", c.module_class,
                                                 2 * inner, hidden, {0, inner}, gate_up));
  ASSIGN_OR_RETURN(
      m.up_proj_, Linear::StackedColumnParallel(loader, name + "up_proj", c.module_class, 2 * inner,
                                                hidden, {inner, inner}, gate_up));
  ASSIGN_OR_RETURN(m.down_proj_, Linear::RowParallel(loader, name + "down_proj", c.module_class,
                                                     hidden, inner, c.shards, down));
  return m;
}

absl::StatusOr<TensorView> GatedMlp::Activate(ExecContext* ctx, ConstTensorView x) const {
  const int64_t tokens = x.rows(), inner = gate_proj_.local_n();
  Workspace* ws = ctx->workspace;
  TensorView gate = ws->Take(DType::kF32, {tokens, inner});
  TensorView up = ws->Take(DType::kF32, {tokens, inner});
  TensorView act = ws->Take(x.dtype, {tokens, inner});
  LinearInput input(x);
  RETURN_IF_ERROR(gate_proj_.Apply(ctx, &input, gate));
  RETURN_IF_ERROR(up_proj_.Apply(ctx, &input, up));
  RETURN_IF_ERROR(SwiGlu(ctx, gate, up, act));
  return act;
}

absl::Status GatedMlp::Apply(ExecContext* ctx, CommGroup* comm, ConstTensorView x,
                             TensorView sum) const {
  ASSIGN_OR_RETURN(const TensorView act, Activate(ctx, x));
  LinearInput input(act);
  return down_proj_.ApplyReduce(ctx, comm, &input, sum);
}

absl::Status GatedMlp::ApplyShards(ExecContext* ctx, ConstTensorView x, TensorView sums) const {
  ASSIGN_OR_RETURN(const TensorView act, Activate(ctx, x));
  LinearInput input(act);
  return down_proj_.ApplyShards(ctx, &input, sums);
}

void GatedMlp::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  for (const Linear* l : {&gate_proj_, &up_proj_, &down_proj_}) visit(*l);
}

absl::StatusOr<std::unique_ptr<Block>> GatedMlpBlock::Load(const BlockLoader& loader,
                                                           int64_t hidden_size, int64_t inner_size,
                                                           const std::string& name) {
  auto block = std::make_unique<GatedMlpBlock>();
  const GatedMlpConfig config = {hidden_size, inner_size, VirtualShardsOf(inner_size), "mlp"};
  ASSIGN_OR_RETURN(block->mlp_, GatedMlp::Load(loader.linear, config, name));
  return std::unique_ptr<Block>(std::move(block));
}

absl::Status GatedMlpBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch&,
                                  const CacheViews&, ConstTensorView u, TensorView sum) const {
  return mlp_.Apply(ctx, comm, u, sum);
}

void GatedMlpBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  mlp_.ForEachLinear(visit);
}

absl::Status CheckSiluMlp(const ModelConfig& model) {
  const std::string act = model.StringOr("hidden_act", "silu");
  if (act != "silu" && act != "swish") return model.Unsupported("hidden_act", act, "silu");
  if (model.BoolOr("mlp_bias", false)) return model.Unsupported("mlp_bias", "true", "false");
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ReadGatedMlp(const ModelConfig& model) {
  RETURN_IF_ERROR(CheckSiluMlp(model));
  ASSIGN_OR_RETURN(const int64_t inner, model.Int("intermediate_size"));
  RETURN_IF_ERROR(model.CheckSize("intermediate_size", inner));
  return inner;
}

void AddGatedMlpRules(int64_t inner_size, TpRules* rules) {
  rules->Split(inner_size, "rows of gate_proj and up_proj");
  rules->RowParallel("mlp.down_proj", inner_size);
}

}  // namespace lockstep
