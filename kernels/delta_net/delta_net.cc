#include "kernels/delta_net/delta_net.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/batch/batch_rows.h"
#include "kernels/delta_net/delta_net_rows.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

static_assert(kDeltaNetGrid == kGrid, "the rings have one row per position of a grid cell");

absl::Status DeltaNetCpu(ExecContext* ctx, const DeltaNetProblem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  auto* run = SelectIsa(generic::DeltaNetUnit, avx2::DeltaNetUnit, avx512::DeltaNetUnit);
  const int64_t heads = p.num_k_heads;
  ctx->pool->ParallelFor(p.num_sequences * heads,
                         [&](int64_t unit) { run(p, unit / heads, unit % heads); });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status DeltaNetCuda(ExecContext* ctx, const DeltaNetProblem& problem) {
  DeltaNetProblem p = problem;
  Workspace::Scope scope(ctx->workspace);
  const auto take = [&](int64_t columns) {
    return static_cast<float*>(ctx->workspace->Take(DType::kF32, {p.num_tokens, columns}).data);
  };
  p.grams = take(p.num_k_heads * 2 * kGrid);
  p.scales = take(p.num_k_heads * 2);
  p.gates = take(p.num_v_heads * 2);
  if (ctx->dry_run()) return absl::OkStatus();
  return ToStatus("gated_delta_net", LaunchDeltaNet(p, ctx->stream));
}
#endif

using RunFn = absl::Status (*)(ExecContext*, const DeltaNetProblem&);
constexpr Arm<DeltaNetProblem, RunFn> kDeltaNetArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, CannotRunDeltaNetCuda, DeltaNetCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, DeltaNetCpu},
};

absl::Status CheckParams(const ExecContext& ctx, const char* op, const DeltaNetParams& p) {
  return OpCheck(ctx, op)
      .That(p.num_k_heads > 0 && p.num_v_heads > 0 && p.num_v_heads % p.num_k_heads == 0,
            absl::StrCat(p.num_v_heads, " value heads over ", p.num_k_heads,
                         " key heads; a positive multiple is needed"))
      .That(p.k_dim > 0 && p.k_dim % 16 == 0 && p.k_dim <= kMaxDeltaNetDim && p.v_dim > 0 &&
                p.v_dim % 16 == 0 && p.v_dim <= kMaxDeltaNetDim,
            absl::StrCat("head dimensions are ", p.k_dim, " (keys) and ", p.v_dim,
                         " (values); multiples of 16 up to ", kMaxDeltaNetDim, " are needed"))
      .status();
}

}  // namespace

absl::Status GatedDeltaNet(ExecContext* ctx, const ForwardBatch& batch,
                           const DeltaNetParams& params, ConstTensorView qkv, ConstTensorView z,
                           ConstTensorView b, ConstTensorView a, ConstTensorView a_log,
                           ConstTensorView dt_bias, ConstTensorView norm_weight,
                           const DeltaNetState& state, TensorView out) {
  constexpr char kOp[] = "gated_delta_net";
  RETURN_IF_ERROR(CheckParams(*ctx, kOp, params));
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("state", state.state, 4).Batch(batch).status());
  const int64_t tokens = batch.num_tokens, slots = state.state.shape[0];
  const int64_t hk = params.num_k_heads, hv = params.num_v_heads;
  const int64_t dk = params.k_dim, dv = params.v_dim;
  OpCheck check(*ctx, kOp);
  check.Tensor("qkv", qkv, {DType::kF32, DType::kBF16}, {tokens, params.conv_channels()})
      .Tensor("z", z, {qkv.dtype}, {tokens, hv * dv})
      .Tensor("b", b, {qkv.dtype}, {tokens, hv})
      .Tensor("a", a, {qkv.dtype}, {tokens, hv})
      .Tensor("a_log", a_log, {DType::kF32, DType::kBF16}, {hv})
      .Tensor("dt_bias", dt_bias, {DType::kF32, DType::kBF16}, {hv})
      .Tensor("norm_weight", norm_weight, {DType::kF32, DType::kBF16}, {dv})
      .Tensor("out", out, {qkv.dtype}, {tokens, hv * dv})
      .Tensor("state", state.state, {DType::kF32}, {slots, hv, dv, dk})
      .Tensor("ring_k", state.ring_k, {DType::kF32}, {slots, kGrid, hk * dk})
      .Tensor("ring_d", state.ring_d, {DType::kF32}, {slots, kGrid, hv * dv})
      .Tensor("ring_g", state.ring_g, {DType::kF32}, {slots, kGrid, hv});
  if (batch.num_snapshots > 0) {
    check.Rank("state_snapshot", state.state_snapshot, 4);
    if (state.state_snapshot.shape.rank() == 4) {
      check.Tensor("state_snapshot", state.state_snapshot, {DType::kF32},
                   {state.state_snapshot.shape[0], hv, dv, dk});
    }
  }
  RETURN_IF_ERROR(check.status());
  DeltaNetProblem p;
  p.num_tokens = tokens;
  p.num_sequences = batch.num_sequences;
  p.batch = BatchRowsOf(batch);
  p.bf16 = qkv.dtype == DType::kBF16;
  p.a_log_bf16 = a_log.dtype == DType::kBF16;
  p.dt_bias_bf16 = dt_bias.dtype == DType::kBF16;
  p.norm_bf16 = norm_weight.dtype == DType::kBF16;
  p.sigmoid_gate = params.output_gate == OutputGate::kSigmoid;
  p.qkv = qkv.data;
  p.z = z.data;
  p.b = b.data;
  p.a = a.data;
  p.a_log = a_log.data;
  p.dt_bias = dt_bias.data;
  p.norm_weight = norm_weight.data;
  p.out = out.data;
  p.qkv_stride = qkv.row_stride;
  p.z_stride = z.row_stride;
  p.b_stride = b.row_stride;
  p.a_stride = a.row_stride;
  p.out_stride = out.row_stride;
  p.state = static_cast<float*>(state.state.data);
  p.ring_k = static_cast<float*>(state.ring_k.data);
  p.ring_d = static_cast<float*>(state.ring_d.data);
  p.ring_g = static_cast<float*>(state.ring_g.data);
  p.state_snapshot = static_cast<float*>(state.state_snapshot.data);
  p.num_k_heads = hk;
  p.num_v_heads = hv;
  p.k_dim = dk;
  p.v_dim = dv;
  p.norm_eps = params.norm_eps;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kDeltaNetArms, ctx->device, p));
  CountLaunch(ctx);
  return arm->run(ctx, p);
}

}  // namespace lockstep
