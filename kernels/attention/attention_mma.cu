// Paged attention with tensor cores. Rows of a tile are (token, query head) pairs of one kv head.
// What one row is given, in every tile and on both paths:
//   scores    mma k16 steps over head_dim, ascending, from zero; times scale * log2(e)
//   softmax   per key block of 64: exact maximum; 2^(x - maximum) in F32, rounded to BF16 for the
//             product with V; the F32 values add as one tree over the block's 64 keys
//   output    rescaled once per block; mma k16 steps over the block's keys, ascending
//   splits    kSplitBlocks key blocks from absolute position; a split starts from zero; splits
//   merge
//             in ascending order in F32 (Merge below)
// Few rows per kv head (a decoding sequence): one CTA per split, partials in the workspace, merged
// by MergeKernel. More rows: one CTA walks all splits and merges in registers. A row stores its
// result at its own last key block, so that later blocks of its tile cannot reach it. Keys and
// values past the tile's last position are zeros in shared memory, whatever the cache holds.
#include <cmath>

#include "kernels/attention/attention_launch.h"
#include "kernels/attention/attention_mma.cuh"
#include "kernels/base/float_types.h"
#include "kernels/base/math.h"

namespace lockstep {
namespace {

constexpr int kBlock = static_cast<int>(kKeyBlock);
constexpr int kSplit = static_cast<int>(kSplitBlocks);
constexpr int kTileRows = 16;                   // of an mma
constexpr int64_t kMaxPartialBytes = 96 << 20;  // longer batches walk their splits
constexpr unsigned kFullMask = ~0u;

// Rows of one slot of partials: those of one split and one kv head.
__host__ __device__ int64_t SlotRows(const AttentionProblem& p) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  if (p.num_tokens == p.num_sequences || group >= kTileRows) return group;
  return kTileRows / group * group;
}

__device__ float Merge(float x, float scale, float y, float y_scale) {
  return __fmaf_rn(x, scale, __fmul_rn(y, y_scale));
}

// A sequence and a place in it.
struct Found {
  int b;       // -1: there is none
  int offset;  // of the wanted slot or tile in the sequence
  int first_slot;
  bool split;  // its splits are units of their own
};

enum class Want { kSlot, kTile, kSequence };

__device__ int InclusiveSum(int x) {
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(kFullMask, x, step);
    if ((threadIdx.x & 31) >= step) x += y;
  }
  return x;
}

// The sequence of slot, tile or sequence number `index`, called by whole warps. Slots are numbered
// over the sequences with few rows, as long as there is room for their partials; tiles of kRows
// rows over the others.
template <Want kWant, int kRows>
__device__ Found Find(const AttentionProblem& p, int index) {
  const int lane = threadIdx.x & 31;
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);
  int slot_base = 0, tile_base = 0;
  for (int first_b = 0; first_b < p.num_sequences; first_b += 32) {
    const int b = first_b + lane;
    int rows = 0, end = 0;
    if (b < p.num_sequences) {
      rows = p.row_offsets[b + 1] - p.row_offsets[b];
      end = p.start_positions[b] + rows;
    }
    const bool few = rows == 1 || (rows > 0 && rows * group <= kTileRows);
    const int slots = few ? (end + kSplit * kBlock - 1) / (kSplit * kBlock) : 0;
    const int slot_sum = InclusiveSum(slots);
    const int first_slot = slot_base + slot_sum - slots;
    const bool split = few && first_slot + slots <= p.partial_splits;
    const int tiles = rows > 0 && !split ? (rows * group + kRows - 1) / kRows : 0;
    int first = first_slot, count = split ? slots : 0;
    if (kWant == Want::kTile) {
      const int tile_sum = InclusiveSum(tiles);
      first = tile_base + tile_sum - tiles;
      count = tiles;
      tile_base += __shfl_sync(kFullMask, tile_sum, 31);
    } else if (kWant == Want::kSequence) {
      first = b;
      count = rows > 0 ? 1 : 0;
    }
    const unsigned hits = __ballot_sync(kFullMask, index >= first && index < first + count);
    if (hits != 0) {
      const int from = __ffs(static_cast<int>(hits)) - 1;
      Found found;
      found.b = first_b + from;
      found.offset = index - __shfl_sync(kFullMask, first, from);
      found.first_slot = __shfl_sync(kFullMask, first_slot, from);
      found.split = __shfl_sync(kFullMask, static_cast<int>(split), from) != 0;
      return found;
    }
    slot_base += __shfl_sync(kFullMask, slot_sum, 31);
  }
  return {-1, 0, 0, false};
}

