// Mixture of experts around the expert products: which experts a token goes to, the order in which
// its rows are computed, and the weighted sum of what comes back (numerics N7). A token's results
// depend on its own logits and rows alone. CPU arm; every op counts one launch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

enum class RouterScore {
  kSoftmax,  // over all experts (Qwen3.5-MoE)
  kSigmoid,  // of each expert (NemotronH)
};

struct RouterParams {
  RouterScore score = RouterScore::kSoftmax;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  bool normalize = true;         // divide the chosen scores by their sum (norm_topk_prob)
  float normalize_floor = 0.0f;  // added to that sum; 1e-20 for NemotronH
  float scaling_factor = 1.0f;   // multiplies the weights (routed_scaling_factor)
  // Only experts of the `top_groups` groups with the largest sum of their two best selection scores
  // may be chosen; experts are grouped consecutively.
  int64_t num_groups = 1;
  int64_t top_groups = 1;
};

// InvalidArgument names the impossible number.
absl::Status ValidateRouter(const RouterParams& params);

// ids I32, weights F32, both [T, top_k]: the experts with the largest (score + bias), by (that
// descending, id ascending); a weight is the score without bias, normalized and scaled. logits F32
// [T, num_experts]; bias F32 or BF16 [num_experts], or a view without a shape for none. All
// arithmetic is F32; sums ascend over ids, and over slots for the normalization.
absl::Status Route(ExecContext* ctx, ConstTensorView logits, ConstTensorView bias,
                   const RouterParams& params, TensorView ids, TensorView weights);

// The rows of a step grouped by expert: expert e computes rows [offsets[e], offsets[e + 1]), row p
// for token tokens[p], tokens ascending within an expert. Token t's slot i is row
// positions[t * top_k + i].
struct ExpertPlan {
  TensorView offsets;    // I32 [num_experts + 1]
  TensorView tokens;     // I32 [T * top_k]
  TensorView positions;  // I32 [T, top_k]

  static ExpertPlan Take(Workspace* workspace, int64_t tokens, int64_t num_experts, int64_t top_k);
  int64_t num_experts() const { return offsets.shape[0] - 1; }
};

// Fills `plan` from ids I32 [T, top_k]; the experts of a token differ.
absl::Status PlanExperts(ExecContext* ctx, ConstTensorView ids, const ExpertPlan& plan);

// out[t] = join over s of (sum over slots i of weights[t, i] * routed[s, positions[t, i]]
//                          + g(t) * shared[s, t]),   one fused multiply-add each, from zero,
// g(t) = sigmoid(shared_gate[t, 0]), or 1 without a gate; shards s join as a tree.
// routed F32 [S, T * top_k, D]; weights F32 [T, top_k]; shared F32 [S, T, D] and shared_gate F32
// [T, 1], or views without a shape for none; out F32 [T, D], its row stride is honoured.
absl::Status CombineExperts(ExecContext* ctx, const ExpertPlan& plan, ConstTensorView weights,
                            ConstTensorView routed, ConstTensorView shared,
                            ConstTensorView shared_gate, TensorView out);

}  // namespace lockstep
