// The matrix product on CUDA for few tokens: weights stream from global memory into the registers
// of mma.m16n8k16, each warp taking groups of 16 rows; tokens are its 8 columns. A cluster has one
// CTA per leaf of K; the sums of the leaves meet in its shared memory and join as a tree.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "kernels/gemm/fragment.cuh"
#include "kernels/gemm/gemm_launch.h"

namespace lockstep {
namespace {

namespace cg = cooperative_groups;

constexpr int kMaxThreads = 256;
constexpr int kChunkSteps = 4;  // k16 steps that are loaded together

// Codes of one lane for 4 k16 steps.
template <WeightFormat kFormat>
struct Chunk {
  static constexpr int kStepBytes = kFormat == WeightFormat::kNvfp4 ? 4
                                    : kFormat == WeightFormat::kFp8 ? 8
                                                                    : 16;
  static constexpr int kRun = 16 / kStepBytes;
  static constexpr int kLoads = kChunkSteps / kRun;
  // Chunks in flight per warp.
  static constexpr int kDepth = kFormat == WeightFormat::kNvfp4 ? 4
                                : kFormat == WeightFormat::kFp8 ? 2
                                                                : 1;
  uint4 codes[kLoads];
  uint2 scales;  // NVFP4
};

__device__ __forceinline__ uint4 LoadStream(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The pointers of one (group, leaf) for this lane.
struct Stream {
  const uint8_t* codes;
  const uint8_t* scales;
};

template <WeightFormat kFormat>
__device__ __forceinline__ void Load(const Stream& s, int chunk, int lane, Chunk<kFormat>* out) {
  using C = Chunk<kFormat>;
#pragma unroll
  for (int i = 0; i < C::kLoads; ++i) {
    out->codes[i] = LoadStream(s.codes + (int64_t{chunk} * C::kLoads + i) * 512 + lane * 16);
  }
  if (kFormat == WeightFormat::kNvfp4) {
    out->scales = __ldg(reinterpret_cast<const uint2*>(s.scales + int64_t{chunk} * 64) + lane / 4);
  }
}

// A fragment of k16 step `step` of a chunk.
template <WeightFormat kFormat>
__device__ __forceinline__ void Decode(const Chunk<kFormat>& chunk, int step, uint32_t (&a)[4]) {
  if (kFormat == WeightFormat::kNvfp4) {
    DecodeNvfp4(Word(chunk.codes[0], step), step < 2 ? chunk.scales.x : chunk.scales.y, step % 2,
                a);
  } else if (kFormat == WeightFormat::kFp8) {
    const uint4& v = chunk.codes[step / 2 % Chunk<kFormat>::kLoads];
    DecodeFp8(Word(v, step % 2 * 2), Word(v, step % 2 * 2 + 1), a);
  } else {
    const uint4& v = chunk.codes[step % Chunk<kFormat>::kLoads];
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
  using C = Chunk<kFormat>;
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

// Multiplies the sums of a segment by their scales, the product of which is formed first.
template <int kTokenBlocks>
__device__ __forceinline__ void ScaleSums(const GemmCudaProblem& p, const SegmentCursor& segment,
                                          int64_t row, int64_t token, float (&c)[kTokenBlocks][4]) {
  if (p.scaling == WeightScaling::kNone) return;
  const float low = WeightScale(p, row, segment.weight_column);
  const float high = WeightScale(p, row + 8, segment.weight_column);
#pragma unroll
  for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float s0 = low, s1 = high;
      if (p.act_scales != nullptr) {
        const int64_t t = min(token + b * 8 + i, p.m - 1);
        const float act = p.act_scales[t * p.act_scale_stride + segment.act_column];
        s0 = __fmul_rn(act, s0);
        s1 = __fmul_rn(act, s1);
      }
      c[b][i] = __fmul_rn(c[b][i], s0);
      c[b][i + 2] = __fmul_rn(c[b][i + 2], s1);
    }
  }
}

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

// Sixteen values of x as bf16, in the order of memory.
__device__ __forceinline__ void LoadStep(const GemmCudaProblem& p, int64_t token, int64_t column,
                                         bool aligned, uint32_t (&v)[8]) {
  const int64_t at = token * p.x_stride + column;
  if (p.x_codes) {
    uint32_t w[4];
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + at;
    if (aligned) {
      const uint4 q = *reinterpret_cast<const uint4*>(x);
      w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = x[4 * i] | x[4 * i + 1] << 8 | x[4 * i + 2] << 16 |
               static_cast<uint32_t>(x[4 * i + 3]) << 24;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 pair = ExpandCodes(w[i]);
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    }
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + at;
  if (aligned) {
    const uint4 a = *reinterpret_cast<const uint4*>(x);
    const uint4 b = *reinterpret_cast<const uint4*>(x + 8);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = x[2 * i] | static_cast<uint32_t>(x[2 * i + 1]) << 16;
  }
}

// Brings steps [begin, end) of a leaf, of `tokens` tokens, to shared memory: per pair of steps and
// token 64 bytes, 16 for each t = 0..3 with columns 2t, 2t + 1, 2t + 8, 2t + 9 of both steps.
__device__ void StageActivations(const GemmCudaProblem& p, int64_t token, int tokens,
                                 int64_t column, int steps, bool aligned, uint8_t* shared) {
  for (int i = threadIdx.x; i < tokens * steps; i += blockDim.x) {
    const int t = i / steps;
    const int step = i % steps;
    uint32_t v[8];
    LoadStep(p, token + t, column + step * 16, aligned, v);
    uint8_t* to = shared + (int64_t{step / 2} * tokens + t) * 64 + step % 2 * 8;
#pragma unroll
    for (int q = 0; q < 4; ++q) *reinterpret_cast<uint2*>(to + q * 16) = make_uint2(v[q], v[q + 4]);
  }
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

// Joins the leaves of the cluster and writes this CTA's share of the outputs.
__device__ void JoinLeaves(const GemmCudaProblem& p, float* sums, int64_t first_row, int rows,
                           int64_t token, int tokens) {
  cg::cluster_group cluster = cg::this_cluster();
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
}

// The sums of one (group, leaf) while K ascends.
template <WeightFormat kFormat, int kTokenBlocks, bool kSegmented>
struct Accumulator {
  float c[kTokenBlocks][4];
  float sum[kSegmented ? kTokenBlocks : 1][4];
  bool first;
  SegmentCursor segment;

  __device__ __forceinline__ void Start(const GemmCudaProblem& p, int leaf) {
    Clear();
    first = true;
    segment = SegmentAt(p, leaf, 0);
  }
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[b][i] = 0.0f;
    }
  }
  // After k16 step `done - 1`.
  __device__ __forceinline__ void EndStep(const GemmCudaProblem& p, int leaf, int leaf_steps,
                                          int done, int64_t row, int64_t token) {
    if (!kSegmented) return;
    if (done != segment.end_step) return;
    ScaleSums(p, segment, row, token, c);
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = sum[kSegmented ? b : 0][i];
        s = first ? c[b][i] : __fadd_rn(s, c[b][i]);
      }
    }
    first = false;
    Clear();
    if (done < leaf_steps) segment = SegmentAt(p, leaf, done);
  }
  // Writes the sum of the leaf: [token][16 rows] of the group.
  __device__ __forceinline__ void Finish(const GemmCudaProblem& p, int64_t row, int64_t token,
                                         int tokens, int lane, float* sums) {
    if (!kSegmented) ScaleSums(p, segment, row, token, c);
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = b * 8 + lane % 4 * 2 + i % 2;
        const float v = kSegmented ? sum[kSegmented ? b : 0][i] : c[b][i];
        if (t < tokens) sums[t * 16 + lane / 4 + i / 2 * 8] = v;
      }
    }
  }
};

