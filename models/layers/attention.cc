#include "models/layers/attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

absl::StatusOr<AttentionConfig> ReadAttention(const ModelConfig& model, double partial_rotary) {
  if (model.BoolOr("attention_bias", false)) {
    return model.Unsupported("attention_bias", "true", "false");
  }
  AttentionConfig c;
  c.hidden_size = model.hidden_size;
  c.norm_eps = static_cast<float>(model.NumberOr("rms_norm_eps", 1e-6));
  if (!(c.norm_eps > 0.0f && c.norm_eps < 1.0f)) {
    return model.Refuse(absl::StrCat("rms_norm_eps is ", c.norm_eps, ", must be in (0, 1)"));
  }
  ASSIGN_OR_RETURN(c.num_q_heads, model.Int("num_attention_heads"));
  RETURN_IF_ERROR(model.CheckSize("num_attention_heads", c.num_q_heads));
  c.num_kv_heads = model.IntOr("num_key_value_heads", c.num_q_heads);
  RETURN_IF_ERROR(model.CheckSize("num_key_value_heads", c.num_kv_heads));
  c.head_dim = model.IntOr("head_dim", c.hidden_size / c.num_q_heads);
  RETURN_IF_ERROR(model.CheckSize("head_dim", c.head_dim));
  if (c.num_q_heads % c.num_kv_heads != 0) {
    return model.Refuse(absl::StrCat("num_attention_heads ", c.num_q_heads,
                                     " is no multiple of num_key_value_heads ", c.num_kv_heads));
  }
  ASSIGN_OR_RETURN(c.rope, ReadRope(model, c.head_dim, partial_rotary));
  return c;
}

void AddAttentionRules(const AttentionConfig& c, TpRules* rules) {
  rules->Split(c.num_q_heads, "attention heads");
  rules->KvHeads(c.num_kv_heads);
  rules->RowParallel("self_attn.o_proj", c.num_q_heads * c.head_dim);
}

absl::StatusOr<std::unique_ptr<Block>> AttentionBlock::Load(const BlockLoader& loader,
                                                            const AttentionConfig& c,
                                                            std::shared_ptr<const RopeTable> rope,
                                                            const std::string& name) {
  auto a = std::make_unique<AttentionBlock>();
  WeightStore* store = loader.linear.store;
  AttentionParams& p = a->params_;
  p.num_q_heads = c.num_q_heads / store->world();
  p.num_kv_heads = std::max<int64_t>(1, c.num_kv_heads / store->world());
  p.head_dim = c.head_dim;
  p.rotary_dim = c.rope.rotary_dim;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  p.output_gate = c.output_gate;
  p.qk_norm = c.qk_norm;
  p.norm_eps = c.norm_eps;
  p.norm_weight_offset = c.norm_weight_offset;
  a->rope_ = std::move(rope);
  const std::string cls = "attention";
  const int64_t hidden = c.hidden_size;
  const int64_t q_rows = c.head_dim * (c.output_gate ? 2 : 1);
  const int64_t kv_rows = c.num_kv_heads * c.head_dim;
  const ShardSpec q_heads = ShardSpec::Split(c.num_q_heads, q_rows);
  const ShardSpec kv_heads = ShardSpec::Split({{c.num_kv_heads, c.head_dim, true}});
  ASSIGN_OR_RETURN(a->q_proj_, Linear::ColumnParallel(loader.linear, name + "q_proj", cls,
                                                      c.num_q_heads * q_rows, hidden, q_heads));
  ASSIGN_OR_RETURN(a->k_proj_, Linear::ColumnParallel(loader.linear, name + "k_proj", cls, kv_rows,
                                                      hidden, kv_heads));
  ASSIGN_OR_RETURN(a->v_proj_, Linear::ColumnParallel(loader.linear, name + "v_proj", cls, kv_rows,
                                                      hidden, kv_heads));
  ASSIGN_OR_RETURN(a->o_proj_, Linear::RowParallel(loader.linear, name + "o_proj", cls, hidden,
                                                   c.num_q_heads * c.head_dim));
  if (c.qk_norm) {
    const ShardSpec whole = ShardSpec::Replicated(c.head_dim);
    ASSIGN_OR_RETURN(a->q_norm_,
                     store->PlaceTensor(name + "q_norm.weight", {c.head_dim}, whole, "norm"));
    ASSIGN_OR_RETURN(a->k_norm_,
                     store->PlaceTensor(name + "k_norm.weight", {c.head_dim}, whole, "norm"));
  }
  a->kv_layer_ = loader.cache_spec->kv_layers.size();
  loader.cache_spec->kv_layers.push_back({p.num_kv_heads, p.head_dim});
  return std::unique_ptr<Block>(std::move(a));
}

absl::Status AttentionBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                                   const CacheViews& caches, ConstTensorView u,
                                   TensorView sum) const {
  const AttentionParams& p = params_;
  const int64_t tokens = batch.num_tokens, width = p.num_q_heads * p.head_dim;
  Workspace* ws = ctx->workspace;
  TensorView qg = ws->Take(u.dtype, {tokens, q_proj_.local_n()});
  TensorView k = ws->Take(u.dtype, {tokens, p.num_kv_heads * p.head_dim});
  TensorView v = ws->Take(u.dtype, {tokens, p.num_kv_heads * p.head_dim});
  TensorView q = ws->Take(u.dtype, {tokens, width});
  TensorView attended = ws->Take(u.dtype, {tokens, width});
  LinearInput input(u);
  RETURN_IF_ERROR(q_proj_.Apply(ctx, &input, qg));
  RETURN_IF_ERROR(k_proj_.Apply(ctx, &input, k));
  RETURN_IF_ERROR(v_proj_.Apply(ctx, &input, v));
  const KvCacheView& cache = caches.kv_layers[kv_layer_];
  const TensorView inv_freq = rope_ == nullptr ? TensorView() : rope_->inv_freq();
  RETURN_IF_ERROR(RopeAndCacheWrite(ctx, batch, p, qg, k, v, q_norm_, k_norm_, inv_freq, cache, q));
  RETURN_IF_ERROR(PagedAttention(ctx, batch, p, q, qg, cache, attended));
  LinearInput attended_input(attended);
  return o_proj_.ApplyReduce(ctx, comm, &attended_input, sum);
}

void AttentionBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  for (const Linear* l : {&q_proj_, &k_proj_, &v_proj_, &o_proj_}) visit(*l);
}

}  // namespace lockstep
