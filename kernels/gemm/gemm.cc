// The host entry of Gemm, its table of arms, and the layout of x for the CPU arm.
#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gemm_cuda_problem.h"
#include "kernels/gemm/gemm_launch.h"
#include "kernels/gemm/gemm_tile.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"

namespace lockstep {

namespace generic {
void GemmTask(const GemmArgs& args, int64_t group, int64_t token);
}
namespace avx2 {
void GemmTask(const GemmArgs& args, int64_t group, int64_t token);
}
namespace avx512 {
void GemmTask(const GemmArgs& args, int64_t group, int64_t token);
}

namespace {

using TaskFn = void (*)(const GemmArgs&, int64_t, int64_t);

TaskFn TaskOf(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return generic::GemmTask;
    case CpuIsa::kAvx2:
      return avx2::GemmTask;
    case CpuIsa::kAvx512:
      return avx512::GemmTask;
  }
  return generic::GemmTask;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [token, token + tokens) of x as one tile: out[k * tokens + t].
void FillTile(ConstTensorView x, int64_t token, int64_t tokens, float* out) {
  const int64_t k_size = x.shape[1];
  if (x.dtype != DType::kU8) {
    auto* fill = SelectIsa(generic::FillTile, avx2::FillTile, avx512::FillTile);
    return fill(x.Rows(token, tokens).data, x.dtype == DType::kBF16, x.row_stride, tokens, k_size,
                out);
  }
  static const std::array<float, 256> kTable = [] {
    std::array<float, 256> t;
    for (int i = 0; i < 256; ++i) t[i] = E4M3ToFloat(static_cast<uint8_t>(i));
    return t;
  }();
  for (int64_t t = 0; t < tokens; ++t) {
    const uint8_t* row = x.row<uint8_t>(token + t);
    for (int64_t k = 0; k < k_size; ++k) out[k * tokens + t] = kTable[row[k]];
  }
}

// `out` of rank 3: the sums of the virtual shards, kept apart.
struct Problem {
  const GemmWeight& weight;
  ConstTensorView x;
  const ConstTensorView* act_scales;
  TensorView out;
};

absl::Status GemmCpu(ExecContext* ctx, const Problem& problem) {
  const GemmWeight& weight = problem.weight;
  const ConstTensorView x = problem.x;
  const ConstTensorView* act_scales = problem.act_scales;
  const TensorView out = problem.out;
  const int64_t m = x.rows();
  Workspace::Scope scope(ctx->workspace);
  // One row of floats is its own tile.
  const bool direct = m == 1 && x.dtype == DType::kF32;
  TensorView tiles;
  if (!direct) tiles = ctx->workspace->Take(DType::kF32, {m, weight.k});
  if (ctx->dry_run() || m == 0 || weight.n == 0) return absl::OkStatus();
  const int64_t num_tiles = CeilDiv(m, kTileTokens);
  if (!direct) {
    ctx->pool->ParallelFor(num_tiles, [&](int64_t i) {
      const int64_t token = i * kTileTokens;
      FillTile(x, token, std::min<int64_t>(kTileTokens, m - token), tiles.row<float>(token));
    });
  }

  GemmArgs args;
  args.format = weight.format;
  args.scaling = weight.scaling;
  args.n = weight.n;
  args.k = weight.k;
  args.m = m;
  args.codes = static_cast<const uint8_t*>(weight.codes);
  args.block16_scales = static_cast<const uint8_t*>(weight.block16_scales);
  args.tensor_scale = weight.tensor_scale;
  args.scales = weight.scales;
  args.scales_bf16 = weight.scale_dtype == DType::kBF16;
  args.scale_columns = weight.scale_columns;
  args.block_rows = weight.block_rows.data();
  args.num_block_rows = static_cast<int64_t>(weight.block_rows.size());
  args.segments = weight.segments.data();
  args.num_segments = static_cast<int64_t>(weight.segments.size());
  args.shards = weight.shards;
  args.x = direct ? x.row<float>(0) : tiles.row<float>(0);
  if (act_scales != nullptr) {
    args.act_scales = act_scales->row<float>(0);
    args.act_scale_stride = act_scales->row_stride;
  }
  args.out = out.data;
  args.out_bf16 = out.dtype == DType::kBF16;
  args.out_stride = out.shape.rank() == 3 ? weight.n : out.row_stride;
  args.out_shard_stride = out.shape.rank() == 3 ? out.row_stride : 0;

  const TaskFn task = TaskOf(GetCpuIsa());
  const int64_t blocks = CeilDiv(CeilDiv(weight.n, kGroupRows), kTaskGroups);
  const int64_t parts = CeilDiv(m, kTaskTokens);
  // Tasks of one block of rows follow each other: its weights stay in the cache.
  ctx->pool->ParallelFor(blocks * parts, [&](int64_t i) {
    task(args, i / parts * kTaskGroups, i % parts * kTaskTokens);
  });
  return absl::OkStatus();
}

#if defined(KERNELS_WITH_CUDA)
const char* CannotRunCuda(const Problem& problem) {
  const GemmWeight& weight = problem.weight;
  if (weight.format == WeightFormat::kF32) return "weights are F32; BF16, FP8 or NVFP4 is needed";
  if (problem.x.dtype == DType::kF32) return "activations are F32; BF16 or FP8 codes are needed";
  const KLayout& layout = weight.layout;
  if (layout.shard_size % (16 * weight.splits) != 0) {
    return "K of a virtual shard is not a multiple of 16";
  }
  if (layout.act_group % 16 != 0) return "activation groups are not a multiple of 16 columns";
  if (layout.weight_blocks && layout.begin % 16 != 0) {
    return "the first column is not a multiple of 16";
  }
  if (weight.shards * weight.splits > kMaxShards) return "K has more than 8 parts";
  if (weight.block_rows.size() > kMaxBlockRows) {
    return "the rows are more than 8 ranges of the full tensor";
  }
  return nullptr;
}

absl::Status GemmCuda(ExecContext* ctx, const Problem& problem) {
  const GemmCudaProblem p =
      MakeGemmCudaProblem(problem.weight, problem.x, problem.act_scales, problem.out);
  const GemmShape shape = ShapeOf(p);
  const GemmKernel kernel = ChooseGemmKernel(shape);
  Workspace::Scope scope(ctx->workspace);
  TensorView scratch, expanded;
  if (kernel == GemmKernel::kManyTokens && GemmWgmmaScratch(shape) > 0) {
    scratch = ctx->workspace->Take(DType::kF32, {GemmWgmmaScratch(shape)});
  }
  if (kernel != GemmKernel::kFewTokens && p.x_codes) {
    expanded = ctx->workspace->Take(DType::kBF16, {p.m, p.k});
  }
  if (ctx->dry_run()) return absl::OkStatus();
  const LaunchStatus status = kernel != GemmKernel::kFewTokens && CanRunGemmWgmma(p)
                                  ? LaunchGemmWgmma(p, kernel, expanded.data,
                                                    static_cast<float*>(scratch.data), ctx->stream)
                                  : LaunchGemm(p, ChooseGemmTile(shape), ctx->stream);
  return ToStatus("Gemm", status);
}
#endif

using RunFn = absl::Status (*)(ExecContext* ctx, const Problem& problem);
constexpr Arm<Problem, RunFn> kArms[] = {
#if defined(KERNELS_WITH_CUDA)
    {"cuda", DeviceType::kCuda, CannotRunCuda, GemmCuda},
#endif
    {"cpu", DeviceType::kCpu, nullptr, GemmCpu},
};

absl::Status CheckOperands(const GemmWeight& weight, ConstTensorView x,
                           const ConstTensorView* act_scales, TensorView out) {
  const bool codes = x.dtype == DType::kU8;
  if (x.shape.rank() != 2 || x.shape[1] != weight.k ||
      (!codes && x.dtype != DType::kF32 && x.dtype != DType::kBF16)) {
    return absl::InvalidArgumentError(absl::StrCat("Gemm: x is ", x.ToString(), ", expected [T, ",
                                                   weight.k, "] of F32, BF16 or U8"));
  }
  if (out.shape.rank() == 3) {
    if (out.shape != Shape{weight.shards, x.rows(), weight.n} || out.dtype != DType::kF32) {
      return absl::InvalidArgumentError(absl::StrCat("Gemm: out is ", out.ToString(),
                                                     ", expected F32[", weight.shards, ", ",
                                                     x.rows(), ", ", weight.n, "]"));
    }
  } else if (out.shape != Shape{x.rows(), weight.n} ||
             (out.dtype != DType::kF32 && out.dtype != DType::kBF16)) {
    return absl::InvalidArgumentError(absl::StrCat("Gemm: out is ", out.ToString(), ", expected [",
                                                   x.rows(), ", ", weight.n, "] of F32 or BF16"));
  }
  if (codes != (act_scales != nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Gemm: x is ", x.ToString(), codes ? " without" : " with",
                     " activation scales: E4M3 codes have them, values do not"));
  }
  int64_t scales = 0;
  for (const KSegment& s : weight.segments) scales = std::max(scales, s.act_scale + 1);
  if (codes && (act_scales->dtype != DType::kF32 || act_scales->shape != Shape{x.rows(), scales})) {
    return absl::InvalidArgumentError(absl::StrCat("Gemm: activation scales are ",
                                                   act_scales->ToString(), ", expected F32[",
                                                   x.rows(), ", ", scales, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

GemmCudaProblem MakeGemmCudaProblem(const GemmWeight& weight, const ConstTensorView& x,
                                    const ConstTensorView* act_scales, const TensorView& out) {
  const KLayout& layout = weight.layout;
  CHECK(layout.k == weight.k && layout.k == layout.shard_size * weight.shards)
      << "K " << weight.k << " laid out as " << layout.k << " in shards of " << layout.shard_size
      << " ";
  GemmCudaProblem p;
  p.format = weight.format;
  p.scaling = weight.scaling;
  p.n = weight.n;
  p.k = weight.k;
  p.m = x.rows();
  p.splits = static_cast<int>(weight.splits);
  p.leaves = static_cast<int>(weight.shards * weight.splits);
  p.leaf_k = weight.k / p.leaves;
  p.weight_blocks = layout.weight_blocks;
  p.first_column = layout.begin;
  p.act_group = layout.act_group;
  p.codes = weight.codes;
  p.block16_scales = weight.block16_scales;
  p.tensor_scale = weight.tensor_scale;
  p.scales = weight.scales;
  p.scales_bf16 = weight.scale_dtype == DType::kBF16;
  p.scale_columns = weight.scale_columns;
  CHECK(weight.block_rows.size() <= kMaxBlockRows) << weight.block_rows.size() << " ranges ";
  p.num_block_rows = static_cast<int>(weight.block_rows.size());
  std::copy(weight.block_rows.begin(), weight.block_rows.end(), p.block_rows);
  p.x = x.data;
  p.x_codes = x.dtype == DType::kU8;
  p.x_stride = x.row_stride;
  if (act_scales != nullptr) {
    p.act_scales = static_cast<const float*>(act_scales->data);
    p.act_scale_stride = act_scales->row_stride;
  }
  p.out = out.data;
  p.out_bf16 = out.dtype == DType::kBF16;
  p.keep_shards = out.shape.rank() == 3;
  p.out_stride = p.keep_shards ? weight.n : out.row_stride;
  p.out_shard_stride = p.keep_shards ? out.row_stride : 0;
  return p;
}

int64_t ActScalesPerToken(int64_t k, int64_t shard_size, int64_t act_group) {
  return k / shard_size * CeilDiv(shard_size, act_group);
}

int64_t SplitsOf(DeviceType device, int64_t k) {
  if (device == DeviceType::kCpu) return 1;
  return k >= 2048 && k % 256 == 0 ? 4 : k >= 1024 && k % 128 == 0 ? 2 : 1;
}

std::vector<KSegment> MakeSegments(const KLayout& layout) {
  CHECK(layout.shard_size > 0 && layout.k % layout.shard_size == 0)
      << "shards of " << layout.shard_size << " in " << layout.k << " ";
  const int64_t first_block = layout.begin / 128;
  const int64_t groups = layout.act_group == 0 ? 1 : CeilDiv(layout.shard_size, layout.act_group);
  std::vector<KSegment> segments;
  for (int64_t begin = 0; begin < layout.k;) {
    KSegment s;
    s.begin = begin;
    s.shard = begin / layout.shard_size;
    const int64_t shard_begin = s.shard * layout.shard_size;
    s.end = shard_begin + layout.shard_size;
    if (layout.weight_blocks) {
      const int64_t block = (layout.begin + begin) / 128;
      s.weight_scale = block - first_block;
      s.end = std::min(s.end, (block + 1) * 128 - layout.begin);
    }
    s.act_scale = s.shard * groups;
    if (layout.act_group != 0) {
      const int64_t group = (begin - shard_begin) / layout.act_group;
      s.act_scale += group;
      s.end = std::min(s.end, shard_begin + (group + 1) * layout.act_group);
    }
    segments.push_back(s);
    begin = s.end;
  }
  return segments;
}

namespace {

absl::Status RunGemm(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                     const ConstTensorView* act_scales, TensorView out) {
  RETURN_IF_ERROR(CheckOperands(weight, x, act_scales, out));
  CHECK(weight.shards >= 1 && weight.shards <= kMaxShards) << weight.shards << " virtual shards ";
  const Problem problem = {weight, x, act_scales, out};
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm("Gemm", kArms, weight.device, problem));
  CountLaunch(ctx);
  return arm->run(ctx, problem);
}

}  // namespace

absl::Status Gemm(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                  const ConstTensorView* act_scales, TensorView out) {
  CHECK_EQ(out.shape.rank(), 2);
  return RunGemm(ctx, weight, x, act_scales, out);
}

absl::Status GemmShards(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                        const ConstTensorView* act_scales, TensorView out) {
  CHECK_EQ(out.shape.rank(), 3);
  return RunGemm(ctx, weight, x, act_scales, out);
}

}  // namespace lockstep