// The work of one CTA between two loads of queries.
struct Unit {
  int kv_head;
  int b;
  int begin;        // first row of the sequence in the batch
  int start;        // its position
  int first_row;    // of the tile among the sequence's (token, head) rows
  int num_rows;     // of the sequence
  int first_block;  // key blocks [first_block, end_block)
  int end_block;
  int max_position;  // of the tile
  int slot;          // of the partials
  bool valid;
};

template <int kDim, int kTiles, int kGroups, bool kWalk>
struct Config {
  static constexpr int kRows = kTileRows * kTiles * kGroups;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kTileBytes = kBlock * kRowBytes;
  // Tiles of keys or values in shared memory. A walk uses two at once.
  static constexpr int kStages = kDim != 256 ? 6 : kWalk ? 5 : 3;
  static constexpr int kQBuffers = kWalk ? 1 : kStages / 2 + 1;
  static constexpr int kUnits = 8;  // more than are ever known at once
  static constexpr int kQBytes = kRows * kRowBytes;
  static constexpr int kWeightsBytes = kRows * kBlock * 2;
  static constexpr int kMaximaBytes = kRows * 4 * 4;
  static constexpr int kSumsBytes = kRows * 4 * 4 * 4;
  static constexpr int kBytes = kStages * kTileBytes + kQBuffers * kQBytes + kWeightsBytes +
                                kMaximaBytes + kSumsBytes + kUnits * static_cast<int>(sizeof(Unit));
};

template <typename C, bool kWalk>
__device__ Unit FindUnit(const AttentionProblem& p, int index, int num_tiles_bound) {
  const int heads = static_cast<int>(p.num_kv_heads);
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);
  Unit unit;
  unit.valid = false;
  unit.kv_head = index % heads;
  Found found;
  int tile;
  if (kWalk) {
    // Long rows first.
    found = Find<Want::kTile, C::kRows>(p, num_tiles_bound - 1 - index / heads);
    tile = found.offset;
  } else {
    const int tiles = (group + kTileRows - 1) / kTileRows;
    found = Find<Want::kSlot, C::kRows>(p, index / heads / tiles);
    tile = index / heads % tiles;
  }
  if (found.b < 0) return unit;
  unit.b = found.b;
  unit.begin = p.row_offsets[found.b];
  unit.start = p.start_positions[found.b];
  unit.num_rows = (p.row_offsets[found.b + 1] - unit.begin) * group;
  unit.first_row = tile * C::kRows;
  if (unit.first_row >= unit.num_rows) return unit;
  const int last_row = min(unit.first_row + C::kRows, unit.num_rows) - 1;
  unit.max_position = unit.start + last_row / group;
  const int blocks = unit.max_position / kBlock + 1;
  unit.first_block = kWalk ? 0 : found.offset * kSplit;
  unit.end_block = kWalk ? blocks : min(blocks, unit.first_block + kSplit);
  unit.slot = found.first_slot + found.offset;
  unit.valid = true;
  return unit;
}

// round(round(x) * sigmoid(gate)), or round(x): the elements i and i + 1 of a row's output.
__device__ void StoreOutput(const AttentionProblem& p, int64_t t, int64_t h, int i, float x0,
                            float x1) {
  const int64_t dim = p.head_dim;
  __nv_bfloat162 y = __floats2bfloat162_rn(x0, x1);
  if (p.output_gate) {
    const __nv_bfloat16* gates = static_cast<const __nv_bfloat16*>(p.q_and_gate) +
                                 t * p.q_and_gate_stride + (2 * h + 1) * dim + i;
    const float g0 = Sigmoid(__bfloat162float(gates[0]));
    const float g1 = Sigmoid(__bfloat162float(gates[1]));
    y = __floats2bfloat162_rn(__fmul_rn(__low2float(y), g0), __fmul_rn(__high2float(y), g1));
  }
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + t * p.out_stride + h * dim + i;
  *reinterpret_cast<__nv_bfloat162*>(out) = y;
}

