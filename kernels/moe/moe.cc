// The CPU arm of the ops around expert products.
#include "kernels/moe/moe.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

constexpr int64_t kMaxShards = 8;
constexpr int64_t kColumns = 256;  // of one task of CombineExperts

bool IsAbsent(const ConstTensorView& view) { return view.shape.rank() == 0; }

absl::Status NeedsCpu(const ExecContext& ctx, const char* op) {
  if (ctx.device == DeviceType::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(op, ": this build has an arm for the cpu only"));
}

// ---- router

// Scores and selection scores of one token, and the marks of the experts already taken.
struct Scores {
  std::vector<float> score;
  std::vector<float> selection;
  std::vector<char> barred;
};

void Score(const float* logits, const RouterParams& p, Scores* s) {
  const int64_t n = p.num_experts;
  if (p.score == RouterScore::kSigmoid) {
    for (int64_t e = 0; e < n; ++e) s->score[e] = Sigmoid(logits[e]);
    return;
  }
  const float top = *std::max_element(logits, logits + n);
  float sum = 0.0f;
  for (int64_t e = 0; e < n; ++e) {
    s->score[e] = Exp(logits[e] - top);
    sum += s->score[e];
  }
  for (int64_t e = 0; e < n; ++e) s->score[e] /= sum;
}

// The index in [begin, end) with the largest value that is not barred, the lowest of equals; -1
// when all are barred. A NaN counts as smaller than everything.
int64_t Best(const std::vector<float>& values, const std::vector<char>& barred, int64_t begin,
             int64_t end) {
  int64_t best = -1;
  for (int64_t i = begin; i < end; ++i) {
    if (barred[i]) continue;
    if (best < 0 || values[i] > values[best] ||
        (values[best] != values[best] && values[i] == values[i])) {
      best = i;
    }
  }
  return best;
}

// Bars the experts outside of the best groups.
void LimitGroups(const RouterParams& p, Scores* s) {
  if (p.num_groups == p.top_groups) return;
  const int64_t size = p.num_experts / p.num_groups;
  std::vector<float> sums(static_cast<size_t>(p.num_groups));
  for (int64_t g = 0; g < p.num_groups; ++g) {
    const int64_t first = Best(s->selection, s->barred, g * size, (g + 1) * size);
    s->barred[first] = 1;
    const int64_t second = Best(s->selection, s->barred, g * size, (g + 1) * size);
    s->barred[first] = 0;
    sums[g] = s->selection[first] + (second < 0 ? 0.0f : s->selection[second]);
  }
  std::vector<char> chosen(static_cast<size_t>(p.num_groups), 0);
  for (int64_t i = 0; i < p.top_groups; ++i) chosen[Best(sums, chosen, 0, p.num_groups)] = 1;
  for (int64_t e = 0; e < p.num_experts; ++e) s->barred[e] = !chosen[e / size];
}

void RouteToken(const float* logits, const std::vector<float>& bias, const RouterParams& p,
                Scores* s, int32_t* ids, float* weights) {
  Score(logits, p, s);
  for (int64_t e = 0; e < p.num_experts; ++e) {
    s->selection[e] = bias.empty() ? s->score[e] : s->score[e] + bias[e];
  }
  std::fill(s->barred.begin(), s->barred.end(), char{0});
  LimitGroups(p, s);
  float sum = 0.0f;
  for (int64_t i = 0; i < p.top_k; ++i) {
    const int64_t e = Best(s->selection, s->barred, 0, p.num_experts);
    s->barred[e] = 1;
    ids[i] = static_cast<int32_t>(e);
    weights[i] = s->score[e];
    sum += s->score[e];
  }
  const float divisor = sum + p.normalize_floor;
  for (int64_t i = 0; i < p.top_k; ++i) {
    if (p.normalize && divisor > 0.0f) weights[i] /= divisor;
    weights[i] *= p.scaling_factor;
  }
}

std::vector<float> ReadBias(ConstTensorView bias) {
  std::vector<float> values;
  if (IsAbsent(bias)) return values;
  for (int64_t e = 0; e < bias.shape[0]; ++e) {
    values.push_back(bias.dtype == DType::kBF16 ? ToFloat(static_cast<const BF16*>(bias.data)[e])
                                                : static_cast<const float*>(bias.data)[e]);
  }
  return values;
}

// ---- combine

