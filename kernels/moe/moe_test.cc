// Tests of the ops around expert products, against plain statements of their formulas.
#include "kernels/moe/moe.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::DryRunContext;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed RunRoute(const RouterParams& p, const std::vector<float>& logits,
                const std::vector<float>& bias = {}) {
  ArmContext context;
  const int64_t tokens = static_cast<int64_t>(logits.size()) / p.num_experts;
  ArmTensor l(DType::kF32, {tokens, p.num_experts}, logits);
  ArmTensor b(DType::kF32, {p.num_experts},
              bias.empty() ? std::vector<float>(static_cast<size_t>(p.num_experts)) : bias);
  ArmTensor ids({tokens, p.top_k}, std::vector<int32_t>(static_cast<size_t>(tokens * p.top_k)));
  ArmTensor weights(DType::kF32, {tokens, p.top_k});
  EXPECT_OK(Route(context.get(), l.view(), bias.empty() ? TensorView() : b.view(), p, ids.view(),
                  weights.view()));
  Routed r;
  const int32_t* first = static_cast<const int32_t*>(ids.view().data);
  r.ids.assign(first, first + tokens * p.top_k);
  r.weights = weights.Get();
  return r;
}

RouterParams Softmax(int64_t experts, int64_t top_k) {
  RouterParams p;
  p.num_experts = experts;
  p.top_k = top_k;
  return p;
}

TEST(Route, EqualScoresGoToTheLowestIdAndOrderIsByScore) {
  const Routed r = RunRoute(Softmax(5, 4), {1, 3, 1, 3, 1});
  EXPECT_THAT(r.ids, ElementsAre(1, 3, 0, 2));
  EXPECT_EQ(r.weights[0], r.weights[1]);
  EXPECT_GT(r.weights[1], r.weights[2]);
}

TEST(Route, NormalizedWeightsAreTheSoftmaxOverTheChosen) {
  const std::vector<float> logits = RandomFloats(9 * 32, 1, 4.0f);
  const Routed r = RunRoute(Softmax(32, 5), logits);
  for (int64_t t = 0; t < 9; ++t) {
    double sum = 0;
    for (int i = 0; i < 5; ++i) sum += std::exp(double{logits[t * 32 + r.ids[t * 5 + i]]});
    for (int i = 0; i < 5; ++i) {
      EXPECT_NEAR(r.weights[t * 5 + i], std::exp(double{logits[t * 32 + r.ids[t * 5 + i]]}) / sum,
                  1e-6);
    }
  }
}

TEST(Route, WithoutNormalizationWeightsAreTheSoftmaxOverAll) {
  RouterParams p = Softmax(4, 2);
  p.normalize = false;
  const Routed r = RunRoute(p, {0, 0, 0, 0});
  EXPECT_THAT(r.ids, ElementsAre(0, 1));
  EXPECT_THAT(r.weights, ElementsAre(0.25f, 0.25f));
}

