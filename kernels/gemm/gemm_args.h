// Plain structs of the matrix product: how a packed weight lies in memory and how its sums are cut
// and scaled. Nothing but data here, so that sources built for any instruction set may include it.
//
// Packed codes. Rows are taken in groups of 16 (the last group may have fewer). A group holds, for
// every unit of K, the codes of its rows side by side:
//   offset of (row, unit) = (group * 16 * units + unit * rows_in_group + row % 16) * unit_bytes
// A unit is one element (F32, BF16, E4M3) or a byte with two E2M1 codes (even k in the low nibble).
// The E4M3 block scales of NVFP4 are packed the same way, one unit per 16 of K.
#pragma once

#include <cstdint>

namespace lockstep {

enum class WeightFormat : int { kF32, kBF16, kFp8, kNvfp4 };

// What multiplies the fp32 sum of a segment.
enum class WeightScaling : int {
  kNone,
  kTensor,    // one number
  kChannel,   // one per row
  kBlock128,  // one per 128 x 128 block of the full tensor
};

// A run of K with one accumulator. Sums of a segment start from zero, are scaled, and add to the
// sum of their virtual shard in ascending order; the shards join as a tree.
struct KSegment {
  int64_t begin = 0;  // of the rank's columns
  int64_t end = 0;
  int64_t shard = 0;         // local virtual shard
  int64_t weight_scale = 0;  // column of the 128-block scales held
  int64_t act_scale = 0;     // column of the activation scales
};

// Rows [begin, end) of the packed weight are consecutive rows of the full tensor, the first of
// which is row `offset` of its 128-block; that block's scales are row `scale_row` of the scales
// held.
struct BlockRows {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t offset = 0;
  int64_t scale_row = 0;
};

constexpr int kGroupRows = 16;   // rows per packed group
constexpr int kTaskGroups = 4;   // groups per task
constexpr int kTileTokens = 16;  // rows of x per tile
constexpr int kTaskTokens = 64;  // rows of x per task: whole tiles
constexpr int kMaxShards = 8;    // virtual shards of one rank

struct GemmArgs {
  WeightFormat format = WeightFormat::kF32;
  WeightScaling scaling = WeightScaling::kNone;
  int64_t n = 0;
  int64_t k = 0;
  int64_t m = 0;
  const uint8_t* codes = nullptr;
  const uint8_t* block16_scales = nullptr;  // NVFP4
  float tensor_scale = 1.0f;
  const void* scales = nullptr;  // kChannel [n], kBlock128 [rows, scale_columns]
  bool scales_bf16 = false;      // else F32
  int64_t scale_columns = 0;
  const BlockRows* block_rows = nullptr;
  int64_t num_block_rows = 0;
  const KSegment* segments = nullptr;
  int64_t num_segments = 0;
  int64_t shards = 1;
  // Tiles of 16 rows of x (the last may have fewer): x[k * rows_in_tile + row] within the tile.
  const float* x = nullptr;
  const float* act_scales = nullptr;  // nullptr: none
  int64_t act_scale_stride = 0;
  void* out = nullptr;
  bool out_bf16 = false;
  int64_t out_stride = 0;
  int64_t out_shard_stride = 0;  // F32 elements between the sums of virtual shards; 0: they join
};

}  // namespace lockstep