struct CombineProblem {
  int64_t shards, top_k, rows, tokens, dim;
  const int32_t* positions;
  const float* weights;
  const float* routed;
  const float* shared;  // nullptr: none
  const float* gate;    // nullptr: 1
  float* out;
  int64_t out_stride;
};

// Columns [begin, end) of one token.
void CombineToken(const CombineProblem& p, int64_t t, int64_t begin, int64_t end) {
  float sums[kMaxShards][kColumns];
  const int64_t n = end - begin;
  for (int64_t s = 0; s < p.shards; ++s) {
    float* acc = sums[s];
    std::fill_n(acc, n, 0.0f);
    for (int64_t i = 0; i < p.top_k; ++i) {
      const float w = p.weights[t * p.top_k + i];
      const float* v = p.routed + (s * p.rows + p.positions[t * p.top_k + i]) * p.dim + begin;
      for (int64_t c = 0; c < n; ++c) acc[c] = __builtin_fmaf(w, v[c], acc[c]);
    }
    if (p.shared == nullptr) continue;
    const float g = p.gate == nullptr ? 1.0f : Sigmoid(p.gate[t]);
    const float* v = p.shared + (s * p.tokens + t) * p.dim + begin;
    for (int64_t c = 0; c < n; ++c) acc[c] = __builtin_fmaf(g, v[c], acc[c]);
  }
  for (int64_t width = 1; width < p.shards; width *= 2) {
    for (int64_t s = 0; s + width < p.shards; s += 2 * width) {
      for (int64_t c = 0; c < n; ++c) sums[s][c] += sums[s + width][c];
    }
  }
  std::copy_n(sums[0], n, p.out + t * p.out_stride + begin);
}

}  // namespace

absl::Status ValidateRouter(const RouterParams& p) {
  const auto bad = [](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("router: ", what));
  };
  if (p.num_experts < 1) return bad(absl::StrCat(p.num_experts, " experts, at least 1 is needed"));
  if (p.num_groups < 1 || p.num_experts % p.num_groups != 0) {
    return bad(absl::StrCat(p.num_experts, " experts do not form ", p.num_groups, " groups"));
  }
  if (p.top_groups < 1 || p.top_groups > p.num_groups) {
    return bad(absl::StrCat("the best ", p.top_groups, " of ", p.num_groups, " groups"));
  }
  const int64_t selectable = p.num_experts / p.num_groups * p.top_groups;
  if (p.top_k < 1 || p.top_k > selectable) {
    return bad(absl::StrCat("the best ", p.top_k, " of ", selectable, " experts"));
  }
  return absl::OkStatus();
}

absl::Status Route(ExecContext* ctx, ConstTensorView logits, ConstTensorView bias,
                   const RouterParams& p, TensorView ids, TensorView weights) {
  RETURN_IF_ERROR(ValidateRouter(p));
  RETURN_IF_ERROR(OpCheck(*ctx, "route").Rank("logits", logits, 2).status());
  const int64_t tokens = logits.shape[0];
  OpCheck check(*ctx, "route");
  check.Tensor("logits", logits, {DType::kF32}, {tokens, p.num_experts})
      .Tensor("ids", ids, {DType::kI32}, {tokens, p.top_k})
      .Tensor("weights", weights, {DType::kF32}, {tokens, p.top_k})
      .That(ids.contiguous() && weights.contiguous(), "ids and weights must be contiguous");
  if (!IsAbsent(bias)) check.Tensor("bias", bias, {DType::kF32, DType::kBF16}, {p.num_experts});
  RETURN_IF_ERROR(check.status());
  RETURN_IF_ERROR(NeedsCpu(*ctx, "route"));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  const std::vector<float> bias_values = ReadBias(bias);
  ctx->pool->ParallelFor(tokens, [&](int64_t t) {
    const size_t n = static_cast<size_t>(p.num_experts);
    Scores scores{std::vector<float>(n), std::vector<float>(n), std::vector<char>(n)};
    RouteToken(logits.row<float>(t), bias_values, p, &scores, ids.row<int32_t>(t),
               weights.row<float>(t));
  });
  return absl::OkStatus();
}

ExpertPlan ExpertPlan::Take(Workspace* workspace, int64_t tokens, int64_t num_experts,
                            int64_t top_k) {
  ExpertPlan plan;
  plan.offsets = workspace->Take(DType::kI32, {num_experts + 1});
  plan.tokens = workspace->Take(DType::kI32, {tokens * top_k});
  plan.positions = workspace->Take(DType::kI32, {tokens, top_k});
  return plan;
}