TEST(Route, TheBiasChoosesButDoesNotWeigh) {
  RouterParams p = Softmax(4, 2);
  p.score = RouterScore::kSigmoid;
  p.normalize = false;
  p.scaling_factor = 2.0f;
  const std::vector<float> logits = {2, 1, 0, -1};
  EXPECT_THAT(RunRoute(p, logits).ids, ElementsAre(0, 1));
  const Routed r = RunRoute(p, logits, {0, 0, 0, 5});
  EXPECT_THAT(r.ids, ElementsAre(3, 0));
  EXPECT_NEAR(r.weights[0], 2 / (1 + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(r.weights[1], 2 / (1 + std::exp(-2.0)), 1e-6);
}

TEST(Route, OnlyTheBestGroupsMayBeChosen) {
  RouterParams p = Softmax(6, 2);
  p.score = RouterScore::kSigmoid;
  p.num_groups = 3;
  p.top_groups = 1;
  p.normalize_floor = 1e-20f;
  // The best single expert is in group 0, the best pair in group 2.
  const Routed r = RunRoute(p, {9, -9, -1, -1, 2, 2});
  EXPECT_THAT(r.ids, ElementsAre(4, 5));
  EXPECT_THAT(r.weights, ElementsAre(0.5f, 0.5f));
  p.top_groups = 2;
  EXPECT_THAT(RunRoute(p, {9, -9, -1, -1, 2, 2}).ids, ElementsAre(0, 4));
}

TEST(Route, ATokenAloneHasTheSameBits) {
  const std::vector<float> logits = RandomFloats(7 * 64, 3, 6.0f);
  const Routed all = RunRoute(Softmax(64, 8), logits);
  for (int64_t t = 0; t < 7; ++t) {
    const Routed one = RunRoute(
        Softmax(64, 8), std::vector<float>(logits.begin() + t * 64, logits.begin() + t * 64 + 64));
    EXPECT_EQ(0, std::memcmp(one.weights.data(), all.weights.data() + t * 8, 8 * sizeof(float)));
    EXPECT_EQ(0, std::memcmp(one.ids.data(), all.ids.data() + t * 8, 8 * sizeof(int32_t)));
  }
}

TEST(ValidateRouter, NamesTheImpossibleNumber) {
  const auto refused = [](RouterParams p, const char* message) {
    EXPECT_THAT(ValidateRouter(p),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  };
  refused(Softmax(0, 1), "0 experts, at least 1");
  refused(Softmax(4, 5), "the best 5 of 4 experts");
  refused(Softmax(4, 0), "the best 0 of 4 experts");
  RouterParams p = Softmax(6, 3);
  p.num_groups = 4;
  refused(p, "6 experts do not form 4 groups");
  p.num_groups = 3;
  p.top_groups = 4;
  refused(p, "the best 4 of 3 groups");
  p.top_groups = 1;
  refused(p, "the best 3 of 2 experts");
}

// A plan of `ids` [tokens, top_k] over `experts`, with its memory.
struct Plan {
  Plan(ArmContext* context, int64_t experts, int64_t top_k, const std::vector<int32_t>& ids) {
    const int64_t tokens = static_cast<int64_t>(ids.size()) / top_k;
    ArmTensor i({tokens, top_k}, ids);
    plan = ExpertPlan::Take(context->get()->workspace, tokens, experts, top_k);
    EXPECT_OK(PlanExperts(context->get(), i.view(), plan));
  }
  static std::vector<int32_t> Values(TensorView v) {
    const int32_t* p = static_cast<const int32_t*>(v.data);
    return std::vector<int32_t>(p, p + v.shape.num_elements());
  }
  ExpertPlan plan;
};

TEST(PlanExperts, GroupsRowsByExpertWithTokensAscending) {
  ArmContext context;
  const Plan p(&context, 4, 2, {3, 0, 0, 1, 3, 1});
  EXPECT_THAT(Plan::Values(p.plan.offsets), ElementsAre(0, 2, 4, 4, 6));
  EXPECT_THAT(Plan::Values(p.plan.tokens), ElementsAre(0, 1, 1, 2, 0, 2));
  EXPECT_THAT(Plan::Values(p.plan.positions), ElementsAre(4, 0, 1, 2, 5, 3));
}

TEST(CombineExperts, SumsSlotsThenTheSharedExpertThenShards) {
  ArmContext context;
  const int64_t tokens = 3, top_k = 2, dim = 300, shards = 4, rows = tokens * top_k;
  const Plan p(&context, 4, top_k, {3, 0, 0, 1, 3, 1});
  const std::vector<int32_t> position = Plan::Values(p.plan.positions);
  const std::vector<float> w = RandomFloats(rows, 1), gate = RandomFloats(tokens, 2);
  const std::vector<float> routed = RandomFloats(shards * rows * dim, 3);
  const std::vector<float> shared = RandomFloats(shards * tokens * dim, 4);
  ArmTensor wt(DType::kF32, {tokens, top_k}, w), g(DType::kF32, {tokens, 1}, gate);
  ArmTensor r(DType::kF32, {shards, rows, dim}, routed);
  ArmTensor s(DType::kF32, {shards, tokens, dim}, shared);
  ArmTensor out(DType::kF32, {tokens, dim}), wide(DType::kF32, {tokens, dim + 5});
  ASSERT_OK(
      CombineExperts(context.get(), p.plan, wt.view(), r.view(), s.view(), g.view(), out.view()));
  const std::vector<float> got = out.Get();
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < dim; ++c) {
      double sum = 0;
      for (int64_t v = 0; v < shards; ++v) {
        for (int64_t i = 0; i < top_k; ++i) {
          sum += double{w[t * top_k + i]} * routed[(v * rows + position[t * top_k + i]) * dim + c];
        }
        sum += shared[(v * tokens + t) * dim + c] / (1 + std::exp(-double{gate[t]}));
      }
      ASSERT_NEAR(got[t * dim + c], sum, 1e-5);
    }
  }
  // Into a part of wider rows; then no shared expert.
  ASSERT_OK(CombineExperts(context.get(), p.plan, wt.view(), r.view(), s.view(), g.view(),
                           wide.view().Columns(2, dim)));
  EXPECT_EQ(wide.Get()[2 * (dim + 5) + 2 + 7], got[2 * dim + 7]);
  ASSERT_OK(CombineExperts(context.get(), p.plan, wt.view(), r.view(), {}, {}, out.view()));
  const std::vector<float> alone = out.Get();
  // Shards of one rank join as the shards of two ranks do.
  ArmTensor left(DType::kF32, {2, rows, dim},
                 std::vector<float>(routed.begin(), routed.begin() + 2 * rows * dim));
  ArmTensor right(DType::kF32, {2, rows, dim},
                  std::vector<float>(routed.begin() + 2 * rows * dim, routed.end()));
  ArmTensor a(DType::kF32, {tokens, dim}), b(DType::kF32, {tokens, dim});
  ASSERT_OK(CombineExperts(context.get(), p.plan, wt.view(), left.view(), {}, {}, a.view()));
  ASSERT_OK(CombineExperts(context.get(), p.plan, wt.view(), right.view(), {}, {}, b.view()));
  for (size_t i = 0; i < alone.size(); ++i) ASSERT_EQ(a.Get()[i] + b.Get()[i], alone[i]);
}

TEST(Moe, RefusesWrongTensorsByName) {
  ArmContext context;
  ArmTensor logits(DType::kF32, {2, 4}), weights(DType::kF32, {2, 2});
  ArmTensor ids({2, 3}, std::vector<int32_t>(6));
  EXPECT_THAT(Route(context.get(), logits.view(), {}, Softmax(4, 2), ids.view(), weights.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("route: ids is I32[2, 3], shape [2, 2] is needed")));
  const Plan p(&context, 4, 2, {0, 1, 2, 3});
  ArmTensor routed(DType::kF32, {3, 4, 8}), out(DType::kF32, {2, 8});
  EXPECT_THAT(
      CombineExperts(context.get(), p.plan, weights.view(), routed.view(), {}, {}, out.view()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be 1, 2, 4 or 8")));
}

TEST(Moe, DryRunTouchesNothing) {
  DryRunContext context;
  const TensorView logits(nullptr, DType::kF32, {2, 4}), ids(nullptr, DType::kI32, {2, 2});
  const TensorView weights(nullptr, DType::kF32, {2, 2}), out(nullptr, DType::kF32, {2, 8});
  const TensorView routed(nullptr, DType::kF32, {2, 4, 8});
  EXPECT_OK(Route(context.get(), logits, {}, Softmax(4, 2), ids, weights));
  const ExpertPlan plan = ExpertPlan::Take(context.get()->workspace, 2, 4, 2);
  EXPECT_OK(PlanExperts(context.get(), ids, plan));
  EXPECT_OK(CombineExperts(context.get(), plan, weights, routed, {}, {}, out));
}

}  // namespace
}  // namespace lockstep
