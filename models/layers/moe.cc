#include "models/layers/moe.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/layers/experts.h"

namespace lockstep {
int64_t MoeConfig::num_virtual_shards() const {
  return std::min(VirtualShardsOf(expert_size).count, VirtualShardsOf(shared_size).count);
}

absl::StatusOr<MoeConfig> ReadMoe(const ModelConfig& model) {
  RETURN_IF_ERROR(CheckSiluMlp(model));
  MoeConfig c;
  c.hidden_size = model.hidden_size;
  const struct {
    const char* key;
    int64_t* value;
  } rows[] = {{"num_experts", &c.router.num_experts},
              {"num_experts_per_tok", &c.router.top_k},
              {"moe_intermediate_size", &c.expert_size},
              {"shared_expert_intermediate_size", &c.shared_size}};
  for (const auto& row : rows) {
    ASSIGN_OR_RETURN(*row.value, model.Int(row.key));
    RETURN_IF_ERROR(model.CheckSize(row.key, *row.value));
  }
  c.router.score = RouterScore::kSoftmax;
  c.router.normalize = model.BoolOr("norm_topk_prob", true);
  if (c.router.top_k > c.router.num_experts) {
    return model.Refuse(absl::StrCat("num_experts_per_tok ", c.router.top_k,
                                     " is more than num_experts ", c.router.num_experts));
  }
  return c;
}

void AddMoeRules(const MoeConfig& c, TpRules* rules) {
  const int64_t v = c.num_virtual_shards();
  rules->RowParallel("mlp.experts.*.down_proj", c.expert_size, {v, c.expert_size / v});
  rules->RowParallel("mlp.shared_expert.down_proj", c.shared_size, {v, c.shared_size / v});
}

absl::StatusOr<std::unique_ptr<Block>> MoeBlock::Load(const BlockLoader& block_loader,
                                                      const MoeConfig& c, const std::string& name) {
  const LinearLoader& loader = block_loader.linear;
  auto m = std::make_unique<MoeBlock>();
  m->config_ = c;
  const int64_t hidden = c.hidden_size, count = c.router.num_experts;
  const int64_t v = c.num_virtual_shards();
  ASSIGN_OR_RETURN(m->gate_, Linear::ColumnParallel(loader, name + "gate", "router", count, hidden,
                                                    ShardSpec::Replicated(count)));
  ASSIGN_OR_RETURN(m->shared_gate_,
                   Linear::ColumnParallel(loader, name + "shared_expert_gate", "router", 1, hidden,
                                          ShardSpec::Replicated(1)));
  const GatedMlpConfig shared = {hidden, c.shared_size, {v, c.shared_size / v}, "shared_expert"};
  ASSIGN_OR_RETURN(m->shared_, GatedMlp::Load(loader, shared, name + "shared_expert."));
  const GatedMlpConfig expert = {hidden, c.expert_size, {v, c.expert_size / v}, "experts"};
  const std::string experts = name + "experts.";
  const bool stacked = loader.store->checkpoint().Find(experts + "gate_up_proj") != nullptr;
  for (int64_t e = 0; e < count; ++e) {
    const std::string one = absl::StrCat(experts, e, ".");
    GatedMlp mlp;
    if (stacked) {
      ASSIGN_OR_RETURN(mlp, GatedMlp::LoadStacked(loader, expert, experts, e, count, one));
    } else {
      ASSIGN_OR_RETURN(mlp, GatedMlp::Load(loader, expert, one));
    }
    m->experts_.push_back(std::move(mlp));
  }
  return std::unique_ptr<Block>(std::move(m));
}

absl::Status MoeBlock::ApplyRows(ExecContext* ctx, ConstTensorView u, TensorView sum) const {
  const RouterParams& router = config_.router;
  const int64_t tokens = u.rows(), hidden = config_.hidden_size;
  const int64_t shards = shared_.down_proj().resident().shard().local_shards();
  Workspace* ws = ctx->workspace;
  TensorView logits = ws->Take(DType::kF32, {tokens, router.num_experts});
  TensorView shared_gate = ws->Take(DType::kF32, {tokens, 1});
  TensorView ids = ws->Take(DType::kI32, {tokens, router.top_k});
  TensorView weights = ws->Take(DType::kF32, {tokens, router.top_k});
  const ExpertPlan plan = ExpertPlan::Take(ws, tokens, router.num_experts, router.top_k);
  TensorView routed = ws->Take(DType::kF32, {shards, tokens * router.top_k, hidden});
  TensorView shared = ws->Take(DType::kF32, {shards, tokens, hidden});
  LinearInput input(u);
  RETURN_IF_ERROR(gate_.Apply(ctx, &input, logits));
  RETURN_IF_ERROR(shared_gate_.Apply(ctx, &input, shared_gate));
  RETURN_IF_ERROR(Route(ctx, logits, {}, router, ids, weights));
  RETURN_IF_ERROR(PlanExperts(ctx, ids, plan));
  RETURN_IF_ERROR(
      ForEachExpert(ctx, plan, u, routed, [&](size_t expert, ConstTensorView x, TensorView sums) {
        return experts_[expert].ApplyShards(ctx, x, sums);
      }));
  RETURN_IF_ERROR(shared_.ApplyShards(ctx, u, shared));
  return CombineExperts(ctx, plan, weights, routed, shared, shared_gate, sum);
}

absl::Status MoeBlock::Apply(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                             const CacheViews&, ConstTensorView u, TensorView sum) const {
  for (int64_t begin = 0; begin < batch.num_tokens; begin += kMoeRows) {
    const int64_t rows = std::min(kMoeRows, batch.num_tokens - begin);
    Workspace::Scope scope(ctx->workspace);
    RETURN_IF_ERROR(ApplyRows(ctx, u.Rows(begin, rows), sum.Rows(begin, rows)));
  }
  if (comm == nullptr || comm->size() == 1) return absl::OkStatus();
  return comm->AllReduce(ctx, sum);
}

void MoeBlock::ForEachLinear(const std::function<void(const Linear&)>& visit) const {
  visit(gate_);
  visit(shared_gate_);
  shared_.ForEachLinear(visit);
  for (const GatedMlp& expert : experts_) expert.ForEachLinear(visit);
}

}  // namespace lockstep
