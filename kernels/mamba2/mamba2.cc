#include "kernels/mamba2/mamba2.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/batch/batch_rows.h"
#include "kernels/mamba2/mamba2_rows.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

static_assert(kMamba2Grid == kGrid, "the rings have one row per position of a grid cell");

constexpr char kOp[] = "mamba2";

absl::Status Mamba2Cpu(ExecContext* ctx, const Mamba2Problem& p) {
  auto* run = SelectIsa(generic::Mamba2Unit, avx2::Mamba2Unit, avx512::Mamba2Unit);
  ctx->pool->ParallelFor(p.num_sequences * p.num_groups,
                         [&](int64_t unit) { run(p, unit / p.num_groups, unit % p.num_groups); });
  return absl::OkStatus();
}

using RunFn = absl::Status (*)(ExecContext*, const Mamba2Problem&);
constexpr Arm<Mamba2Problem, RunFn> kArms[] = {{"cpu", DeviceType::kCpu, nullptr, Mamba2Cpu}};

absl::Status CheckParams(const ExecContext& ctx, const Mamba2Params& p) {
  const bool heads = p.num_heads > 0 && p.num_groups > 0 && p.num_heads % p.num_groups == 0;
  return OpCheck(ctx, kOp)
      .That(heads, absl::StrCat(p.num_heads, " heads over ", p.num_groups,
                                " groups; a positive multiple is needed"))
      .That(p.head_dim > 0 && p.head_dim % 16 == 0 && p.head_dim <= kMaxMamba2Dim &&
                p.state_dim > 0 && p.state_dim % 16 == 0 && p.state_dim <= kMaxMamba2Dim,
            absl::StrCat("dimensions are ", p.head_dim, " (heads) and ", p.state_dim,
                         " (states); multiples of 16 up to ", kMaxMamba2Dim, " are needed"))
      .That(!heads || p.inner() / p.num_groups <= kMaxMamba2GroupWidth,
            absl::StrCat("a group has ", heads ? p.inner() / p.num_groups : 0,
                         " channels, at most ", kMaxMamba2GroupWidth, " are possible"))
      .status();
}

Mamba2Weight WeightOf(const ConstTensorView& view) {
  return {view.data, view.dtype == DType::kBF16};
}

}  // namespace

absl::Status Mamba2(ExecContext* ctx, const ForwardBatch& batch, const Mamba2Params& params,
                    ConstTensorView xbc, ConstTensorView z, ConstTensorView dt,
                    const Mamba2Weights& weights, const Mamba2State& state, TensorView out) {
  RETURN_IF_ERROR(CheckParams(*ctx, params));
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("state", state.state, 4).Batch(batch).status());
  const int64_t tokens = batch.num_tokens, slots = state.state.shape[0];
  const int64_t heads = params.num_heads, inner = params.inner();
  OpCheck check(*ctx, kOp);
  check.Tensor("xbc", xbc, {DType::kF32, DType::kBF16}, {tokens, params.conv_channels()})
      .Tensor("z", z, {xbc.dtype}, {tokens, inner})
      .Tensor("dt", dt, {xbc.dtype}, {tokens, heads})
      .Tensor("a_log", weights.a_log, {DType::kF32, DType::kBF16}, {heads})
      .Tensor("d", weights.d, {DType::kF32, DType::kBF16}, {heads})
      .Tensor("dt_bias", weights.dt_bias, {DType::kF32, DType::kBF16}, {heads})
      .Tensor("norm", weights.norm, {DType::kF32, DType::kBF16}, {inner})
      .Tensor("out", out, {xbc.dtype}, {tokens, inner})
      .Tensor("state", state.state, {DType::kF32},
              {slots, heads, params.head_dim, params.state_dim})
      .Tensor("ring_x", state.ring_x, {DType::kF32}, {slots, kGrid, inner})
      .Tensor("ring_b", state.ring_b, {DType::kF32},
              {slots, kGrid, params.num_groups * params.state_dim})
      .Tensor("ring_g", state.ring_g, {DType::kF32}, {slots, kGrid, heads});
  if (batch.num_snapshots > 0) {
    check.Rank("state_snapshot", state.state_snapshot, 4);
    if (state.state_snapshot.shape.rank() == 4) {
      check.Tensor("state_snapshot", state.state_snapshot, {DType::kF32},
                   {state.state_snapshot.shape[0], heads, params.head_dim, params.state_dim});
    }
  }
  RETURN_IF_ERROR(check.status());
  Mamba2Problem p;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kArms, ctx->device, p));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  p.batch = BatchRowsOf(batch);
  p.num_sequences = batch.num_sequences;
  p.bf16 = xbc.dtype == DType::kBF16;
  p.a_log = WeightOf(weights.a_log);
  p.d = WeightOf(weights.d);
  p.dt_bias = WeightOf(weights.dt_bias);
  p.norm = WeightOf(weights.norm);
  p.xbc = xbc.data;
  p.z = z.data;
  p.dt = dt.data;
  p.out = out.data;
  p.xbc_stride = xbc.row_stride;
  p.z_stride = z.row_stride;
  p.dt_stride = dt.row_stride;
  p.out_stride = out.row_stride;
  p.state = static_cast<float*>(state.state.data);
  p.ring_x = static_cast<float*>(state.ring_x.data);
  p.ring_b = static_cast<float*>(state.ring_b.data);
  p.ring_g = static_cast<float*>(state.ring_g.data);
  p.state_snapshot = static_cast<float*>(state.state_snapshot.data);
  p.num_heads = heads;
  p.num_groups = params.num_groups;
  p.head_dim = params.head_dim;
  p.state_dim = params.state_dim;
  p.norm_eps = params.norm_eps;
  return arm->run(ctx, p);
}

}  // namespace lockstep
