// The host entry of Gemm, its table of arms, and the layout of x for the CPU arm.
#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/cpu_isa.h"

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

struct F32Source {
  const float* p;
  float operator[](int64_t k) const { return p[k]; }
};
struct BF16Source {
  const BF16* p;
  float operator[](int64_t k) const { return ToFloat(p[k]); }
};
struct E4M3Source {
  const uint8_t* p;
  float operator[](int64_t k) const {
    static const std::array<float, 256> kTable = [] {
      std::array<float, 256> t;
      for (int i = 0; i < 256; ++i) t[i] = E4M3ToFloat(static_cast<uint8_t>(i));
      return t;
    }();
    return kTable[p[k]];
  }
};

// Rows [token, token + tokens) of x as one tile: out[k * tokens + t].
template <typename T, typename Source>
void FillTile(ConstTensorView x, int64_t token, int64_t tokens, float* out) {
  const int64_t k_size = x.shape[1];
  for (int64_t t = 0; t < tokens; ++t) {
    const Source row{x.row<T>(token + t)};
    for (int64_t k = 0; k < k_size; ++k) out[k * tokens + t] = row[k];
  }
}

void FillTile(ConstTensorView x, int64_t token, int64_t tokens, float* out) {
  if (x.dtype == DType::kF32) return FillTile<float, F32Source>(x, token, tokens, out);
  if (x.dtype == DType::kBF16) return FillTile<BF16, BF16Source>(x, token, tokens, out);
  FillTile<uint8_t, E4M3Source>(x, token, tokens, out);
}

// `out` of rank 3: the sums of the virtual shards, kept apart.
absl::Status GemmCpu(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                     const ConstTensorView* act_scales, TensorView out) {
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
  // Tiles of one block of rows follow each other: its weights stay in the cache.
  ctx->pool->ParallelFor(blocks * num_tiles, [&](int64_t i) {
    task(args, i / num_tiles * kTaskGroups, i % num_tiles * kTileTokens);
  });
  return absl::OkStatus();
}

struct Arm {
  DeviceType device;
  absl::Status (*run)(ExecContext*, const GemmWeight&, ConstTensorView, const ConstTensorView*,
                      TensorView);
};
constexpr Arm kArms[] = {
    {DeviceType::kCpu, GemmCpu},
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

int64_t ActScalesPerToken(int64_t k, int64_t shard_size, int64_t act_group) {
  return k / shard_size * CeilDiv(shard_size, act_group);
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
  ctx->counters->op_launches.fetch_add(1, std::memory_order_relaxed);
  for (const Arm& arm : kArms) {
    if (arm.device == weight.device) return arm.run(ctx, weight, x, act_scales, out);
  }
  return absl::UnimplementedError("Gemm: this build has no arm for the weight's device");
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
