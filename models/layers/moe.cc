#include "models/layers/moe.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/rows.h"

namespace lockstep {
namespace {

// Rows computed at a time: bounds the workspace, in which every row has top_k outputs per shard.
constexpr int64_t kMoeRows = 64;

}  // namespace

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

absl::Status MoeBlock::ApplyExperts(ExecContext* ctx, const ExpertPlan& plan, ConstTensorView u,
                                    TensorView routed) const {
  const int64_t rows = routed.shape[1], hidden = config_.hidden_size;
  TensorView sorted = ctx->workspace->Take(u.dtype, {rows, hidden});
  RETURN_IF_ERROR(GatherRows(ctx, u, plan.tokens, sorted));
  for (int64_t e = 0; e < config_.router.num_experts; ++e) {
    // Sizing the workspace, an expert has a row of every token: it cannot have more.
    int64_t begin = 0, end = u.rows();
    if (!ctx->dry_run()) {
      begin = plan.offsets.row<int32_t>(e)[0];
      end = plan.offsets.row<int32_t>(e + 1)[0];
    }
    if (begin == end) continue;
    TensorView out = routed;
    out.data = static_cast<float*>(routed.data) + begin * hidden;
    out.shape = {routed.shape[0], end - begin, hidden};
    Workspace::Scope scope(ctx->workspace);
    RETURN_IF_ERROR(
        experts_[static_cast<size_t>(e)].ApplyShards(ctx, sorted.Rows(begin, end - begin), out));
  }
  return absl::OkStatus();
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
  RETURN_IF_ERROR(ApplyExperts(ctx, plan, u, routed));
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