// The four warps that share rows.
template <int kGroups>
__device__ void SyncRowGroup(int row_group) {
  if (kGroups == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, 128;" ::"r"(row_group + 1) : "memory");
  }
}

template <int kDim, int kTiles, int kGroups, bool kWalk>
__global__ void __launch_bounds__(128 * kGroups, kWalk ? 1 : 2)
    AttentionKernel(const AttentionProblem p, int num_tiles_bound) {
  using C = Config<kDim, kTiles, kGroups, kWalk>;
  constexpr int kChunks = kDim / 8;       // 16-byte chunks per row
  constexpr int kWarpDims = kDim / 4;     // of the output, per warp
  constexpr int kPairs = kWarpDims / 16;  // of n8 tiles
  constexpr int kGroupRows = kTileRows * kTiles;
  extern __shared__ __align__(128) uint8_t shared[];
#if __CUDA_ARCH__ >= 900
  if (!kWalk) cudaTriggerProgrammaticLaunchCompletion();  // MergeKernel waits by itself
#endif
  const uint32_t stages = SharedAddress(shared);
  const uint32_t queries = stages + C::kStages * C::kTileBytes;
  uint8_t* const weights = shared + C::kStages * C::kTileBytes + C::kQBuffers * C::kQBytes;
  const uint32_t weights_address = SharedAddress(weights);
  float* const maxima = reinterpret_cast<float*>(weights + C::kWeightsBytes);
  float* const sums = maxima + C::kMaximaBytes / 4;
  Unit* const units = reinterpret_cast<Unit*>(sums + C::kSumsBytes / 4);

  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int quad = lane & 3, row_in_tile = lane >> 2;
  const int row_group = warp / 4, part = warp % 4;
  const int group_row = row_group * kGroupRows;
  const int heads = static_cast<int>(p.num_kv_heads);
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);
  const float scale_log2 = __fmul_rn(p.scale, 1.44269504f);

  // Loads run ahead of the computation, across units.
  Unit load = FindUnit<C, kWalk>(p, blockIdx.x, num_tiles_bound);
  int load_index = blockIdx.x, load_count = 0, load_block = 0, load_tile = 0, next_page = 0;
  bool load_values = false;
  int load_value_block = 0, page_of_even = 0, page_of_odd = 0;  // of a walk
  const auto begin_unit = [&] {
    if (thread == 0) units[load_count % C::kUnits] = load;
    if (!load.valid) return;
    load_block = load.first_block;
    next_page = p.block_table[load.b * p.block_table_stride + load_block];
  };
  begin_unit();
  const auto load_next = [&] {
    if (load.valid) {
      int block = load_block, page = next_page;
      if (kWalk) {
        // Keys of block n + 1 come before values of block n.
        load_values = load_block == load.end_block || load_block == load_value_block + 2;
        if (load_values) {
          block = load_value_block;
          page = block % 2 == 0 ? page_of_even : page_of_odd;
        } else if (block % 2 == 0) {
          page_of_even = page;
        } else {
          page_of_odd = page;
        }
      }
      const int64_t tile = (static_cast<int64_t>(page) * heads + load.kv_head) * kBlock * kDim;
      const __nv_bfloat16* from =
          static_cast<const __nv_bfloat16*>(load_values ? p.values : p.keys) + tile;
      const uint32_t to = stages + load_tile % C::kStages * C::kTileBytes;
      const int rows = load.max_position + 1 - block * kBlock;
#pragma unroll
      for (int i = 0; i < kBlock * kChunks / C::kThreads; ++i) {
        const int chunk = i * C::kThreads + thread, row = chunk / kChunks;
        CopyAsync16(to + TileOffset<C::kRowBytes>(row, chunk % kChunks), from + chunk * 8,
                    row >= rows);
      }
      if (!load_values && block == load.first_block) {
        const uint32_t q_to = queries + load_count % C::kQBuffers * C::kQBytes;
#pragma unroll
        for (int i = 0; i < (C::kRows * kChunks + C::kThreads - 1) / C::kThreads; ++i) {
          const int chunk = i * C::kThreads + thread, row = chunk / kChunks;
          if (row >= C::kRows) break;
          const int r = load.first_row + row;
          const bool zeros = r >= load.num_rows;
          const int64_t t = load.begin + (zeros ? 0 : r / group);
          const int64_t h = load.kv_head * group + (zeros ? 0 : r % group);
          const __nv_bfloat16* q =
              static_cast<const __nv_bfloat16*>(p.q) + t * p.q_stride + h * kDim;
          CopyAsync16(q_to + TileOffset<C::kRowBytes>(row, chunk % kChunks),
                      q + chunk % kChunks * 8, zeros);
        }
      }
      ++load_tile;
      const auto next_block = [&] {
        ++load_block;
        if (load_block < load.end_block) {
          next_page = p.block_table[load.b * p.block_table_stride + load_block];
        }
      };
      if (kWalk) {
        if (!load_values) {
          next_block();
        } else if (++load_value_block == load.end_block) {
          ++load_count;
          load.valid = false;
          begin_unit();
        }
      } else {
        if (load_values) {
          next_block();
          if (load_block == load.end_block) {
            ++load_count;
            load_index += gridDim.x;
            load = FindUnit<C, kWalk>(p, load_index, num_tiles_bound);
            begin_unit();
          }
        }
        load_values = !load_values;
      }
    }
    CommitCopies();
  };
  // A walk fills every stage at first, since its second step has two tiles.
