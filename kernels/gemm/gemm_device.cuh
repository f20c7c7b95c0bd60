// What the kernels of the matrix product share: chunks of weights, segments of K and their scales.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "kernels/gemm/fragment.cuh"
#include "kernels/gemm/gemm_launch.h"

namespace lockstep {

constexpr int kChunkSteps = 4;  // k16 steps that are read from shared memory together
template <WeightFormat kFormat>
struct Layout {
  static constexpr int kStepBytes = kFormat == WeightFormat::kNvfp4 ? 4
                                    : kFormat == WeightFormat::kFp8 ? 8
                                                                    : 16;
  static constexpr int kRun = 16 / kStepBytes;
  static constexpr int kLoads = kChunkSteps / kRun;  // of 16 bytes per lane and chunk
  static constexpr int kChunkBytes = kLoads * 512;   // of codes
  static constexpr int kStageChunks = 2048 / kChunkBytes;
  static constexpr int kScaleOffset = 2048;  // NVFP4: scales follow the codes
};

// Codes of one lane for 4 k16 steps.
template <WeightFormat kFormat>
struct Chunk {
  uint4 codes[Layout<kFormat>::kLoads];
  uint2 scales;  // NVFP4
};

__device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The memory of one (group, leaf).
struct Stream {
  const uint8_t* codes;
  const uint8_t* scales;
};

// A fragment of k16 step `step` of a chunk.
template <WeightFormat kFormat>
__device__ __forceinline__ void Decode(const Chunk<kFormat>& chunk, int step, uint32_t (&a)[4]) {
  constexpr int kLoads = Layout<kFormat>::kLoads;
  if (kFormat == WeightFormat::kNvfp4) {
    DecodeNvfp4(Word(chunk.codes[0], step), step < 2 ? chunk.scales.x : chunk.scales.y, step % 2,
                a);
  } else if (kFormat == WeightFormat::kFp8) {
    const uint4& v = chunk.codes[step / 2 % kLoads];
    DecodeFp8(Word(v, step % 2 * 2), Word(v, step % 2 * 2 + 1), a);
  } else {
    const uint4& v = chunk.codes[step % kLoads];
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  }
}

// A fragment of a k16 step of the last, short run: `first` is the run's first step, `length` its
// steps.
template <WeightFormat kFormat>
__device__ __forceinline__ void DecodeTail(const Stream& s, int step, int leaf_steps, int lane,
                                           uint32_t (&a)[4]) {
  using C = Layout<kFormat>;
  const int first = step / C::kRun * C::kRun;
  const int length = min(C::kRun, leaf_steps - first);
  const uint8_t* p = s.codes + int64_t{first} * 32 * C::kStepBytes +
                     (lane * length + step - first) * C::kStepBytes;
  if (kFormat == WeightFormat::kNvfp4) {
    const uint16_t scales = *reinterpret_cast<const uint16_t*>(
        s.scales + int64_t{first} * 16 + (lane / 4 * length + step - first) * 2);
    DecodeNvfp4(*reinterpret_cast<const uint32_t*>(p), scales, 0, a);
  } else if (kFormat == WeightFormat::kFp8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    DecodeFp8(v.x, v.y, a);
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  }
}

// Where segments of a leaf end and which scales they have.
struct SegmentCursor {
  int end_step;  // of the leaf
  int weight_column;
  int act_column;
};

__device__ __forceinline__ SegmentCursor SegmentAt(const GemmCudaProblem& p, int leaf, int step) {
  const int leaf_k = static_cast<int>(p.leaf_k);
  const int column = leaf * leaf_k + step * 16;
  const int shard = leaf / p.splits;
  const int shard_k = leaf_k * p.splits;
  const int shard_begin = shard * shard_k;
  int end = (leaf + 1) * leaf_k;
  SegmentCursor c = {0, 0, 0};
  if (p.weight_blocks) {
    const int first = static_cast<int>(p.first_column);
    const int block = (first + column) / 128;
    c.weight_column = block - first / 128;
    end = min(end, (block + 1) * 128 - first);
  }
  if (p.act_group != 0) {
    const int group_k = static_cast<int>(p.act_group);
    const int group = (column - shard_begin) / group_k;
    c.act_column = shard * ((shard_k + group_k - 1) / group_k) + group;
    end = min(end, shard_begin + (group + 1) * group_k);
  }
  c.end_step = (end - leaf * leaf_k) / 16;
  return c;
}

__device__ __forceinline__ float ScaleAt(const GemmCudaProblem& p, int64_t index) {
  if (p.scales_bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p.scales)[index]);
  return static_cast<const float*>(p.scales)[index];
}