template <WeightFormat kFormat, int kTokenBlocks, bool kSegmented>
__global__ void __launch_bounds__(kMaxThreads)
    GemmKernel(const __grid_constant__ GemmCudaProblem p, const __grid_constant__ GemmTile tile,
               bool aligned) {
  using C = Chunk<kFormat>;
  constexpr int kDepth = C::kDepth;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int leaf = blockIdx.y;
  const int leaf_steps = static_cast<int>(p.leaf_k / 16);
  const int64_t token = int64_t{blockIdx.z} * (kTokenBlocks * 8);
  const int tokens = static_cast<int>(min(p.m - token, int64_t{kTokenBlocks * 8}));
  const int64_t all_groups = (p.n + 15) / 16;
  // Warps take neighbouring groups, in rounds.
  const int64_t first_group = int64_t{blockIdx.x} * tile.warps * tile.groups;
  float* sums = reinterpret_cast<float*>(shared + (tile.phase_steps + 1) / 2 * tokens * 64);

  const auto stream_of = [&](int round) {
    const int64_t group = first_group + round * tile.warps + warp;
    const int64_t at = (group * p.leaves + leaf) * leaf_steps;
    Stream s;
    s.codes = static_cast<const uint8_t*>(p.codes) + at * 32 * C::kStepBytes;
    s.scales = static_cast<const uint8_t*>(p.block16_scales) + at * 16;
    return s;
  };
  const auto rounds_left = [&](int round) {
    return round < tile.groups && first_group + round * tile.warps + warp < all_groups;
  };

  const int chunks = leaf_steps / kChunkSteps;
  Chunk<kFormat> ring[kDepth];
  Stream stream = {};
  if (rounds_left(0)) {
    stream = stream_of(0);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < chunks) Load(stream, d, lane, &ring[d]);
    }
  }
  // Lanes of missing tokens read the last one's; nothing is written for them.
  int offset[kTokenBlocks];