#pragma unroll
  for (int i = 0; i < C::kStages - (kWalk ? 0 : 1); ++i) load_next();

  const auto stage_of = [&](int tile) -> uint32_t {
    return stages + tile % C::kStages * C::kTileBytes;
  };
  int tile = 0;
  const auto next_tile = [&]() -> uint32_t {
    WaitCopies<C::kStages - 2>();
    __syncthreads();
    load_next();
    return stage_of(tile++);
  };

  for (int count = 0;; ++count) {
    uint32_t keys;
    if (kWalk) {
      WaitCopies<C::kStages - 1>();
      __syncthreads();
      keys = stage_of(0);
    } else {
      keys = next_tile();
    }
    const Unit unit = units[count % C::kUnits];
    if (!unit.valid) break;
    const uint32_t q = queries + count % C::kQBuffers * C::kQBytes;
    int limit[kTiles][2];  // position of the row; padding rows have the tile's last one
    float maximum[kTiles][2], sum[kTiles][2], out[kTiles][2 * kPairs][4];
    // The merged splits, of a walk.
    constexpr int kMerged = kWalk ? kTiles : 1;
    constexpr int kMergedPairs = kWalk ? kPairs : 1;
    float merged_maximum[kMerged][2], merged_sum[kMerged][2];
    float merged[kMerged][2 * kMergedPairs][4];
    int first_last_block = unit.end_block - 1;  // of the rows of this warp's threads
    const auto reset = [&] {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        maximum[i][0] = maximum[i][1] = -INFINITY;
        sum[i][0] = sum[i][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out[i][n][e] = 0.0f;
        }
      }
    };
    reset();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = unit.first_row + group_row + 16 * i + 8 * half + row_in_tile;
        limit[i][half] = min(unit.start + r / group, unit.max_position);
        first_last_block = min(first_last_block, limit[i][half] / kBlock);
      }
    }
    if (kWalk) {
#pragma unroll
      for (int i = 0; i < kMerged; ++i) {
        merged_maximum[i][0] = merged_maximum[i][1] = -INFINITY;
        merged_sum[i][0] = merged_sum[i][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * kMergedPairs; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) merged[i][n][e] = 0.0f;
        }
      }
    }

    float x[kTiles][2][4], rescale[kTiles][2];
    // Scores of this warp's sixteen keys.
    const auto score = [&](uint32_t keys_tile) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][0][e] = x[i][1][e] = 0.0f;
      }
