#include "kernels/attention/attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/attention/attention_rows.h"
#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_row.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {
namespace {

static_assert(kKeyBlock == kGrid, "a cache block is one step of the online softmax");

// The sequence that row t belongs to.
int64_t SequenceOf(const int32_t* row_offsets, int64_t num_sequences, int64_t t) {
  return std::upper_bound(row_offsets, row_offsets + num_sequences + 1, t) - row_offsets - 1;
}

struct PrepareProblem {
  const ForwardBatch* batch = nullptr;
  const AttentionParams* params = nullptr;
  ConstTensorView q_and_gate, k, v, q_norm, k_norm, inv_freq;
  KvCacheView cache;
  TensorView q_out;
};

float ReadScalar(const ConstTensorView& view, int64_t i) {
  return view.dtype == DType::kBF16 ? ToFloat(static_cast<const BF16*>(view.data)[i])
                                    : static_cast<const float*>(view.data)[i];
}

// offset + w of a norm; nothing without one.
void LoadNorm(const AttentionParams& p, const ConstTensorView& weight, float* w) {
  if (!p.qk_norm) return;
  for (int64_t i = 0; i < p.head_dim; ++i) w[i] = p.norm_weight_offset + ReadScalar(weight, i);
}

// x = round(x / rms(x) * w)
template <typename Act>
void NormHead(const AttentionParams& p, const float* w, float* x) {
  const float scale = RmsScale(x, p.head_dim, p.norm_eps);
  for (int64_t i = 0; i < p.head_dim; ++i) x[i] = ToFloat(FromFloat<Act>(x[i] * scale * w[i]));
}

// Rotates the pairs (i, i + rotary_dim / 2), rounded.
template <typename Act>
void RopeHead(const AttentionParams& p, const float* sine, const float* cosine, float* x) {
  const int64_t half = p.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = ToFloat(FromFloat<Act>(a * cosine[i] - b * sine[i]));
    x[i + half] = ToFloat(FromFloat<Act>(b * cosine[i] + a * sine[i]));
  }
}

template <typename Act, typename Cache>
void PrepareRow(const PrepareProblem& p, int64_t t) {
  const AttentionParams& params = *p.params;
  const ForwardBatch& batch = *p.batch;
  const int64_t dim = params.head_dim;
  const int64_t position = batch.positions.row<int32_t>(0)[t];
  float sine[kMaxHeadDim / 2], cosine[kMaxHeadDim / 2], x[kMaxHeadDim];
  float q_norm[kMaxHeadDim], k_norm[kMaxHeadDim];
  LoadNorm(params, p.q_norm, q_norm);
  LoadNorm(params, p.k_norm, k_norm);
  const float* inv_freq = static_cast<const float*>(p.inv_freq.data);
  for (int64_t i = 0; i < params.rotary_dim / 2; ++i) {
    SinCos(static_cast<float>(position) * inv_freq[i], &sine[i], &cosine[i]);
  }
  const auto load = [&](const Act* from, const float* weight) {
    for (int64_t i = 0; i < dim; ++i) x[i] = ToFloat(from[i]);
    if (params.qk_norm) NormHead<Act>(params, weight, x);
    RopeHead<Act>(params, sine, cosine, x);
  };
  const int64_t head_stride = params.output_gate ? 2 * dim : dim;
  for (int64_t h = 0; h < params.num_q_heads; ++h) {
    load(p.q_and_gate.row<Act>(t) + h * head_stride, q_norm);
    Act* out = p.q_out.row<Act>(t) + h * dim;
    for (int64_t i = 0; i < dim; ++i) out[i] = FromFloat<Act>(x[i]);
  }
  const int64_t sequence = SequenceOf(batch.row_offsets.row<int32_t>(0), batch.num_sequences, t);
  const int64_t block = batch.block_table.row<int32_t>(sequence)[position / kGrid];
  for (int64_t h = 0; h < params.num_kv_heads; ++h) {
    const int64_t offset = (h * kGrid + position % kGrid) * dim;
    load(p.k.row<Act>(t) + h * dim, k_norm);
    Cache* key = p.cache.keys.row<Cache>(block) + offset;
    for (int64_t i = 0; i < dim; ++i) key[i] = FromFloat<Cache>(x[i]);
    const Act* v = p.v.row<Act>(t) + h * dim;
    Cache* value = p.cache.values.row<Cache>(block) + offset;
    for (int64_t i = 0; i < dim; ++i) value[i] = FromFloat<Cache>(ToFloat(v[i]));
  }
}

