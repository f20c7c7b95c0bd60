#include "models/layers/delta_net.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/conv/causal_conv.h"

namespace lockstep {
namespace {

constexpr char kClass[] = "delta_net";

}  // namespace

absl::StatusOr<DeltaNetConfig> ReadDeltaNet(const ModelConfig& model) {
  DeltaNetConfig c;
  c.hidden_size = model.hidden_size;
  DeltaNetParams& p = c.params;
  p.norm_eps = static_cast<float>(model.NumberOr("rms_norm_eps", 1e-6));
  const struct {
    const char* key;
    int64_t* value;
  } rows[] = {{"linear_num_key_heads", &p.num_k_heads},
              {"linear_num_value_heads", &p.num_v_heads},
              {"linear_key_head_dim", &p.k_dim},
              {"linear_value_head_dim", &p.v_dim}};
  for (const auto& row : rows) {
    ASSIGN_OR_RETURN(*row.value, model.Int(row.key));
    RETURN_IF_ERROR(model.CheckSize(row.key, *row.value));
  }
  if (p.num_v_heads % p.num_k_heads != 0) {
    return model.Refuse(absl::StrCat("linear_num_value_heads ", p.num_v_heads,
                                     " is no multiple of linear_num_key_heads ", p.num_k_heads));
  }
  c.conv_width = model.IntOr("linear_conv_kernel_dim", 4);
  if (c.conv_width < 2 || c.conv_width > 8) {
    return model.Refuse(
        absl::StrCat("linear_conv_kernel_dim is ", c.conv_width, ", must be in [2, 8]"));
  }
  const std::string gate = model.StringOr("output_gate_type", "swish");
  if (gate == "sigmoid") {
    p.output_gate = OutputGate::kSigmoid;
  } else if (gate != "swish" && gate != "silu") {
    return model.Unsupported("output_gate_type", gate, "swish, silu, sigmoid");
  }
  return c;
}

void AddDeltaNetRules(const DeltaNetConfig& c, TpRules* rules) {
  rules->Split(c.params.num_k_heads, "linear-attention key heads");
  rules->Split(c.params.num_v_heads, "linear-attention value heads");
  rules->RowParallel("linear_attn.out_proj", c.params.num_v_heads * c.params.v_dim);
}

absl::Status DeltaNetBlock::LoadLinears(const LinearLoader& loader, const DeltaNetConfig& config,
                                        const std::string& name, const ShardSpec& qkv) {
  const DeltaNetParams& c = config.params;
  const int64_t hidden = config.hidden_size, v_rows = c.num_v_heads * c.v_dim;
  const ShardSpec v_dims = ShardSpec::Split(c.num_v_heads, c.v_dim);
  const ShardSpec v_heads = ShardSpec::Split(c.num_v_heads, 1);
  ASSIGN_OR_RETURN(in_proj_qkv_, Linear::ColumnParallel(loader, name + "in_proj_qkv", kClass,
                                                        c.conv_channels(), hidden, qkv));
  ASSIGN_OR_RETURN(in_proj_z_, Linear::ColumnParallel(loader, name + "in_proj_z", kClass, v_rows,
                                                      hidden, v_dims));
  ASSIGN_OR_RETURN(in_proj_b_, Linear::ColumnParallel(loader, name + "in_proj_b", kClass,
                                                      c.num_v_heads, hidden, v_heads));
  ASSIGN_OR_RETURN(in_proj_a_, Linear::ColumnParallel(loader, name + "in_proj_a", kClass,
                                                      c.num_v_heads, hidden, v_heads));
  ASSIGN_OR_RETURN(out_proj_,
                   Linear::RowParallel(loader, name + "out_proj", kClass, hidden, v_rows));
  return absl::OkStatus();
}

void DeltaNetBlock::AddCaches(const BlockLoader& loader, const std::string& name,
                              int64_t conv_width) {
  const DeltaNetParams& p = params_;
  auto& slots = loader.cache_spec->slot_tensors;
  first_slot_tensor_ = slots.size();
  slots.push_back(
      {name + "conv", loader.activation_dtype, {conv_width - 1, p.conv_channels()}, true});
  slots.push_back({name + "state", DType::kF32, {p.num_v_heads, p.v_dim, p.k_dim}, true});
  slots.push_back({name + "ring_k", DType::kF32, {kGrid, p.num_k_heads * p.k_dim}, false});
  slots.push_back({name + "ring_d", DType::kF32, {kGrid, p.num_v_heads * p.v_dim}, false});
  slots.push_back({name + "ring_g", DType::kF32, {kGrid, p.num_v_heads}, false});
}

absl::StatusOr<std::unique_ptr<Block>> DeltaNetBlock::Load(const BlockLoader& loader,
                                                           const DeltaNetConfig& config,
                                                           const std::string& name) {
  auto g = std::make_unique<DeltaNetBlock>();
  WeightStore* store = loader.linear.store;
  const DeltaNetParams& c = config.params;
  g->params_ = c;
  g->params_.num_k_heads = c.num_k_heads / store->world();
  g->params_.num_v_heads = c.num_v_heads / store->world();
  const ShardSpec qkv = ShardSpec::Split(
      {{c.num_k_heads, c.k_dim}, {c.num_k_heads, c.k_dim}, {c.num_v_heads, c.v_dim}});
  const ShardSpec v_heads = ShardSpec::Split(c.num_v_heads, 1);
  RETURN_IF_ERROR(g->LoadLinears(loader.linear, config, name, qkv));
  ASSIGN_OR_RETURN(g->conv_,
                   store->PlaceTensor(name + "conv1d.weight",
                                      {c.conv_channels(), 1, config.conv_width}, qkv, kClass));
  ASSIGN_OR_RETURN(g->a_log_, store->PlaceTensor(name + "A_log", {c.num_v_heads}, v_heads, kClass));
  ASSIGN_OR_RETURN(g->dt_bias_,
                   store->PlaceTensor(name + "dt_bias", {c.num_v_heads}, v_heads, kClass));
  ASSIGN_OR_RETURN(g->norm_, store->PlaceTensor(name + "norm.weight", {c.v_dim},
                                                ShardSpec::Replicated(c.v_dim), "norm"));
  g->AddCaches(loader, name, config.conv_width);
  return std::unique_ptr<Block>(std::move(g));
}

absl::Status DeltaNetBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                                  const CacheViews& caches, ConstTensorView u,
                                  TensorView sum) const {
  const DeltaNetParams& p = params_;
  const int64_t tokens = batch.num_tokens;
  const size_t slot = first_slot_tensor_;
  const ConvState conv = {caches.slot_tensors[slot], caches.snapshot_tensors[slot]};
  const DeltaNetState state = {caches.slot_tensors[slot + 1], caches.slot_tensors[slot + 2],
                               caches.slot_tensors[slot + 3], caches.slot_tensors[slot + 4],
                               caches.snapshot_tensors[slot + 1]};
  Workspace* ws = ctx->workspace;
  TensorView mixed = ws->Take(u.dtype, {tokens, p.conv_channels()});
  TensorView convolved = ws->Take(u.dtype, {tokens, p.conv_channels()});
  TensorView z = ws->Take(u.dtype, {tokens, p.num_v_heads * p.v_dim});
  TensorView b = ws->Take(u.dtype, {tokens, p.num_v_heads});
  TensorView a = ws->Take(u.dtype, {tokens, p.num_v_heads});
  TensorView o = ws->Take(u.dtype, {tokens, p.num_v_heads * p.v_dim});
  LinearInput input(u);
  RETURN_IF_ERROR(in_proj_qkv_.Apply(ctx, &input, mixed));
  RETURN_IF_ERROR(in_proj_z_.Apply(ctx, &input, z));
  RETURN_IF_ERROR(in_proj_b_.Apply(ctx, &input, b));
  RETURN_IF_ERROR(in_proj_a_.Apply(ctx, &input, a));
  RETURN_IF_ERROR(CausalConv(ctx, batch, mixed, conv_, {}, conv, convolved));
  RETURN_IF_ERROR(
      GatedDeltaNet(ctx, batch, p, convolved, z, b, a, a_log_, dt_bias_, norm_, state, o));
  LinearInput output_input(o);
  return out_proj_.ApplyReduce(ctx, comm, &output_input, sum);
}

void DeltaNetBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  for (const Linear* l : {&in_proj_qkv_, &in_proj_z_, &in_proj_b_, &in_proj_a_, &out_proj_}) {
    visit(*l);
  }
}

}  // namespace lockstep