#pragma unroll 4
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t b[4];
        LoadMatrix(b, keys_tile + TileOffset<C::kRowBytes>(16 * part + (lane >> 4) * 8 + (lane & 7),
                                                           2 * k + ((lane >> 3) & 1)));
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint32_t a[4];
          LoadMatrix(a, q + TileOffset<C::kRowBytes>(group_row + 16 * i + (lane & 15),
                                                     2 * k + (lane >> 4)));
          MmaBf16(x[i][0], a, b[0], b[1]);
          MmaBf16(x[i][1], a, b[2], b[3]);
        }
      }
    };
    // Weights of the block's keys, by the four warps that share its rows.
    const auto weigh = [&](int block) {
      const int first_key = block * kBlock + 16 * part + 2 * quad;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float largest = -INFINITY;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& score = x[i][n][2 * half + e];
              score = __fmul_rn(score, scale_log2);
              if (first_key + 8 * n + e > limit[i][half]) score = -INFINITY;
              largest = fmaxf(largest, score);
            }
          }
          largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
          const int row = group_row + 16 * i + 8 * half + row_in_tile;
          if (quad == 0) maxima[row * 4 + part] = largest;
        }
      }
      SyncRowGroup<kGroups>(row_group);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = group_row + 16 * i + 8 * half + row_in_tile;
          const float4 m = *reinterpret_cast<const float4*>(maxima + row * 4);
          const float largest = fmaxf(maximum[i][half], fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)));
          rescale[i][half] = Exp2(__fsub_rn(maximum[i][half], largest));
          maximum[i][half] = largest;
          float w[4];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              w[2 * n + e] = Exp2(__fsub_rn(x[i][n][2 * half + e], largest));
            }
            *reinterpret_cast<uint32_t*>(weights + TileOffset<2 * kBlock>(row, 2 * part + n) +
                                         4 * quad) = PackBf16(w[2 * n], w[2 * n + 1]);
          }
          sums[row * 16 + part * 4 + quad] =
              __fadd_rn(__fadd_rn(w[0], w[1]), __fadd_rn(w[2], w[3]));
        }
      }
    };
    // Adds the block's values to the output.
    const auto add = [&](uint32_t values) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* s = sums + (group_row + 16 * i + 8 * half + row_in_tile) * 16 + quad;
          float total = __fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[8], s[12]));
          total = __fadd_rn(total, __shfl_xor_sync(kFullMask, total, 1));
          total = __fadd_rn(total, __shfl_xor_sync(kFullMask, total, 2));
          sum[i][half] = __fmaf_rn(sum[i][half], rescale[i][half], total);
        }
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out[i][n][e] = __fmul_rn(out[i][n][e], rescale[i][e / 2]);
        }
      }
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k) {
        uint32_t a[kTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          LoadMatrix(a[i],
                     weights_address + TileOffset<2 * kBlock>(group_row + 16 * i + (lane & 15),
                                                              2 * k + (lane >> 4)));
        }
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          uint32_t b[4];
          LoadMatrixTransposed(
              b, values + TileOffset<C::kRowBytes>(16 * k + (lane & 15),
                                                   (part * kWarpDims + 16 * n) / 8 + (lane >> 4)));
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            MmaBf16(out[i][2 * n], a[i], b[0], b[1]);
            MmaBf16(out[i][2 * n + 1], a[i], b[2], b[3]);
          }
        }
      }
    };
    const auto end_block = [&](int block) {
      // Rows whose last block this is.
      if (block >= first_last_block) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = unit.first_row + group_row + 16 * i + 8 * half + row_in_tile;
            const int last = min(limit[i][half] / kBlock, unit.end_block - 1);
            if (r >= unit.num_rows || last != block) continue;
            const int first_dim = part * kWarpDims + 2 * quad;
            if (kWalk) {
              const int mi = kWalk ? i : 0;
              const float m = fmaxf(merged_maximum[mi][half], maximum[i][half]);
              const float old_scale = Exp2(__fsub_rn(merged_maximum[mi][half], m));
              const float new_scale = Exp2(__fsub_rn(maximum[i][half], m));
              const float total = Merge(merged_sum[mi][half], old_scale, sum[i][half], new_scale);
              const float inverse = __fdiv_rn(1.0f, total);
              const int64_t t = unit.begin + r / group, h = unit.kv_head * group + r % group;
#pragma unroll
              for (int n = 0; n < 2 * kMergedPairs; ++n) {
                const float y0 =
                    Merge(merged[mi][n][2 * half], old_scale, out[i][n][2 * half], new_scale);
                const float y1 = Merge(merged[mi][n][2 * half + 1], old_scale,
                                       out[i][n][2 * half + 1], new_scale);
                StoreOutput(p, t, h, first_dim + 8 * n, __fmul_rn(y0, inverse),
                            __fmul_rn(y1, inverse));
              }
            } else {
              const int64_t slot_rows = SlotRows(p);
              const int64_t slot_row =
                  (static_cast<int64_t>(unit.slot) * heads + unit.kv_head) * slot_rows + r;
              float* to = p.partials + slot_row * kDim + first_dim;
#pragma unroll
              for (int n = 0; n < 2 * kPairs; ++n) {
                *reinterpret_cast<float2*>(to + 8 * n) =
                    make_float2(out[i][n][2 * half], out[i][n][2 * half + 1]);
              }
              if (part == 0 && quad == 0) {
                float* scalars = p.partials + p.partial_splits * heads * slot_rows * kDim;
                *reinterpret_cast<float2*>(scalars + 2 * slot_row) =
                    make_float2(maximum[i][half], sum[i][half]);
              }
            }
          }
        }
      }
      if (kWalk && block % kSplit == kSplit - 1) {
#pragma unroll
        for (int i = 0; i < kMerged; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float m = fmaxf(merged_maximum[i][half], maximum[i][half]);
            const float old_scale = Exp2(__fsub_rn(merged_maximum[i][half], m));
            const float new_scale = Exp2(__fsub_rn(maximum[i][half], m));
            merged_maximum[i][half] = m;
            merged_sum[i][half] = Merge(merged_sum[i][half], old_scale, sum[i][half], new_scale);
#pragma unroll
            for (int n = 0; n < 2 * kMergedPairs; ++n) {
#pragma unroll
              for (int e = 2 * half; e < 2 * half + 2; ++e) {
                merged[i][n][e] = Merge(merged[i][n][e], old_scale, out[i][n][e], new_scale);
              }
            }
          }
        }
        reset();
      }
    };

    if (kWalk) {
      // The scores of the next block and the output of this one are one step between barriers.
      score(keys);
      int next = 1;
      for (int block = 0; block < unit.end_block; ++block) {
        weigh(block);
        WaitCopies<C::kStages - 4>();
        __syncthreads();
        load_next();
        if (block > 0) load_next();
        if (block + 1 < unit.end_block) score(stage_of(next++));
        add(stage_of(next++));
        end_block(block);
      }
    } else {
      for (int block = unit.first_block; block < unit.end_block; ++block) {
        if (block != unit.first_block) keys = next_tile();
        score(keys);
        weigh(block);
        add(next_tile());
        end_block(block);
      }
    }
    if (kWalk) break;  // one unit
  }
  WaitCopies<0>();
}

