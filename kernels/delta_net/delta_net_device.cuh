// Arithmetic of the gated delta net's CUDA arm that its kernels share, so that a row is given the
// same bits alone and in a chunk:
//   dot over Dk     eight lanes; lane l takes the groups of four l, l + 8, ... ascending, one fused
//                   multiply-add each; then lane i joins lane i + 1, i + 2, i + 4 as one tree
//   l2 norms        the dot of a row with itself
//   squares over Dv one tree over each slice of 32 values, slices ascending
//   rows            ascending, one fused multiply-add each
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/delta_net/delta_net_launch.h"

namespace lockstep {

constexpr int kRows = static_cast<int>(kDeltaNetGrid);  // of a grid cell
constexpr int kSlice = 32;                              // of values
constexpr int kMaxSlices = static_cast<int>(kMaxDeltaNetDim) / kSlice;
constexpr int kThreads = 256;
constexpr unsigned kFullMask = ~0u;

template <typename T>
__device__ inline const T* As(const void* p) {
  return static_cast<const T*>(p);
}

__device__ inline float ReadScalar(const void* data, bool bf16, int64_t i) {
  return bf16 ? ToFloat(As<BF16>(data)[i]) : As<float>(data)[i];
}

// Four elements from an address that is a multiple of four elements.
__device__ inline float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline float4 Load4(const BF16* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  return make_float4(BitsToFloat(v.x << 16), BitsToFloat(v.x & 0xffff0000u), BitsToFloat(v.y << 16),
                     BitsToFloat(v.y & 0xffff0000u));
}
__device__ inline float4 Scale4(float4 v, float s) {
  return make_float4(__fmul_rn(v.x, s), __fmul_rn(v.y, s), __fmul_rn(v.z, s), __fmul_rn(v.w, s));
}
__device__ inline float Dot4(float4 a, float4 b, float sum) {
  sum = __fmaf_rn(a.x, b.x, sum);
  sum = __fmaf_rn(a.y, b.y, sum);
  sum = __fmaf_rn(a.z, b.z, sum);
  return __fmaf_rn(a.w, b.w, sum);
}

// The tree of a dot whose eight lanes are neighbouring threads; every one of them gets the sum.
__device__ inline float JoinLanes(float x) {
  for (int step = 1; step < 8; step *= 2) x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}

// kDots whole dots in one thread: `step(i, sums)` adds the products of elements i to i + 3.
template <int kDots, typename Step>
__device__ inline void WholeDots(int dim, const Step& step, float (&total)[kDots]) {
  float two[kDots], four[kDots];
  const auto lane = [&](int l, float(&sums)[kDots]) {
#pragma unroll
    for (int d = 0; d < kDots; ++d) sums[d] = 0.0f;
    for (int i = 4 * l; i < dim; i += 32) step(i, sums);
  };
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
#pragma unroll 1
    for (int pair = 0; pair < 2; ++pair) {
      float one[kDots];
      lane(4 * half + 2 * pair, two);
      lane(4 * half + 2 * pair + 1, one);
#pragma unroll
      for (int d = 0; d < kDots; ++d) {
        two[d] = __fadd_rn(two[d], one[d]);
        four[d] = pair == 0 ? two[d] : __fadd_rn(four[d], two[d]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDots; ++d) total[d] = half == 0 ? four[d] : __fadd_rn(total[d], four[d]);
  }
}

// The sum over a warp, in every lane.
__device__ inline float WarpSum(float x) {
  for (int step = 16; step >= 1; step /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, step));
  }
  return x;
}

// 1 / sqrt(sum(x^2) + 1e-6), by eight neighbouring threads.
__device__ inline float L2ScaleOf(float lane_squares) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(JoinLanes(lane_squares), 1e-6f)));
}
template <typename Act>
__device__ inline float L2Scale(const Act* x, int dim) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 4 * static_cast<int>(threadIdx.x % 8); i < dim; i += 32) {
    const float4 v = Load4(x + i);
    sum = Dot4(v, v, sum);
  }
  return L2ScaleOf(sum);
}

// The factor that normalized queries are multiplied with.
__device__ inline float QueryFactor(int dim) {
  return __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(dim)));
}

// The gate of one row and value head, not yet cumulative.
template <typename Act>
__device__ inline float GateOf(const DeltaNetProblem& p, int64_t t, int64_t h) {
  const float a = ToFloat(As<Act>(p.a)[t * p.a_stride + h]);
  const float rate = Softplus(__fadd_rn(a, ReadScalar(p.dt_bias, p.dt_bias_bf16, h)));
  return __fmul_rn(-Exp(ReadScalar(p.a_log, p.a_log_bf16, h)), rate);
}

template <typename Act>
__device__ inline float BetaOf(const DeltaNetProblem& p, int64_t t, int64_t h) {
  return Sigmoid(ToFloat(As<Act>(p.b)[t * p.b_stride + h]));
}

