#include "models/qwen3_5/qwen3_5.h"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention/attention.h"
#include "kernels/base/status_macros.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/rows/rows.h"
#include "models/layers/linear.h"
#include "models/layers/vocab.h"
#include "models/qwen3_5/config.h"

namespace lockstep {
namespace qwen3_5 {
namespace {

struct AttentionLayer {
  Linear q_proj, k_proj, v_proj, o_proj;  // q_proj rows: per head [q | gate]
  TensorView q_norm, k_norm;
  int kv_layer = 0;  // index in CacheSpec::kv_layers
};

struct DeltaNetLayer {
  Linear in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj;
  TensorView conv, a_log, dt_bias, norm;
  int first_slot_tensor = 0;  // conv, state, ring_k, ring_d, ring_g
};

struct Layer {
  LayerType type = LayerType::kFullAttention;
  TensorView input_norm, post_norm;
  AttentionLayer attention;
  DeltaNetLayer delta_net;
  Linear gate_proj, up_proj, down_proj;
};

constexpr char kPrefixes[][24] = {"model.language_model.", "language_model.model.", "model."};

// Releases differ in the prefix of the text part: "model.layers.0..." names the same module in all.
std::string WithoutPrefix(const std::string& module) {
  for (const char* prefix : kPrefixes) {
    if (absl::StartsWith(module, prefix)) return module.substr(std::string(prefix).size());
  }
  return module;
}

class Qwen35 : public Model {
 public:
  Qwen35(const Config& config, const ModelOptions& options, int world)
      : config_(config), options_(options), world_(world) {}

  absl::Status LoadWeights(const SchemeResolver& resolver, WeightStore* store);

  const CacheSpec& cache_spec() const override { return cache_spec_; }
  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t local_vocab_rows() const override { return head_.shard().rows_per_rank; }
  absl::Status Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                       const CacheViews& caches, TensorView logits) const override;
  const Linear* FindLinear(const std::string& module) const override;

 private:
  absl::Status LoadAttention(const LinearLoader& loader, const std::string& name, Layer* layer);
  absl::Status LoadDeltaNet(const LinearLoader& loader, const std::string& name, Layer* layer);
  absl::Status LoadMlp(const LinearLoader& loader, const std::string& name, Layer* layer);
  absl::Status MakeRope(DeviceType device);
  void AddLinear(const Linear& linear) {
    linears_[WithoutPrefix(linear.resident().shard().module)] = &linear;
  }

  absl::Status Attention(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                         const CacheViews& caches, const AttentionLayer& layer, ConstTensorView u,
                         TensorView sum) const;
  absl::Status DeltaNet(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                        const CacheViews& caches, const DeltaNetLayer& layer, ConstTensorView u,
                        TensorView sum) const;
  absl::Status Mlp(ExecContext* ctx, CommGroup* comm, const Layer& layer, ConstTensorView u,
                   TensorView sum) const;

  int64_t LocalQHeads() const { return config_.num_q_heads / world_; }
  int64_t LocalKvHeads() const { return std::max<int64_t>(1, config_.num_kv_heads / world_); }
  RmsNormParams Norm() const { return {config_.norm_eps, 1.0f}; }
  AttentionParams AttentionParamsOf() const;
  DeltaNetParams DeltaNetParamsOf() const;

