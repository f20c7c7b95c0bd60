#include "models/nemotron_h/moe_block.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/pointwise/pointwise.h"
#include "models/layers/experts.h"

namespace lockstep {
namespace nemotron_h {
absl::StatusOr<std::unique_ptr<Block>> MoeBlock::Load(const BlockLoader& loader, const Config& c,
                                                      const std::string& name) {
  const LinearLoader& linears = loader.linear;
  const std::string cls = "moe";
  auto m = std::make_unique<MoeBlock>();
  RouterParams& r = m->router_;
  r.score = RouterScore::kSigmoid;
  r.num_experts = c.num_experts;
  r.top_k = c.experts_per_token;
  r.normalize = c.normalize_weights;
  r.normalize_floor = 1e-20f;
  r.scaling_factor = c.routed_scale;
  r.num_groups = c.router_groups;
  r.top_groups = c.router_top_groups;
  RETURN_IF_ERROR(ValidateRouter(r));
  m->hidden_size_ = c.hidden_size;
  m->latent_ = c.latent_size > 0;
  m->expert_width_ = m->latent_ ? c.latent_size : c.hidden_size;
  m->local_shards_ = MoeShards(c, c.expert_size).count / linears.store->world();

  ASSIGN_OR_RETURN(m->gate_,
                   Linear::ColumnParallel(linears, name + "gate", "router", c.num_experts,
                                          c.hidden_size, ShardSpec::Replicated(c.num_experts)));
  ASSIGN_OR_RETURN(
      m->bias_, linears.store->PlaceTensor(name + "gate.e_score_correction_bias", {c.num_experts},
                                           ShardSpec::Replicated(c.num_experts), "router"));
  if (m->latent_) {
    ASSIGN_OR_RETURN(m->fc1_,
                     Linear::ColumnParallel(linears, name + "fc1_latent_proj", cls, c.latent_size,
                                            c.hidden_size, ShardSpec::Replicated(c.latent_size)));
    ASSIGN_OR_RETURN(m->fc2_,
                     Linear::ColumnParallel(linears, name + "fc2_latent_proj", cls, c.hidden_size,
                                            c.latent_size, ShardSpec::Replicated(c.hidden_size)));
  }
  const Relu2MlpConfig expert = {m->expert_width_, c.expert_size, MoeShards(c, c.expert_size), cls};
  for (int64_t e = 0; e < c.num_experts; ++e) {
    ASSIGN_OR_RETURN(Relu2Mlp mlp,
                     Relu2Mlp::Load(linears, expert, absl::StrCat(name, "experts.", e, ".")));
    m->experts_.push_back(std::move(mlp));
  }
  if (c.shared_size > 0) {
    const Relu2MlpConfig shared = {c.hidden_size, c.shared_size, MoeShards(c, c.shared_size), cls};
    ASSIGN_OR_RETURN(Relu2Mlp mlp, Relu2Mlp::Load(linears, shared, name + "shared_experts."));
    m->shared_ = std::make_unique<Relu2Mlp>(std::move(mlp));
  }
  return std::unique_ptr<Block>(std::move(m));
}

absl::Status MoeBlock::ApplyRows(ExecContext* ctx, ConstTensorView u, TensorView part) const {
  const int64_t tokens = u.rows(), top_k = router_.top_k;
  Workspace* ws = ctx->workspace;
  TensorView logits = ws->Take(DType::kF32, {tokens, router_.num_experts});
  TensorView ids = ws->Take(DType::kI32, {tokens, top_k});
  TensorView weights = ws->Take(DType::kF32, {tokens, top_k});
  const ExpertPlan plan = ExpertPlan::Take(ws, tokens, router_.num_experts, top_k);
  LinearInput input(u);
  RETURN_IF_ERROR(gate_.Apply(ctx, &input, logits));
  RETURN_IF_ERROR(Route(ctx, logits, bias_, router_, ids, weights));
  RETURN_IF_ERROR(PlanExperts(ctx, ids, plan));
  ConstTensorView x = u;
  if (latent_) {
    TensorView projected = ws->Take(u.dtype, {tokens, expert_width_});
    RETURN_IF_ERROR(fc1_.Apply(ctx, &input, projected));
    x = projected;
  }
  TensorView routed = ws->Take(DType::kF32, {local_shards_, tokens * top_k, expert_width_});
  RETURN_IF_ERROR(ForEachExpert(ctx, plan, x, routed,
                                [&](size_t expert, ConstTensorView rows, TensorView sums) {
                                  return experts_[expert].ApplyShards(ctx, rows, sums);
                                }));
  if (latent_) {
    RETURN_IF_ERROR(
        CombineExperts(ctx, plan, weights, routed, {}, {}, part.Columns(0, expert_width_)));
    return shared_ == nullptr
               ? absl::OkStatus()
               : shared_->Apply(ctx, nullptr, u, part.Columns(expert_width_, hidden_size_));
  }
  TensorView shared;
  if (shared_ != nullptr) {
    shared = ws->Take(DType::kF32, {local_shards_, tokens, hidden_size_});
    RETURN_IF_ERROR(shared_->ApplyShards(ctx, u, shared));
  }
  return CombineExperts(ctx, plan, weights, routed, shared, {}, part);
}

absl::Status MoeBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                             const CacheViews&, ConstTensorView u, TensorView sum) const {
  const int64_t tokens = batch.num_tokens;
  const int64_t shared_width = latent_ && shared_ != nullptr ? hidden_size_ : 0;
  TensorView part = sum;
  if (latent_) part = ctx->workspace->Take(DType::kF32, {tokens, expert_width_ + shared_width});
  for (int64_t begin = 0; begin < tokens; begin += kMoeRows) {
    const int64_t rows = std::min(kMoeRows, tokens - begin);
    Workspace::Scope scope(ctx->workspace);
    RETURN_IF_ERROR(ApplyRows(ctx, u.Rows(begin, rows), part.Rows(begin, rows)));
  }
  if (comm != nullptr && comm->size() > 1) RETURN_IF_ERROR(comm->AllReduce(ctx, part));
  if (!latent_) return absl::OkStatus();
  LinearInput latent(part.Columns(0, expert_width_));
  RETURN_IF_ERROR(fc2_.Apply(ctx, &latent, sum));
  if (shared_width == 0) return absl::OkStatus();
  return AddResidual(ctx, sum, part.Columns(expert_width_, shared_width));
}

void MoeBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  visit(gate_);
  if (latent_) {
    visit(fc1_);
    visit(fc2_);
  }
  for (const Relu2Mlp& expert : experts_) expert.ForEachLinear(visit);
  if (shared_ != nullptr) shared_->ForEachLinear(visit);
}

}  // namespace nemotron_h
}  // namespace lockstep
