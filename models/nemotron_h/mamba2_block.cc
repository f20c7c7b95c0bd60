#include "models/nemotron_h/mamba2_block.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/conv/causal_conv.h"

namespace lockstep {
namespace nemotron_h {

absl::StatusOr<std::unique_ptr<Block>> Mamba2Block::Load(const BlockLoader& loader, const Config& c,
                                                         const std::string& name) {
  const std::string cls = "mamba2";
  const LinearLoader& linears = loader.linear;
  WeightStore* store = linears.store;
  auto m = std::make_unique<Mamba2Block>();
  Mamba2Params& p = m->params_;
  p.num_heads = c.mamba_heads / store->world();
  p.num_groups = c.num_groups / store->world();
  p.head_dim = c.mamba_head_dim;
  p.state_dim = c.state_dim;
  p.norm_eps = c.norm_eps;

  const ShardSpec::Segment inner = {c.mamba_heads, c.mamba_head_dim};
  const ShardSpec::Segment groups = {c.num_groups, c.state_dim};
  const ShardSpec::Segment heads = {c.mamba_heads, 1};
  const ShardSpec xbc = ShardSpec::Split({inner, groups, groups});
  const ShardSpec joint = ShardSpec::Split({inner, inner, groups, groups, heads});
  const int64_t channels = xbc.full_size();
  ASSIGN_OR_RETURN(m->in_proj_, Linear::ColumnParallel(linears, name + "in_proj", cls,
                                                       joint.full_size(), c.hidden_size, joint));
  ASSIGN_OR_RETURN(m->out_proj_, Linear::RowParallel(linears, name + "out_proj", cls, c.hidden_size,
                                                     c.mamba_inner()));
  ASSIGN_OR_RETURN(
      m->conv_, store->PlaceTensor(name + "conv1d.weight", {channels, 1, c.conv_width}, xbc, cls));
  if (c.conv_bias) {
    ASSIGN_OR_RETURN(m->conv_bias_, store->PlaceTensor(name + "conv1d.bias", {channels}, xbc, cls));
  }
  const ShardSpec head_rows = ShardSpec::Split({heads});
  ASSIGN_OR_RETURN(m->a_log_, store->PlaceTensor(name + "A_log", {c.mamba_heads}, head_rows, cls));
  ASSIGN_OR_RETURN(m->d_, store->PlaceTensor(name + "D", {c.mamba_heads}, head_rows, cls));
  ASSIGN_OR_RETURN(m->dt_bias_,
                   store->PlaceTensor(name + "dt_bias", {c.mamba_heads}, head_rows, cls));
  ASSIGN_OR_RETURN(m->norm_, store->PlaceTensor(name + "norm.weight", {c.mamba_inner()},
                                                ShardSpec::Split({inner}), "norm"));

  auto& slots = loader.cache_spec->slot_tensors;
  m->first_slot_tensor_ = slots.size();
  slots.push_back(
      {name + "conv", loader.activation_dtype, {c.conv_width - 1, p.conv_channels()}, true});
  slots.push_back({name + "state", DType::kF32, {p.num_heads, p.head_dim, p.state_dim}, true});
  slots.push_back({name + "ring_x", DType::kF32, {kGrid, p.inner()}, false});
  slots.push_back({name + "ring_b", DType::kF32, {kGrid, p.num_groups * p.state_dim}, false});
  slots.push_back({name + "ring_g", DType::kF32, {kGrid, p.num_heads}, false});
  return std::unique_ptr<Block>(std::move(m));
}

absl::Status Mamba2Block::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                                const CacheViews& caches, ConstTensorView u, TensorView sum) const {
  const Mamba2Params& p = params_;
  const size_t slot = first_slot_tensor_;
  const ConvState conv = {caches.slot_tensors[slot], caches.snapshot_tensors[slot]};
  const Mamba2State state = {caches.slot_tensors[slot + 1], caches.slot_tensors[slot + 2],
                             caches.slot_tensors[slot + 3], caches.slot_tensors[slot + 4],
                             caches.snapshot_tensors[slot + 1]};
  const int64_t tokens = batch.num_tokens, channels = p.conv_channels();
  Workspace* ws = ctx->workspace;
  TensorView joint = ws->Take(u.dtype, {tokens, in_proj_.local_n()});
  TensorView xbc = ws->Take(u.dtype, {tokens, channels});
  TensorView out = ws->Take(u.dtype, {tokens, p.inner()});
  LinearInput input(u);
  RETURN_IF_ERROR(in_proj_.Apply(ctx, &input, joint));
  RETURN_IF_ERROR(
      CausalConv(ctx, batch, joint.Columns(p.inner(), channels), conv_, conv_bias_, conv, xbc));
  RETURN_IF_ERROR(Mamba2(ctx, batch, p, xbc, joint.Columns(0, p.inner()),
                         joint.Columns(p.inner() + channels, p.num_heads),
                         {a_log_, d_, dt_bias_, norm_}, state, out));
  LinearInput output_input(out);
  return out_proj_.ApplyReduce(ctx, comm, &output_input, sum);
}

void Mamba2Block::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  visit(in_proj_);
  visit(out_proj_);
}

}  // namespace nemotron_h
}  // namespace lockstep