#pragma unroll
  for (int b = 0; b < kTokenBlocks; ++b) {
    offset[b] = min(b * 8 + lane / 4, tokens - 1) * 64 + lane % 4 * 16;
  }
  const int pair_bytes = tokens * 64;
  const bool one_phase = tile.phase_steps >= leaf_steps;

  Accumulator<kFormat, kTokenBlocks, kSegmented> acc;
  for (int round = 0; round < tile.groups; ++round) {
    const bool active = rounds_left(round);
    const bool more = rounds_left(round + 1);
    Stream next = {};
    if (more) next = stream_of(round + 1);
    const int64_t group = first_group + round * tile.warps + warp;
    const int64_t row = group * 16 + lane / 4;
    const int64_t lane_token = token + lane % 4 * 2;
    acc.Start(p, leaf);
    for (int phase = 0; phase < leaf_steps; phase += tile.phase_steps) {
      const int phase_end = min(phase + tile.phase_steps, leaf_steps);
      if (!one_phase || round == 0) {
        if (phase > 0 || round > 0) __syncthreads();
        StageActivations(p, token, tokens, leaf * p.leaf_k + phase * 16, phase_end - phase, aligned,
                         shared);
        __syncthreads();
      }
      if (!active) continue;
      const auto multiply = [&](const uint32_t(&a)[4], int step) {
        const uint8_t* b = shared + (step - phase) / 2 * pair_bytes + (step - phase) % 2 * 8;
#pragma unroll
        for (int i = 0; i < kTokenBlocks; ++i) {
          const uint2 v = *reinterpret_cast<const uint2*>(b + offset[i]);
          Mma(acc.c[i], a, v.x, v.y);
        }
        acc.EndStep(p, leaf, leaf_steps, step + 1, row, lane_token);
      };
      // Whole chunks. A phase begins at a multiple of the ring's depth.
      for (int base = phase / kChunkSteps; base * kChunkSteps + kChunkSteps <= phase_end;
           base += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          const int chunk = base + d;
          if (chunk * kChunkSteps + kChunkSteps > phase_end) break;
          if (kSegmented || kTokenBlocks > 2) {
#pragma unroll
            for (int s = 0; s < kChunkSteps; ++s) {
              uint32_t a[4];
              Decode(ring[d], s, a);
              multiply(a, chunk * kChunkSteps + s);
            }
          } else {
#pragma unroll
            for (int s = 0; s < kChunkSteps; s += 2) {
              uint32_t a0[4], a1[4];
              Decode(ring[d], s, a0);
              Decode(ring[d], s + 1, a1);
              const uint8_t* b = shared + (chunk * kChunkSteps + s - phase) / 2 * pair_bytes;
#pragma unroll
              for (int i = 0; i < kTokenBlocks; ++i) {
                const uint4 v = *reinterpret_cast<const uint4*>(b + offset[i]);
                Mma(acc.c[i], a0, v.x, v.y);
                Mma(acc.c[i], a1, v.z, v.w);
              }
            }
          }
          if (chunk + kDepth < chunks) {
            Load(stream, chunk + kDepth, lane, &ring[d]);
          } else if (more) {
            Load(next, d, lane, &ring[d]);
          }
        }
      }
      if (phase_end == leaf_steps) {
        for (int step = chunks * kChunkSteps; step < leaf_steps; ++step) {
          uint32_t a[4];
          DecodeTail<kFormat>(stream, step, leaf_steps, lane, a);
          multiply(a, step);
        }
      }
    }
    if (active) {
      acc.Finish(p, row, lane_token, tokens, lane,
                 sums + int64_t{round * tile.warps + warp} * tokens * 16);
      stream = next;
    }
  }

  const int rows =
      static_cast<int>(min(all_groups - first_group, int64_t{tile.warps} * tile.groups) * 16);
  cg::this_cluster().sync();
  JoinLeaves(p, sums, first_group * 16, rows, token, tokens);
  // Nobody leaves while others read its sums.
  cg::this_cluster().sync();
}