absl::Status PlanExperts(ExecContext* ctx, ConstTensorView ids, const ExpertPlan& plan) {
  RETURN_IF_ERROR(
      OpCheck(*ctx, "plan_experts").Rank("ids", ids, 2).Rank("offsets", plan.offsets, 1).status());
  const int64_t tokens = ids.shape[0], top_k = ids.shape[1], experts = plan.num_experts();
  RETURN_IF_ERROR(OpCheck(*ctx, "plan_experts")
                      .Tensor("ids", ids, {DType::kI32}, {tokens, top_k})
                      .Tensor("offsets", plan.offsets, {DType::kI32}, {experts + 1})
                      .Tensor("tokens", plan.tokens, {DType::kI32}, {tokens * top_k})
                      .Tensor("positions", plan.positions, {DType::kI32}, {tokens, top_k})
                      .That(ids.contiguous(), "ids must be contiguous")
                      .status());
  RETURN_IF_ERROR(NeedsCpu(*ctx, "plan_experts"));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  const int32_t* id = static_cast<const int32_t*>(ids.data);
  int32_t* offsets = static_cast<int32_t*>(plan.offsets.data);
  int32_t* token_of = static_cast<int32_t*>(plan.tokens.data);
  int32_t* positions = static_cast<int32_t*>(plan.positions.data);
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    CHECK(id[i] >= 0 && id[i] < experts) << "expert " << id[i] << " of " << experts << " ";
    offsets[id[i] + 1]++;
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + experts);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    positions[i] = next[static_cast<size_t>(id[i])]++;
    token_of[positions[i]] = static_cast<int32_t>(i / top_k);
  }
  return absl::OkStatus();
}

absl::Status CombineExperts(ExecContext* ctx, const ExpertPlan& plan, ConstTensorView weights,
                            ConstTensorView routed, ConstTensorView shared,
                            ConstTensorView shared_gate, TensorView out) {
  RETURN_IF_ERROR(OpCheck(*ctx, "combine_experts")
                      .Rank("routed", routed, 3)
                      .Rank("weights", weights, 2)
                      .status());
  CombineProblem p;
  p.shards = routed.shape[0];
  p.dim = routed.shape[2];
  p.tokens = weights.shape[0];
  p.top_k = weights.shape[1];
  p.rows = p.tokens * p.top_k;
  OpCheck check(*ctx, "combine_experts");
  check.Tensor("weights", weights, {DType::kF32}, {p.tokens, p.top_k})
      .Tensor("positions", plan.positions, {DType::kI32}, {p.tokens, p.top_k})
      .Tensor("routed", routed, {DType::kF32}, {p.shards, p.rows, p.dim})
      .Tensor("out", out, {DType::kF32}, {p.tokens, p.dim})
      .That(p.shards >= 1 && p.shards <= kMaxShards && (p.shards & (p.shards - 1)) == 0,
            "the number of shards must be 1, 2, 4 or 8")
      .That(weights.contiguous() && routed.contiguous(), "weights and routed must be contiguous");
  if (!IsAbsent(shared)) {
    check.Tensor("shared", shared, {DType::kF32}, {p.shards, p.tokens, p.dim})
        .That(shared.contiguous(), "shared must be contiguous");
  }
  if (!IsAbsent(shared_gate)) {
    check.Tensor("shared_gate", shared_gate, {DType::kF32}, {p.tokens, 1})
        .That(shared_gate.contiguous(), "shared_gate must be contiguous");
  }
  RETURN_IF_ERROR(check.status());
  RETURN_IF_ERROR(NeedsCpu(*ctx, "combine_experts"));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  p.positions = static_cast<const int32_t*>(plan.positions.data);
  p.weights = static_cast<const float*>(weights.data);
  p.routed = static_cast<const float*>(routed.data);
  p.shared = IsAbsent(shared) ? nullptr : static_cast<const float*>(shared.data);
  p.gate = IsAbsent(shared_gate) ? nullptr : static_cast<const float*>(shared_gate.data);
  p.out = static_cast<float*>(out.data);
  p.out_stride = out.row_stride;
  const int64_t blocks = (p.dim + kColumns - 1) / kColumns;
  ctx->pool->ParallelFor(p.tokens * blocks, [&](int64_t i) {
    const int64_t begin = i % blocks * kColumns;
    CombineToken(p, i / blocks, begin, std::min(p.dim, begin + kColumns));
  });
  return absl::OkStatus();
}

}  // namespace lockstep