// Merges the partials of one sequence and query head; two elements of the output per thread.
template <int kDim>
__global__ void MergeKernel(const AttentionProblem p) {
  constexpr int kAhead = 8;  // splits that are read at once
  const int b = blockIdx.x / static_cast<int>(p.num_q_heads);
  const int h = blockIdx.x % static_cast<int>(p.num_q_heads);
  const Found found = Find<Want::kSequence, kTileRows>(p, b);
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  if (found.b < 0 || !found.split) return;
  const int heads = static_cast<int>(p.num_kv_heads);
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);
  const int64_t slot_rows = SlotRows(p);
  const float* scalars = p.partials + p.partial_splits * heads * slot_rows * kDim;
  const int begin = p.row_offsets[b], tokens = p.row_offsets[b + 1] - begin;
  for (int token = 0; token < tokens; ++token) {
    const int splits = (p.start_positions[b] + token) / (kSplit * kBlock) + 1;
    const int64_t first_row =
        (static_cast<int64_t>(found.first_slot) * heads + h / group) * slot_rows + token * group +
        h % group;
    float maximum = -INFINITY, sum = 0.0f;
    float2 out = make_float2(0.0f, 0.0f);
    for (int first = 0; first < splits; first += kAhead) {
      float2 part[kAhead], scalar[kAhead];
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (first + s >= splits) break;
        const int64_t row = first_row + (first + s) * heads * slot_rows;
        scalar[s] = *reinterpret_cast<const float2*>(scalars + 2 * row);
        part[s] = *reinterpret_cast<const float2*>(p.partials + row * kDim + 2 * threadIdx.x);
      }
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (first + s >= splits) break;
        const float m = fmaxf(maximum, scalar[s].x);
        const float old_scale = Exp2(__fsub_rn(maximum, m));
        const float new_scale = Exp2(__fsub_rn(scalar[s].x, m));
        maximum = m;
        sum = Merge(sum, old_scale, scalar[s].y, new_scale);
        out.x = Merge(out.x, old_scale, part[s].x, new_scale);
        out.y = Merge(out.y, old_scale, part[s].y, new_scale);
      }
    }
    const float inverse = __fdiv_rn(1.0f, sum);
    StoreOutput(p, begin + token, h, 2 * static_cast<int>(threadIdx.x), __fmul_rn(out.x, inverse),
                __fmul_rn(out.y, inverse));
  }
}