  const Config config_;
  const ModelOptions options_;
  const int world_;
  CacheSpec cache_spec_;
  VocabEmbedding embedding_;
  VocabHead head_;
  TensorView final_norm_;
  DeviceBuffer inv_freq_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::map<std::string, const Linear*> linears_;
};

AttentionParams Qwen35::AttentionParamsOf() const {
  AttentionParams p;
  p.num_q_heads = LocalQHeads();
  p.num_kv_heads = LocalKvHeads();
  p.head_dim = config_.head_dim;
  p.rotary_dim = config_.rotary_dim;
  p.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  p.output_gate = config_.output_gate;
  p.qk_norm = true;
  p.norm_eps = config_.norm_eps;
  p.norm_weight_offset = 1.0f;
  return p;
}

DeltaNetParams Qwen35::DeltaNetParamsOf() const {
  DeltaNetParams p;
  p.num_k_heads = config_.num_k_heads / world_;
  p.num_v_heads = config_.num_v_heads / world_;
  p.k_dim = config_.k_dim;
  p.v_dim = config_.v_dim;
  p.norm_eps = config_.norm_eps;
  p.output_gate = config_.gdn_gate;
  return p;
}

// ---- weights
// -------------------------------------------------------------------------------------

absl::Status Qwen35::LoadAttention(const LinearLoader& loader, const std::string& name,
                                   Layer* layer) {
  AttentionLayer& a = layer->attention;
  const Config& c = config_;
  const int64_t q_rows = c.head_dim * (c.output_gate ? 2 : 1);
  const std::string cls = "attention";
  const ShardSpec q_heads = ShardSpec::Split(c.num_q_heads, q_rows);
  const ShardSpec kv_heads = ShardSpec::Split({{c.num_kv_heads, c.head_dim, true}});
  ASSIGN_OR_RETURN(a.q_proj,
                   Linear::ColumnParallel(loader, name + "q_proj", cls, c.num_q_heads * q_rows,
                                          c.hidden_size, q_heads));
  ASSIGN_OR_RETURN(a.k_proj,
                   Linear::ColumnParallel(loader, name + "k_proj", cls, c.num_kv_heads * c.head_dim,
                                          c.hidden_size, kv_heads));
  ASSIGN_OR_RETURN(a.v_proj,
                   Linear::ColumnParallel(loader, name + "v_proj", cls, c.num_kv_heads * c.head_dim,
                                          c.hidden_size, kv_heads));
  ASSIGN_OR_RETURN(a.o_proj, Linear::RowParallel(loader, name + "o_proj", cls, c.hidden_size,
                                                 c.num_q_heads * c.head_dim));
  const ShardSpec whole = ShardSpec::Replicated(c.head_dim);
  ASSIGN_OR_RETURN(a.q_norm,
                   loader.store->PlaceTensor(name + "q_norm.weight", {c.head_dim}, whole, "norm"));
  ASSIGN_OR_RETURN(a.k_norm,
                   loader.store->PlaceTensor(name + "k_norm.weight", {c.head_dim}, whole, "norm"));
  for (const Linear* l : {&a.q_proj, &a.k_proj, &a.v_proj, &a.o_proj}) AddLinear(*l);
  a.kv_layer = static_cast<int>(cache_spec_.kv_layers.size());
  cache_spec_.kv_layers.push_back({LocalKvHeads(), c.head_dim});
  return absl::OkStatus();
}

absl::Status Qwen35::LoadDeltaNet(const LinearLoader& loader, const std::string& name,
                                  Layer* layer) {
  DeltaNetLayer& g = layer->delta_net;
  const Config& c = config_;
  const std::string cls = "delta_net";
  const int64_t channels = 2 * c.num_k_heads * c.k_dim + c.num_v_heads * c.v_dim;
  const int64_t v_rows = c.num_v_heads * c.v_dim;
  const ShardSpec qkv = ShardSpec::Split(
      {{c.num_k_heads, c.k_dim}, {c.num_k_heads, c.k_dim}, {c.num_v_heads, c.v_dim}});
  const ShardSpec v_dims = ShardSpec::Split(c.num_v_heads, c.v_dim);
  const ShardSpec v_heads = ShardSpec::Split(c.num_v_heads, 1);
  ASSIGN_OR_RETURN(g.in_proj_qkv, Linear::ColumnParallel(loader, name + "in_proj_qkv", cls,
                                                         channels, c.hidden_size, qkv));
  ASSIGN_OR_RETURN(g.in_proj_z, Linear::ColumnParallel(loader, name + "in_proj_z", cls, v_rows,
                                                       c.hidden_size, v_dims));
  ASSIGN_OR_RETURN(g.in_proj_b, Linear::ColumnParallel(loader, name + "in_proj_b", cls,
                                                       c.num_v_heads, c.hidden_size, v_heads));
  ASSIGN_OR_RETURN(g.in_proj_a, Linear::ColumnParallel(loader, name + "in_proj_a", cls,
                                                       c.num_v_heads, c.hidden_size, v_heads));
  ASSIGN_OR_RETURN(g.out_proj,
                   Linear::RowParallel(loader, name + "out_proj", cls, c.hidden_size, v_rows));
  WeightStore* store = loader.store;
  ASSIGN_OR_RETURN(
      g.conv, store->PlaceTensor(name + "conv1d.weight", {channels, 1, c.conv_width}, qkv, cls));
  ASSIGN_OR_RETURN(g.a_log, store->PlaceTensor(name + "A_log", {c.num_v_heads}, v_heads, cls));
  ASSIGN_OR_RETURN(g.dt_bias, store->PlaceTensor(name + "dt_bias", {c.num_v_heads}, v_heads, cls));
  ASSIGN_OR_RETURN(g.norm, store->PlaceTensor(name + "norm.weight", {c.v_dim},
                                              ShardSpec::Replicated(c.v_dim), "norm"));
  for (const Linear* l : {&g.in_proj_qkv, &g.in_proj_z, &g.in_proj_b, &g.in_proj_a, &g.out_proj}) {
    AddLinear(*l);
  }
  const DeltaNetParams p = DeltaNetParamsOf();
  const DType act = options_.activation_dtype;
  g.first_slot_tensor = static_cast<int>(cache_spec_.slot_tensors.size());
  auto& slots = cache_spec_.slot_tensors;
  slots.push_back({name + "conv", act, {c.conv_width - 1, p.conv_channels()}, true});
  slots.push_back({name + "state", DType::kF32, {p.num_v_heads, p.v_dim, p.k_dim}, true});
  slots.push_back({name + "ring_k", DType::kF32, {kGrid, p.num_k_heads * p.k_dim}, false});
  slots.push_back({name + "ring_d", DType::kF32, {kGrid, p.num_v_heads * p.v_dim}, false});
  slots.push_back({name + "ring_g", DType::kF32, {kGrid, p.num_v_heads}, false});
  return absl::OkStatus();
}

absl::Status Qwen35::LoadMlp(const LinearLoader& loader, const std::string& name, Layer* layer) {
  const int64_t inner = config_.intermediate_size, hidden = config_.hidden_size;
  const ShardSpec rows = ShardSpec::Split(inner, 1);
  ASSIGN_OR_RETURN(layer->gate_proj,
                   Linear::ColumnParallel(loader, name + "gate_proj", "mlp", inner, hidden, rows));
  ASSIGN_OR_RETURN(layer->up_proj,
                   Linear::ColumnParallel(loader, name + "up_proj", "mlp", inner, hidden, rows));
  ASSIGN_OR_RETURN(layer->down_proj,
                   Linear::RowParallel(loader, name + "down_proj", "mlp", hidden, inner));
  for (const Linear* l : {&layer->gate_proj, &layer->up_proj, &layer->down_proj}) AddLinear(*l);
  return absl::OkStatus();
}

absl::Status Qwen35::MakeRope(DeviceType device) {
  const int64_t half = config_.rotary_dim / 2;
  ASSIGN_OR_RETURN(inv_freq_, DeviceBuffer::Allocate(device, half * 4));
  float* table = static_cast<float*>(inv_freq_.data());
  for (int64_t i = 0; i < half; ++i) {
    table[i] = static_cast<float>(
        std::pow(config_.rope_theta,
                 -2.0 * static_cast<double>(i) / static_cast<double>(config_.rotary_dim)));
  }
  return absl::OkStatus();
}

// Tensors of a release that the text model has no use for.
bool IsUnusedByText(const std::string& name) {
  for (absl::string_view prefix : {"model.visual.", "visual.", "mtp.", "model.mtp."}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  for (absl::string_view suffix :
       {".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".input_scale", ".input_global_scale"}) {
    if (absl::EndsWith(name, suffix)) return true;
  }
  return false;
}

absl::Status Qwen35::LoadWeights(const SchemeResolver& resolver, WeightStore* store) {
  cache_spec_.kv_dtype = options_.activation_dtype;
  const LinearLoader loader = {store, &resolver, options_.activation_quant};
  std::string prefix;
  for (const char* candidate : kPrefixes) {
    if (store->checkpoint().Find(absl::StrCat(candidate, "embed_tokens.weight")) != nullptr) {
      prefix = candidate;
      break;
    }
  }
  if (prefix.empty()) {
    return absl::DataLossError(absl::StrCat(
        "CHECKPOINT_INVALID: ", store->checkpoint().directory(),
        ": no embed_tokens.weight under model.language_model., language_model.model. or model."));
  }
  const int64_t vocab = config_.vocab_size, hidden = config_.hidden_size;
  if (config_.tied_head) {
    ASSIGN_OR_RETURN(head_, VocabHead::Load(loader, prefix + "embed_tokens", vocab, hidden));
    embedding_ = VocabEmbedding::Tied(&head_);
    store->Allow([](const std::string& name) { return absl::EndsWith(name, "lm_head.weight"); });
  } else {
    ASSIGN_OR_RETURN(embedding_,
                     VocabEmbedding::Load(store, prefix + "embed_tokens.weight", vocab, hidden));
    const std::string head =
        prefix == "language_model.model." ? "language_model.lm_head" : "lm_head";
    ASSIGN_OR_RETURN(head_, VocabHead::Load(loader, head, vocab, hidden));
  }
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    auto layer = std::make_unique<Layer>();
    layer->type = config_.layers[static_cast<size_t>(l)];
    const std::string name = absl::StrCat(prefix, "layers.", l, ".");
    const ShardSpec whole = ShardSpec::Replicated(hidden);
    ASSIGN_OR_RETURN(layer->input_norm,
                     store->PlaceTensor(name + "input_layernorm.weight", {hidden}, whole, "norm"));
    ASSIGN_OR_RETURN(layer->post_norm, store->PlaceTensor(name + "post_attention_layernorm.weight",
                                                          {hidden}, whole, "norm"));
    if (layer->type == LayerType::kFullAttention) {
      RETURN_IF_ERROR(LoadAttention(loader, name + "self_attn.", layer.get()));
    } else {
      RETURN_IF_ERROR(LoadDeltaNet(loader, name + "linear_attn.", layer.get()));
    }
    RETURN_IF_ERROR(LoadMlp(loader, name + "mlp.", layer.get()));
    layers_.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(final_norm_, store->PlaceTensor(prefix + "norm.weight", {hidden},
                                                   ShardSpec::Replicated(hidden), "norm"));
  if (head_.shard().rows > 0) AddLinear(head_.linear());
  RETURN_IF_ERROR(MakeRope(store->device()));
  store->Allow(IsUnusedByText);
  return store->CheckLeftovers();
}

// ---- forward
// -------------------------------------------------------------------------------------

absl::Status Qwen35::Attention(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                               const CacheViews& caches, const AttentionLayer& layer,
                               ConstTensorView u, TensorView sum) const {
  const AttentionParams p = AttentionParamsOf();
  const DType act = options_.activation_dtype;
  const int64_t tokens = batch.num_tokens, width = p.num_q_heads * p.head_dim;
  Workspace* ws = ctx->workspace;
  TensorView qg = ws->Take(act, {tokens, layer.q_proj.local_n()});
  TensorView k = ws->Take(act, {tokens, p.num_kv_heads * p.head_dim});
  TensorView v = ws->Take(act, {tokens, p.num_kv_heads * p.head_dim});
  TensorView q = ws->Take(act, {tokens, width});
  TensorView attended = ws->Take(act, {tokens, width});
  LinearInput input(u);
  RETURN_IF_ERROR(layer.q_proj.Apply(ctx, &input, qg));
  RETURN_IF_ERROR(layer.k_proj.Apply(ctx, &input, k));
  RETURN_IF_ERROR(layer.v_proj.Apply(ctx, &input, v));
  const KvCacheView& cache = caches.kv_layers[static_cast<size_t>(layer.kv_layer)];
  RETURN_IF_ERROR(RopeAndCacheWrite(ctx, batch, p, qg, k, v, layer.q_norm, layer.k_norm,
                                    inv_freq_.View(DType::kF32, {config_.rotary_dim / 2}), cache,
                                    q));
  RETURN_IF_ERROR(PagedAttention(ctx, batch, p, q, qg, cache, attended));
  LinearInput attended_input(attended);
  return layer.o_proj.ApplyReduce(ctx, comm, &attended_input, sum);
}

absl::Status Qwen35::DeltaNet(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                              const CacheViews& caches, const DeltaNetLayer& layer,
                              ConstTensorView u, TensorView sum) const {
  const DeltaNetParams p = DeltaNetParamsOf();
  const DType act = options_.activation_dtype;
  const int64_t tokens = batch.num_tokens;
  const size_t slot = static_cast<size_t>(layer.first_slot_tensor);
  const ConvState conv = {caches.slot_tensors[slot], caches.snapshot_tensors[slot]};
  const DeltaNetState state = {caches.slot_tensors[slot + 1], caches.slot_tensors[slot + 2],
                               caches.slot_tensors[slot + 3], caches.slot_tensors[slot + 4],
                               caches.snapshot_tensors[slot + 1]};
  Workspace* ws = ctx->workspace;
  TensorView mixed = ws->Take(act, {tokens, p.conv_channels()});
  TensorView convolved = ws->Take(act, {tokens, p.conv_channels()});
  TensorView z = ws->Take(act, {tokens, p.num_v_heads * p.v_dim});
  TensorView b = ws->Take(act, {tokens, p.num_v_heads});
  TensorView a = ws->Take(act, {tokens, p.num_v_heads});
  TensorView o = ws->Take(act, {tokens, p.num_v_heads * p.v_dim});
  LinearInput input(u);
  RETURN_IF_ERROR(layer.in_proj_qkv.Apply(ctx, &input, mixed));
  RETURN_IF_ERROR(layer.in_proj_z.Apply(ctx, &input, z));
  RETURN_IF_ERROR(layer.in_proj_b.Apply(ctx, &input, b));
  RETURN_IF_ERROR(layer.in_proj_a.Apply(ctx, &input, a));
  RETURN_IF_ERROR(CausalConv(ctx, batch, mixed, layer.conv, {}, conv, convolved));
  RETURN_IF_ERROR(GatedDeltaNet(ctx, batch, p, convolved, z, b, a, layer.a_log, layer.dt_bias,
                                layer.norm, state, o));
  LinearInput output_input(o);
  return layer.out_proj.ApplyReduce(ctx, comm, &output_input, sum);
}

absl::Status Qwen35::Mlp(ExecContext* ctx, CommGroup* comm, const Layer& layer, ConstTensorView u,
                         TensorView sum) const {
  const int64_t tokens = u.rows(), inner = layer.gate_proj.local_n();
  Workspace* ws = ctx->workspace;
  TensorView gate = ws->Take(DType::kF32, {tokens, inner});
  TensorView up = ws->Take(DType::kF32, {tokens, inner});
  TensorView act = ws->Take(options_.activation_dtype, {tokens, inner});
  LinearInput input(u);
  RETURN_IF_ERROR(layer.gate_proj.Apply(ctx, &input, gate));
  RETURN_IF_ERROR(layer.up_proj.Apply(ctx, &input, up));
  RETURN_IF_ERROR(SwiGlu(ctx, gate, up, act));
  LinearInput act_input(act);
  return layer.down_proj.ApplyReduce(ctx, comm, &act_input, sum);
}

absl::Status Qwen35::Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                             const CacheViews& caches, TensorView logits) const {
  const int64_t tokens = batch.num_tokens, hidden = config_.hidden_size;
  const DType act = options_.activation_dtype;
  Workspace::Scope step(ctx->workspace);
  TensorView h = ctx->workspace->Take(act, {tokens, hidden});
  TensorView u = ctx->workspace->Take(act, {tokens, hidden});
  TensorView sum = ctx->workspace->Take(DType::kF32, {tokens, hidden});
  RETURN_IF_ERROR(embedding_.Apply(ctx, comm, batch.tokens, h));
  RETURN_IF_ERROR(RmsNorm(ctx, h, layers_[0]->input_norm, Norm(), u));
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = *layers_[l];
    {
      Workspace::Scope scope(ctx->workspace);
      if (layer.type == LayerType::kFullAttention) {
        RETURN_IF_ERROR(Attention(ctx, comm, batch, caches, layer.attention, u, sum));
      } else {
        RETURN_IF_ERROR(DeltaNet(ctx, comm, batch, caches, layer.delta_net, u, sum));
      }
    }
    RETURN_IF_ERROR(AddRmsNorm(ctx, h, sum, layer.post_norm, Norm(), u));
    {
      Workspace::Scope scope(ctx->workspace);
      RETURN_IF_ERROR(Mlp(ctx, comm, layer, u, sum));
    }
    const TensorView next = l + 1 < layers_.size() ? layers_[l + 1]->input_norm : final_norm_;
    RETURN_IF_ERROR(AddRmsNorm(ctx, h, sum, next, Norm(), u));
  }
  if (batch.num_logits == 0) return absl::OkStatus();
  TensorView selected = ctx->workspace->Take(act, {batch.num_logits, hidden});
  RETURN_IF_ERROR(GatherRows(ctx, u, batch.logit_rows, selected));
  return head_.Apply(ctx, selected, logits);
}

const Linear* Qwen35::FindLinear(const std::string& module) const {
  const auto it = linears_.find(WithoutPrefix(module));
  return it == linears_.end() ? nullptr : it->second;
}

}  // namespace

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  return LegalTp(c);
}

absl::StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config, const ModelOptions& options,
                                            const SchemeResolver& resolver, WeightStore* store) {
  ASSIGN_OR_RETURN(const Config c, ReadConfig(config));
  RETURN_IF_ERROR(LegalTp(c).Check(store->world()));
  auto model = std::make_unique<Qwen35>(c, options, store->world());
  RETURN_IF_ERROR(model->LoadWeights(resolver, store));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace qwen3_5
}  // namespace lockstep