absl::Status PrepareCpu(ExecContext* ctx, const PrepareProblem& p) {
  const bool bf16 = p.q_out.dtype == DType::kBF16, cache_bf16 = p.cache.keys.dtype == DType::kBF16;
  auto* run = bf16 ? (cache_bf16 ? PrepareRow<BF16, BF16> : PrepareRow<BF16, float>)
                   : (cache_bf16 ? PrepareRow<float, BF16> : PrepareRow<float, float>);
  ctx->pool->ParallelFor(p.batch->num_tokens, [&](int64_t t) { run(p, t); });
  return absl::OkStatus();
}

absl::Status AttentionCpu(ExecContext* ctx, const AttentionProblem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  auto* run = SelectIsa(generic::AttentionUnit, avx2::AttentionUnit, avx512::AttentionUnit);
  const int64_t tokens = p.row_offsets[p.num_sequences];
  ctx->pool->ParallelFor(tokens * p.num_kv_heads, [&](int64_t unit) {
    const int64_t t = unit / p.num_kv_heads;
    run(p, SequenceOf(p.row_offsets, p.num_sequences, t), t, unit % p.num_kv_heads);
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
absl::Status PrepareCuda(ExecContext* ctx, const PrepareProblem& p) {
  const AttentionParams& params = *p.params;
  RopeProblem r;
  r.row_offsets = p.batch->row_offsets.row<int32_t>(0);
  r.positions = p.batch->positions.row<int32_t>(0);
  r.block_table = p.batch->block_table.row<int32_t>(0);
  r.num_tokens = p.batch->num_tokens;
  r.num_sequences = p.batch->num_sequences;
  r.block_table_stride = p.batch->block_table.row_stride;
  r.bf16 = p.q_out.dtype == DType::kBF16;
  r.cache_bf16 = p.cache.keys.dtype == DType::kBF16;
  r.q_norm_bf16 = p.q_norm.dtype == DType::kBF16;
  r.k_norm_bf16 = p.k_norm.dtype == DType::kBF16;
  r.qk_norm = params.qk_norm;
  r.q = p.q_and_gate.data;
  r.q_stride = p.q_and_gate.row_stride;
  r.q_head_stride = params.output_gate ? 2 * params.head_dim : params.head_dim;
  r.k = p.k.data;
  r.k_stride = p.k.row_stride;
  r.v = p.v.data;
  r.v_stride = p.v.row_stride;
  r.q_norm = p.q_norm.data;
  r.k_norm = p.k_norm.data;
  r.inv_freq = static_cast<const float*>(p.inv_freq.data);
  r.q_out = p.q_out.data;
  r.q_out_stride = p.q_out.row_stride;
  r.keys = p.cache.keys.data;
  r.values = p.cache.values.data;
  r.num_q_heads = params.num_q_heads;
  r.num_kv_heads = params.num_kv_heads;
  r.head_dim = params.head_dim;
  r.rotary_dim = params.rotary_dim;
  r.norm_eps = params.norm_eps;
  r.norm_weight_offset = params.norm_weight_offset;
  return ToStatus("rope_and_cache_write", LaunchRope(r, ctx->stream));
}

absl::Status AttentionMmaCuda(ExecContext* ctx, const AttentionProblem& problem) {
  AttentionProblem p = problem;
  p.partial_splits = AttentionPartialSplits(p);
  Workspace::Scope scope(ctx->workspace);
  const TensorView partials = ctx->workspace->Take(DType::kF32, {AttentionPartialFloats(p)});
  if (ctx->dry_run()) return absl::OkStatus();
  p.partials = static_cast<float*>(partials.data);
  return ToStatus("paged_attention", LaunchAttentionMma(p, ctx->stream));
}

absl::Status AttentionGenericCuda(ExecContext* ctx, const AttentionProblem& p) {
  if (ctx->dry_run()) return absl::OkStatus();
  return ToStatus("paged_attention", LaunchAttentionGeneric(p, ctx->stream));
}
#endif

using PrepareFn = absl::Status (*)(ExecContext*, const PrepareProblem&);
constexpr Arm<PrepareProblem, PrepareFn> kPrepareArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, nullptr, PrepareCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, PrepareCpu},
};
using AttentionFn = absl::Status (*)(ExecContext*, const AttentionProblem&);
constexpr Arm<AttentionProblem, AttentionFn> kAttentionArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda mma", DeviceType::kCuda, CannotRunAttentionMma, AttentionMmaCuda},
    {"cuda generic", DeviceType::kCuda, nullptr, AttentionGenericCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, AttentionCpu},
};