// round(o * scale * weight * gate(z)) of value v.
template <typename Act>
__device__ inline void StoreOutput(const DeltaNetProblem& p, int64_t t, int64_t h, int v, float o,
                                   float squares, float weight, float z) {
  const float mean = __fdiv_rn(squares, static_cast<float>(p.v_dim));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.norm_eps)));
  const float normed = __fmul_rn(__fmul_rn(o, scale), weight);
  const float gate = p.sigmoid_gate ? Sigmoid(z) : Silu(z);
  static_cast<Act*>(p.out)[t * p.out_stride + h * p.v_dim + v] =
      FromFloat<Act>(__fmul_rn(normed, gate));
}

// One sequence's share of the step.
struct SequenceRows {
  int64_t slot;
  int begin;  // first row of the batch
  int rows;
  int start;  // position of the first row

  __device__ SequenceRows(const DeltaNetProblem& p, int b)
      : slot(p.batch.slots[b]),
        begin(p.batch.row_offsets[b]),
        rows(p.batch.row_offsets[b + 1] - begin),
        start(p.batch.start_positions[b]) {}
  __device__ int end() const { return start + rows; }
  __device__ int first_cell() const { return start / kRows; }
  __device__ int last_cell() const { return (end() - 1) / kRows; }
};

// new = from_grid * old + sum_i weight_i key_i of the state rows [0, values), by the block. Row v
// of `old` is at old + v * old_stride; `key(i, k)` are four elements of a key; weights
// [kRows][weight_stride]. `threads` threads take part, from the first on. `store(v, k, x)` gets
// four elements. A thread reads only elements of the state that it stores itself.
template <typename Key, typename Store>
__device__ inline void Fold(int threads, int dim, int values, float from_grid, const float* old,
                            int64_t old_stride, const Key& key, const float* weights,
                            int weight_stride, const Store& store) {
  const int columns = dim / 4, groups = threads / columns;
  const int k = static_cast<int>(threadIdx.x) % columns * 4;
  const int group = static_cast<int>(threadIdx.x) / columns;
  if (group >= groups) return;
  for (int v = 4 * group; v < values; v += 4 * groups) {
    float4 sum[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) sum[r] = Scale4(Load4(old + (v + r) * old_stride + k), from_grid);
    constexpr int kAhead = 8;  // keys that are read at once
    for (int first = 0; first < kRows; first += kAhead) {
      float4 ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = key(first + i, k);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float4 w4 = Load4(weights + (first + i) * weight_stride + v);
        const float w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          sum[r].x = __fmaf_rn(w[r], ahead[i].x, sum[r].x);
          sum[r].y = __fmaf_rn(w[r], ahead[i].y, sum[r].y);
          sum[r].z = __fmaf_rn(w[r], ahead[i].z, sum[r].z);
          sum[r].w = __fmaf_rn(w[r], ahead[i].w, sum[r].w);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) store(v + r, k, sum[r]);
  }
}

// Calls `store(snapshot slot)` for the snapshots of sequence b at `position`.
template <typename Store>
__device__ inline void ForSnapshots(const BatchRows& batch, int b, int position,
                                    const Store& store) {
  for (int64_t s = 0; s < batch.num_snapshots; ++s) {
    if (batch.snapshot_sequence[s] == b && batch.snapshot_position[s] == position) {
      store(static_cast<int64_t>(batch.snapshot_slot[s]));
    }
  }
}

// Writes x to `to` in the shared memory of every block of the cluster.
__device__ inline void Broadcast(float* to, float x) {
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
    *cluster.map_shared_rank(to, static_cast<int>(rank)) = x;
  }
}

// Adds the sums of squares of all slices, ascending. sums[slice] lies `stride` floats apart.
__device__ inline float AddSlices(const float* sums, int stride, int slices) {
  float total = sums[0];
  for (int slice = 1; slice < slices; ++slice) total = __fadd_rn(total, sums[slice * stride]);
  return total;
}

// Launches with clusters of grid.x blocks. early: the kernel may begin before the one in front of
// it has ended, and waits for it itself.
template <typename Kernel, typename... Args>
cudaError_t LaunchClusters(Kernel* kernel, bool early, dim3 grid, size_t bytes, cudaStream_t stream,
                           Args... args) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.x;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Kernels of sequences of one row, and of the others; by file.
LaunchStatus LaunchSteps(const DeltaNetProblem& problem, cudaStream_t stream);
LaunchStatus LaunchCellGrams(const DeltaNetProblem& problem, cudaStream_t stream);
LaunchStatus LaunchCells(const DeltaNetProblem& problem, cudaStream_t stream);
LaunchStatus LaunchRings(const DeltaNetProblem& problem, cudaStream_t stream);

}  // namespace lockstep