template <WeightFormat kFormat, int kTokenBlocks, bool kSegmented>
LaunchStatus Launch(const GemmCudaProblem& p, const GemmTile& tile, cudaStream_t stream) {
  auto* kernel = GemmKernel<kFormat, kTokenBlocks, kSegmented>;
  const int64_t shared = GemmSharedBytes(tile, p.m);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared));
  if (error != cudaSuccess) return static_cast<LaunchStatus>(error);
  const int64_t rows = int64_t{tile.warps} * tile.groups * 16;
  const int64_t tokens = kTokenBlocks * 8;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(p.leaves), 1};
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((p.n + rows - 1) / rows), static_cast<unsigned>(p.leaves),
           static_cast<unsigned>((p.m + tokens - 1) / tokens));
  config.blockDim = dim3(static_cast<unsigned>(tile.warps) * 32);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const int64_t unit = p.x_codes ? 1 : 2;
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride * unit % 16 == 0;
  error = cudaLaunchKernelEx(&config, kernel, p, tile, aligned);
  return static_cast<LaunchStatus>(error);
}

template <WeightFormat kFormat, bool kSegmented>
LaunchStatus LaunchTokens(const GemmCudaProblem& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.token_blocks) {
    case 1:
      return Launch<kFormat, 1, kSegmented>(p, tile, stream);
    case 2:
      return Launch<kFormat, 2, kSegmented>(p, tile, stream);
    case 4:
      return Launch<kFormat, 4, kSegmented>(p, tile, stream);
    default:
      return Launch<kFormat, 8, kSegmented>(p, tile, stream);
  }
}

}  // namespace

LaunchStatus LaunchGemm(const GemmCudaProblem& p, const GemmTile& tile, void* stream) {
  if (p.m == 0 || p.n == 0) return LaunchStatus::kOk;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool segmented = p.weight_blocks || (p.act_group != 0 && p.act_group < p.leaf_k * p.splits);
  switch (p.format) {
    case WeightFormat::kNvfp4:
      return LaunchTokens<WeightFormat::kNvfp4, false>(p, tile, s);
    case WeightFormat::kFp8:
      return segmented ? LaunchTokens<WeightFormat::kFp8, true>(p, tile, s)
                       : LaunchTokens<WeightFormat::kFp8, false>(p, tile, s);
    default:
      return LaunchTokens<WeightFormat::kBF16, false>(p, tile, s);
  }
}

}  // namespace lockstep