absl::Status CheckCommon(const ExecContext& ctx, const char* op, const ForwardBatch& batch,
                         const AttentionParams& p, const KvCacheView& cache) {
  RETURN_IF_ERROR(
      OpCheck(ctx, op)
          .That(p.num_kv_heads > 0 && p.num_q_heads > 0 && p.num_q_heads % p.num_kv_heads == 0,
                absl::StrCat(p.num_q_heads, " query heads over ", p.num_kv_heads,
                             " kv heads; a positive multiple is needed"))
          .That(p.head_dim > 0 && p.head_dim % 16 == 0 && p.head_dim <= kMaxHeadDim,
                absl::StrCat("head_dim is ", p.head_dim, "; a multiple of 16 up to ", kMaxHeadDim,
                             " is needed"))
          .That(p.rotary_dim >= 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= p.head_dim,
                absl::StrCat("rotary_dim is ", p.rotary_dim, "; an even number up to head_dim ",
                             p.head_dim, " is needed"))
          .Rank("keys", cache.keys, 4)
          .Rank("block_table", batch.block_table, 2)
          .Batch(batch)
          .status());
  const Shape shape = {cache.keys.shape[0], p.num_kv_heads, kGrid, p.head_dim};
  return OpCheck(ctx, op)
      .Tensor("block_table", batch.block_table, {DType::kI32},
              {batch.num_sequences, batch.block_table.shape[1]})
      .Tensor("keys", cache.keys, {DType::kF32, DType::kBF16}, shape)
      .Tensor("values", cache.values, {cache.keys.dtype}, shape)
      .That(cache.keys.contiguous() && cache.values.contiguous(),
            "the kv cache has gaps between its blocks")
      .status();
}