template <int kDim>
LaunchStatus Launch(const AttentionProblem& p, cudaStream_t stream) {
  using Split = Config<kDim, 1, 1, false>;
  using Walk = Config<kDim, 2, 2, true>;
  int device = 0, processors = 0, capability = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
  }
  auto* split = AttentionKernel<kDim, 1, 1, false>;
  auto* walk = AttentionKernel<kDim, 2, 2, true>;
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(split, cudaFuncAttributeMaxDynamicSharedMemorySize, Split::kBytes);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(walk, cudaFuncAttributeMaxDynamicSharedMemorySize, Walk::kBytes);
  }
  if (error != cudaSuccess) return static_cast<LaunchStatus>(error);

  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const int64_t max_splits = p.num_sequences * ((p.max_blocks + kSplit - 1) / kSplit);
  if (p.num_tokens > p.num_sequences || max_splits > p.partial_splits) {
    const int64_t tiles = p.num_tokens * group / Walk::kRows + p.num_sequences;
    const int64_t blocks = tiles * p.num_kv_heads;
    if (blocks > 0x7fffffff) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
    walk<<<static_cast<unsigned>(blocks), Walk::kThreads, Walk::kBytes, stream>>>(
        p, static_cast<int>(tiles));
  }
  const int64_t units = p.partial_splits * p.num_kv_heads * ((group + kTileRows - 1) / kTileRows);
  const int64_t blocks = units < 2 * processors ? units : 2 * processors;
  if (blocks > 0) {
    split<<<static_cast<unsigned>(blocks), Split::kThreads, Split::kBytes, stream>>>(p, 0);
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = capability >= 9 ? 1 : 0;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(p.num_sequences * p.num_q_heads));
    config.blockDim = dim3(kDim / 2);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return static_cast<LaunchStatus>(cudaLaunchKernelEx(&config, MergeKernel<kDim>, p));
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

const char* CannotRunAttentionMma(const AttentionProblem& p) {
  if (!p.bf16 || !p.cache_bf16) return "needs BF16 activations and a BF16 cache";
  if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256) {
    return "needs a head_dim of 64, 128 or 256";
  }
  return nullptr;
}

int64_t AttentionPartialSplits(const AttentionProblem& p) {
  const int64_t wanted = p.num_sequences * ((p.max_blocks + kSplit - 1) / kSplit);
  const int64_t row_bytes = (p.head_dim + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t room = kMaxPartialBytes / (p.num_kv_heads * SlotRows(p) * row_bytes);
  return wanted < room ? wanted : room;
}

int64_t AttentionPartialFloats(const AttentionProblem& p) {
  return AttentionPartialSplits(p) * p.num_kv_heads * SlotRows(p) * (p.head_dim + 2);
}

LaunchStatus LaunchAttentionMma(const AttentionProblem& p, void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return p.head_dim == 64    ? Launch<64>(p, s)
         : p.head_dim == 128 ? Launch<128>(p, s)
                             : Launch<256>(p, s);
}

}  // namespace lockstep
