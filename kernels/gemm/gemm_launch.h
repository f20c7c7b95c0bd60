// The matrix product on CUDA: what a launch needs, and the choice of its tile. Pointers are device
// memory, packed by pack_fragments.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gemm/gemm_args.h"
#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int kMaxBlockRows = 8;  // BlockRows that fit the arguments of a kernel

struct GemmCudaProblem {
  WeightFormat format = WeightFormat::kBF16;
  WeightScaling scaling = WeightScaling::kNone;
  int64_t n = 0;
  int64_t k = 0;
  int64_t m = 0;
  // K is cut into `leaves` equal parts with sums of their own: `splits` per virtual shard.
  int leaves = 1;
  int splits = 1;
  int64_t leaf_k = 0;  // a multiple of 16
  // Segments of a leaf end at every 128 of the full tensor's columns (the first column held is
  // `first_column`) when there are 128-block scales, and at every `act_group` of a shard.
  bool weight_blocks = false;
  int64_t first_column = 0;
  int64_t act_group = 0;  // 0: none
  const void* codes = nullptr;
  const void* block16_scales = nullptr;
  float tensor_scale = 1.0f;
  const void* scales = nullptr;
  bool scales_bf16 = false;
  int64_t scale_columns = 0;
  int num_block_rows = 0;
  BlockRows block_rows[kMaxBlockRows];
  const void* x = nullptr;  // BF16 or E4M3 codes
  bool x_codes = false;
  int64_t x_stride = 0;
  const float* act_scales = nullptr;
  int64_t act_scale_stride = 0;
  void* out = nullptr;
  bool out_bf16 = false;
  int64_t out_stride = 0;
  bool keep_shards = false;  // out holds the sums of each virtual shard
  int64_t out_shard_stride = 0;
};

// Weights on their way to a warp pass through a ring of stages in shared memory.
constexpr int kGemmStageBytes = 2048 + 256;

// How a launch is cut. Nothing of it may change a bit of the result.
struct GemmTile {
  int token_blocks = 1;  // of 8 tokens each, per CTA: 1, 2 or 4
  int warps = 4;         // per CTA: 4 or 8; each takes one group of 16 rows at a time
  int groups = 1;        // groups per warp, one after the other
  int stages = 4;        // of a warp's ring of weights: 2 to 4
  int phase_steps = 16;  // k16 steps of activations held in shared memory: all, or a multiple of 16
};

struct GemmShape {
  WeightFormat format = WeightFormat::kBF16;
  int64_t n = 0;
  int64_t m = 0;
  int leaves = 1;
  int64_t leaf_steps = 0;  // k16 steps of a leaf
};

// Shared memory of a CTA: rings of weights, activations of a phase, and the sums of its rows.
inline int64_t GemmSharedBytes(const GemmTile& tile, int64_t m) {
  const int64_t tokens = std::min<int64_t>(m, tile.token_blocks * 8);
  const int64_t pairs = (tile.phase_steps + 1) / 2;
  return tile.warps * tile.stages * (kGemmStageBytes + 8) + pairs * tokens * 64 +
         int64_t{tile.warps} * tile.groups * tile.token_blocks * 512;
}

// Measured on an H200: CTAs of eight warps with one group each, several where there is work for
// more warps than the device holds; the ring is as deep as leaves three CTAs on an SM.
inline GemmTile ChooseGemmTile(const GemmShape& shape) {
  constexpr int64_t kWholeLeafBytes = 96 << 10;
  constexpr int64_t kPhaseBytes = 48 << 10;
  constexpr int64_t kManyTasks = 6000;  // (group, leaf) pairs
  constexpr int64_t kSomeTasks = 3000;
  GemmTile tile;
  tile.token_blocks = shape.m <= 8 ? 1 : shape.m <= 16 ? 2 : 4;
  const int64_t tokens = std::min<int64_t>(shape.m, tile.token_blocks * 8);
  const int64_t step_bytes = tokens * 32;
  const bool whole = shape.leaf_steps * step_bytes <= kWholeLeafBytes;
  tile.phase_steps = static_cast<int>(
      whole ? shape.leaf_steps : std::max<int64_t>(16, kPhaseBytes / step_bytes / 16 * 16));
  tile.stages = tokens <= 4 ? 3 : 2;
  const int64_t tasks = (shape.n + 15) / 16 * shape.leaves;
  tile.warps = tile.token_blocks == 2 && tasks > kSomeTasks && tasks <= kManyTasks ? 4 : 8;
  const bool several = tasks > (tile.token_blocks == 1 ? kManyTasks : kSomeTasks);
  tile.groups = whole && several && tile.token_blocks <= 2 ? 3 : 1;
  return tile;
}

// Whether a leaf may have more than one segment.
inline bool IsSegmented(const GemmCudaProblem& p) {
  return p.weight_blocks || (p.act_group != 0 && p.act_group < p.leaf_k * p.splits);
}

// Which instructions multiply. All kernels give the same bits wherever they can run.
enum class GemmKernel {
  kFewTokens,   // of warps
  kSomeTokens,  // of warpgroups, a CTA per leaf
  kManyTokens,  // of warpgroups, a CTA for all leaves
};
constexpr int kGemmWgmmaCtas = 132;  // that stay, with many tokens

// Whether warpgroups can multiply: x in rows of 16 bytes, segments of whole chunks of 64 columns.
inline bool CanRunGemmWgmma(const GemmCudaProblem& p) {
  const int64_t unit = p.x_codes ? 1 : 2;
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride * unit % 16 == 0;
  const bool chunks =
      !IsSegmented(p) || (p.leaf_k % 64 == 0 && p.first_column % 64 == 0 && p.act_group % 64 == 0);
  return aligned && chunks;
}
// The fastest kernel that a shape may have.
inline GemmKernel ChooseGemmKernel(const GemmShape& shape) {
  if (shape.m <= 16) return GemmKernel::kFewTokens;
  const int64_t tiles = (shape.n + 255) / 256 * ((shape.m + 127) / 128);
  return shape.m > 64 && tiles >= 48 ? GemmKernel::kManyTokens : GemmKernel::kSomeTokens;
}
// F32 of scratch with many tokens: sums of subtrees of more than one leaf, per CTA.
inline int64_t GemmWgmmaScratch(const GemmShape& shape) {
  return shape.leaves > 2 ? int64_t{kGemmWgmmaCtas} * 2 * 256 * 128 : 0;
}

// By warpgroups. `expanded`: BF16 [m, k] for codes, else unused.
LaunchStatus LaunchGemmWgmma(const GemmCudaProblem& problem, GemmKernel kernel, void* expanded,
                             float* scratch, void* stream);

// Enqueues the product; nothing is allocated. The tile fits the device's shared memory.
LaunchStatus LaunchGemm(const GemmCudaProblem& problem, const GemmTile& tile, void* stream);

}  // namespace lockstep