// The scale of a row's segment.
__device__ __forceinline__ float WeightScale(const GemmCudaProblem& p, int64_t row, int column) {
  if (p.scaling == WeightScaling::kTensor) {
    // NVFP4 fragments hold 2^-8 of the values.
    return p.format == WeightFormat::kNvfp4 ? __fmul_rn(p.tensor_scale, 256.0f) : p.tensor_scale;
  }
  if (row >= p.n) return 1.0f;
  if (p.scaling == WeightScaling::kChannel) return ScaleAt(p, row);
  int i = 0;
  while (row >= p.block_rows[i].end) ++i;
  const BlockRows& b = p.block_rows[i];
  return ScaleAt(p, (b.scale_row + (row - b.begin + b.offset) / 128) * p.scale_columns + column);
}

// The scales of one segment for this lane's sums, read when it begins.
template <int kTokenBlocks>
struct SegmentScales {
  float low, high;  // of rows g and g + 8
  float act[kTokenBlocks][2];

  __device__ __forceinline__ void Read(const GemmCudaProblem& p, const SegmentCursor& segment,
                                       int64_t row, int64_t token) {
    if (p.scaling == WeightScaling::kNone) return;
    low = WeightScale(p, row, segment.weight_column);
    high = WeightScale(p, row + 8, segment.weight_column);
    if (p.act_scales == nullptr) return;
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t t = min(token + b * 8 + i, p.m - 1);
        act[b][i] = p.act_scales[t * p.act_scale_stride + segment.act_column];
      }
    }
  }
  // Multiplies the sums; the product of the scales is formed first.
  __device__ __forceinline__ void Apply(const GemmCudaProblem& p,
                                        float (&c)[kTokenBlocks][4]) const {
    if (p.scaling == WeightScaling::kNone) return;
    const bool codes = p.act_scales != nullptr;
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[b][i] = __fmul_rn(c[b][i], codes ? __fmul_rn(act[b][i], low) : low);
        c[b][i + 2] = __fmul_rn(c[b][i + 2], codes ? __fmul_rn(act[b][i], high) : high);
      }
    }
  }
};

// Four E4M3 codes as two pairs of bf16.
__device__ __forceinline__ uint2 ExpandCodes(uint32_t w) {
  uint2 v = {E4M3PairToBf16(__byte_perm(w, 0, 0x1404)), E4M3PairToBf16(__byte_perm(w, 0, 0x3424))};
  const uint32_t nan = __vcmpeq4(w & 0x7f7f7f7fu, 0x7f7f7f7fu);
  if (nan != 0) {
    v.x |= __byte_perm(nan, 0, 0x1100) & 0x7fc07fc0u;
    v.y |= __byte_perm(nan, 0, 0x3322) & 0x7fc07fc0u;
  }
  return v;
}

// v[0] = ((0+1)+(2+3))+((4+5)+(6+7)) of the first `count` values, a power of two.
__device__ __forceinline__ float TreeSum(float (&v)[kMaxShards], int count) {
#pragma unroll
  for (int width = 1; width < kMaxShards; width *= 2) {
    if (width >= count) break;
#pragma unroll
    for (int i = 0; i + width < kMaxShards; i += 2 * width) v[i] = __fadd_rn(v[i], v[i + width]);
  }
  return v[0];
}

// Joins the sums of the cluster's leaves, [groups][tokens][16 rows] of each CTA, and writes this
// CTA's share of the outputs. Every thread of the cluster calls it.
__device__ __forceinline__ void JoinLeaves(const GemmCudaProblem& p, float* sums, int64_t first_row,
                                           int rows, int64_t token, int tokens) {
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int rank = static_cast<int>(cluster.block_rank());
  const int outs = p.keep_shards ? p.leaves / p.splits : 1;
  const int leaves = p.leaves / outs;
  const int count = rows * tokens;
  for (int i = rank * blockDim.x + threadIdx.x; i < outs * count;
       i += p.leaves * static_cast<int>(blockDim.x)) {
    const int o = i / count;
    const int e = i % count;
    // Rows of one group and token follow each other.
    const int row = e / (16 * tokens) * 16 + e % 16;
    const int t = e / 16 % tokens;
    if (first_row + row >= p.n) continue;
    const int64_t at = (int64_t{row / 16} * tokens + t) * 16 + row % 16;
    float v[kMaxShards] = {};
#pragma unroll
    for (int l = 0; l < kMaxShards; ++l) {
      if (l < leaves) {
        v[l] = p.leaves == 1 ? sums[at] : *cluster.map_shared_rank(sums + at, o * leaves + l);
      }
    }
    const float sum = TreeSum(v, leaves);
    const int64_t to = o * p.out_shard_stride + (token + t) * p.out_stride + first_row + row;
    if (p.out_bf16) {
      static_cast<__nv_bfloat16*>(p.out)[to] = __float2bfloat16_rn(sum);
    } else {
      static_cast<float*>(p.out)[to] = sum;
    }
  }
  // Nobody leaves while others read its sums.
  cluster.sync();
}

}  // namespace lockstep