// Every block that the rows of the batch use is one of the cache. CPU only: it reads the table.
absl::Status CheckBlocks(const char* op, const ForwardBatch& batch, int64_t num_blocks) {
  const int32_t* offsets = batch.row_offsets.row<int32_t>(0);
  const int32_t* starts = batch.start_positions.row<int32_t>(0);
  for (int64_t b = 0; b < batch.num_sequences; ++b) {
    const int64_t end = int64_t{starts[b]} + offsets[b + 1] - offsets[b];
    const int64_t needed = (end + kGrid - 1) / kGrid;
    if (needed > batch.block_table.shape[1]) {
      return absl::InvalidArgumentError(absl::StrCat(op, ": sequence ", b, " reaches position ",
                                                     end, ", its block table has ",
                                                     batch.block_table.shape[1], " blocks"));
    }
    const int32_t* table = batch.block_table.row<int32_t>(b);
    for (int64_t i = 0; i < needed; ++i) {
      if (table[i] < 0 || table[i] >= num_blocks) {
        return absl::InvalidArgumentError(absl::StrCat(op, ": block ", i, " of sequence ", b,
                                                       " is ", table[i], ", the cache has ",
                                                       num_blocks, " blocks"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RopeAndCacheWrite(ExecContext* ctx, const ForwardBatch& batch,
                               const AttentionParams& params, ConstTensorView q_and_gate,
                               ConstTensorView k, ConstTensorView v, ConstTensorView q_norm,
                               ConstTensorView k_norm, ConstTensorView inv_freq, KvCacheView cache,
                               TensorView q_out) {
  constexpr char kOp[] = "rope_and_cache_write";
  RETURN_IF_ERROR(CheckCommon(*ctx, kOp, batch, params, cache));
  const int64_t tokens = batch.num_tokens, dim = params.head_dim;
  const int64_t q_width = params.num_q_heads * dim, kv_width = params.num_kv_heads * dim;
  OpCheck check(*ctx, kOp);
  check.Tensor("q_out", q_out, {DType::kF32, DType::kBF16}, {tokens, q_width})
      .Tensor("q_and_gate", q_and_gate, {q_out.dtype},
              {tokens, params.output_gate ? 2 * q_width : q_width})
      .Tensor("k", k, {q_out.dtype}, {tokens, kv_width})
      .Tensor("v", v, {q_out.dtype}, {tokens, kv_width});
  if (params.qk_norm) {
    check.Tensor("q_norm", q_norm, {DType::kF32, DType::kBF16}, {dim})
        .Tensor("k_norm", k_norm, {DType::kF32, DType::kBF16}, {dim});
  }
  if (params.rotary_dim > 0) {
    check.Tensor("inv_freq", inv_freq, {DType::kF32}, {params.rotary_dim / 2});
  }
  RETURN_IF_ERROR(check.status());
  const PrepareProblem p{&batch, &params, q_and_gate, k, v, q_norm, k_norm, inv_freq, cache, q_out};
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kPrepareArms, ctx->device, p));
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  if (ctx->device == DeviceType::kCpu) {
    RETURN_IF_ERROR(CheckBlocks(kOp, batch, cache.keys.shape[0]));
  }
  return arm->run(ctx, p);
}

absl::Status PagedAttention(ExecContext* ctx, const ForwardBatch& batch,
                            const AttentionParams& params, ConstTensorView q,
                            ConstTensorView q_and_gate, KvCacheView cache, TensorView out) {
  constexpr char kOp[] = "paged_attention";
  RETURN_IF_ERROR(CheckCommon(*ctx, kOp, batch, params, cache));
  const int64_t tokens = batch.num_tokens, q_width = params.num_q_heads * params.head_dim;
  OpCheck check(*ctx, kOp);
  check.Tensor("q", q, {DType::kF32, DType::kBF16}, {tokens, q_width})
      .Tensor("out", out, {q.dtype}, {tokens, q_width});
  if (params.output_gate) {
    check.Tensor("q_and_gate", q_and_gate, {q.dtype}, {tokens, 2 * q_width});
  }
  RETURN_IF_ERROR(check.status());
  AttentionProblem p;
  p.row_offsets = batch.row_offsets.row<int32_t>(0);
  p.positions = batch.positions.row<int32_t>(0);
  p.start_positions = batch.start_positions.row<int32_t>(0);
  p.block_table = batch.block_table.row<int32_t>(0);
  p.num_tokens = tokens;
  p.num_sequences = batch.num_sequences;
  p.block_table_stride = batch.block_table.row_stride;
  p.max_blocks = batch.block_table.shape[1];
  p.bf16 = q.dtype == DType::kBF16;
  p.cache_bf16 = cache.keys.dtype == DType::kBF16;
  p.output_gate = params.output_gate;
  p.q = q.data;
  p.q_stride = q.row_stride;
  p.q_and_gate = q_and_gate.data;
  p.q_and_gate_stride = q_and_gate.row_stride;
  p.keys = cache.keys.data;
  p.values = cache.values.data;
  p.out = out.data;
  p.out_stride = out.row_stride;
  p.num_q_heads = params.num_q_heads;
  p.num_kv_heads = params.num_kv_heads;
  p.head_dim = params.head_dim;
  p.scale = params.scale;
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kAttentionArms, ctx->device, p));
  CountLaunch(ctx);
  if (!ctx->dry_run() && ctx->device == DeviceType::kCpu) {
    RETURN_IF_ERROR(CheckBlocks(kOp, batch, cache.keys.shape[0]));
  }
  return arm->run(ctx, p);
}

}  // namespace lockstep
