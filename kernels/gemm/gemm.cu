// The matrix product on CUDA for few tokens: weights stream from global memory into the registers
// of mma.m16n8k16, each warp taking groups of 16 rows; tokens are its 8 columns. A cluster has one
// CTA per leaf of K; the sums of the leaves meet in its shared memory and join as a tree.
#include <cuda_bf16.h>

#include "kernels/gemm/async_copy.cuh"
#include "kernels/gemm/gemm_device.cuh"
#include "kernels/gemm/gemm_launch.h"

namespace lockstep {
namespace {

constexpr int kMaxThreads = 256;
// Weights are copied to shared memory ahead of their use, warp by warp, because registers cannot:
// a warp has six scoreboards, so the wait for one load becomes a wait for later ones.
static_assert(kGemmStageBytes == 2048 + 4 * 64, "a stage of NVFP4 is the largest");

// Starts the copy of `chunks` chunks from the first one of a stream on.
template <WeightFormat kFormat>
__device__ __forceinline__ void CopyStage(const Stream& s, int first_chunk, int chunks,
                                          uint8_t* stage, uint64_t* barrier) {
  using L = Layout<kFormat>;
  const uint32_t code_bytes = chunks * L::kChunkBytes;
  const uint32_t scale_bytes = kFormat == WeightFormat::kNvfp4 ? chunks * 64 : 0;
  BarrierExpect(barrier, code_bytes + scale_bytes);
  BulkCopy(stage, s.codes + int64_t{first_chunk} * L::kChunkBytes, code_bytes, barrier);
  if (kFormat == WeightFormat::kNvfp4) {
    BulkCopy(stage + L::kScaleOffset, s.scales + int64_t{first_chunk} * 64, scale_bytes, barrier);
  }
}

template <WeightFormat kFormat>
__device__ __forceinline__ void ReadChunk(const uint8_t* stage, int chunk, int lane,
                                          Chunk<kFormat>* out) {
  using L = Layout<kFormat>;
#pragma unroll
  for (int i = 0; i < L::kLoads; ++i) {
    out->codes[i] =
        *reinterpret_cast<const uint4*>(stage + chunk * L::kChunkBytes + i * 512 + lane * 16);
  }
  if (kFormat == WeightFormat::kNvfp4) {
    out->scales =
        *reinterpret_cast<const uint2*>(stage + L::kScaleOffset + chunk * 64 + lane / 4 * 8);
  }
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

// The sums of one (group, leaf) while K ascends.
template <int kTokenBlocks, bool kSegmented>
struct Accumulator {
  float c[kTokenBlocks][4];
  float sum[kSegmented ? kTokenBlocks : 1][4];
  SegmentScales<kTokenBlocks> scales;
  SegmentCursor segment;
  bool first;

  __device__ __forceinline__ void Start(const GemmCudaProblem& p, int leaf, int64_t row,
                                        int64_t token) {
    first = true;
    Begin(p, leaf, 0, row, token);
  }
  __device__ __forceinline__ void Begin(const GemmCudaProblem& p, int leaf, int step, int64_t row,
                                        int64_t token) {
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[b][i] = 0.0f;
    }
    segment = SegmentAt(p, leaf, step);
    scales.Read(p, segment, row, token);
  }
  // After k16 step `done - 1`.
  __device__ __forceinline__ void EndStep(const GemmCudaProblem& p, int leaf, int leaf_steps,
                                          int done, int64_t row, int64_t token) {
    if (!kSegmented || done != segment.end_step) return;
    scales.Apply(p, c);
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = sum[kSegmented ? b : 0][i];
        s = first ? c[b][i] : __fadd_rn(s, c[b][i]);
      }
    }
    first = false;
    if (done < leaf_steps) Begin(p, leaf, done, row, token);
  }
  // Writes the sum of the leaf: [token][16 rows] of the group.
  __device__ __forceinline__ void Finish(const GemmCudaProblem& p, int tokens, int lane,
                                         float* sums) {
    if (!kSegmented) scales.Apply(p, c);
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
  using L = Layout<kFormat>;
  constexpr int kStageSteps = L::kStageChunks * kChunkSteps;
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int leaf = blockIdx.y;
  const int leaf_steps = static_cast<int>(p.leaf_k / 16);
  const int64_t token = int64_t{blockIdx.z} * (kTokenBlocks * 8);
  const int tokens = static_cast<int>(min(p.m - token, int64_t{kTokenBlocks * 8}));
  const int64_t all_groups = (p.n + 15) / 16;
  // Warps take neighbouring groups, in rounds.
  const int64_t first_group = int64_t{blockIdx.x} * tile.warps * tile.groups;

  // Shared memory: rings of the warps, their barriers, activations, sums.
  uint8_t* ring = shared + warp * tile.stages * kGemmStageBytes;
  uint64_t* barriers =
      reinterpret_cast<uint64_t*>(shared + tile.warps * tile.stages * kGemmStageBytes);
  uint8_t* activations = reinterpret_cast<uint8_t*>(barriers + tile.warps * tile.stages);
  barriers += warp * tile.stages;
  float* sums = reinterpret_cast<float*>(activations + (tile.phase_steps + 1) / 2 * tokens * 64);

  const auto stream_of = [&](int round) {
    const int64_t group = first_group + round * tile.warps + warp;
    const int64_t at = (group * p.leaves + leaf) * leaf_steps;
    Stream s;
    s.codes = static_cast<const uint8_t*>(p.codes) + at * 32 * L::kStepBytes;
    s.scales = static_cast<const uint8_t*>(p.block16_scales) + at * 16;
    return s;
  };
  int rounds = 0;
  while (rounds < tile.groups && first_group + rounds * tile.warps + warp < all_groups) ++rounds;

  const int chunks = leaf_steps / kChunkSteps;
  const int stages = (chunks + L::kStageChunks - 1) / L::kStageChunks;  // of a round
  // The next stage to be copied; lane 0 copies.
  int copy_round = chunks > 0 ? 0 : rounds;
  int copy_stage = 0;
  Stream copy_stream = stream_of(0);
  const auto copy_next = [&](int slot) {
    if (copy_round >= rounds) return;
    if (lane == 0) {
      const int begin = copy_stage * L::kStageChunks;
      CopyStage<kFormat>(copy_stream, begin, min(L::kStageChunks, chunks - begin),
                         ring + slot * kGemmStageBytes, barriers + slot);
    }
    if (++copy_stage == stages) {
      copy_stage = 0;
      copy_stream = stream_of(++copy_round);
    }
  };
  if (lane == 0) {
    for (int i = 0; i < tile.stages; ++i) BarrierInit(barriers + i, 1);
    BarrierInitFence();
  }
  __syncwarp();
  for (int i = 0; i < tile.stages; ++i) copy_next(i);
  LaunchDependents();
  WaitForPrerequisites();
  int slot = 0;
  uint32_t parity = 0;

  // Lanes of missing tokens read the last one's; nothing is written for them.
  int offset[kTokenBlocks];
#pragma unroll
  for (int b = 0; b < kTokenBlocks; ++b) {
    offset[b] = min(b * 8 + lane / 4, tokens - 1) * 64 + lane % 4 * 16;
  }
  const int pair_bytes = tokens * 64;
  const bool one_phase = tile.phase_steps >= leaf_steps;

  Accumulator<kTokenBlocks, kSegmented> acc;
  for (int round = 0; round < tile.groups; ++round) {
    const bool active = round < rounds;
    const int64_t group = first_group + round * tile.warps + warp;
    const int64_t row = group * 16 + lane / 4;
    const int64_t lane_token = token + lane % 4 * 2;
    acc.Start(p, leaf, row, lane_token);
    for (int phase = 0; phase < leaf_steps; phase += tile.phase_steps) {
      const int phase_end = min(phase + tile.phase_steps, leaf_steps);
      if (!one_phase || round == 0) {
        if (phase > 0 || round > 0) __syncthreads();
        StageActivations(p, token, tokens, leaf * p.leaf_k + phase * 16, phase_end - phase, aligned,
                         activations);
        __syncthreads();
      }
      if (!active) continue;
      const auto multiply = [&](const uint32_t(&a)[4], int step) {
        const uint8_t* b = activations + (step - phase) / 2 * pair_bytes + (step - phase) % 2 * 8;
#pragma unroll
        for (int i = 0; i < kTokenBlocks; ++i) {
          const uint2 v = *reinterpret_cast<const uint2*>(b + offset[i]);
          Mma(acc.c[i], a, v.x, v.y);
        }
        acc.EndStep(p, leaf, leaf_steps, step + 1, row, lane_token);
      };
      // Whole chunks. A phase is whole stages.
      const uint8_t* pair = activations;
      for (int step = phase; step + kChunkSteps <= phase_end; step += kStageSteps) {
        const uint8_t* stage = ring + slot * kGemmStageBytes;
        BarrierWait(barriers + slot, parity);
#pragma unroll
        for (int c = 0; c < L::kStageChunks; ++c) {
          const int first = step + c * kChunkSteps;
          if (first + kChunkSteps > phase_end) break;
          Chunk<kFormat> chunk;
          ReadChunk(stage, c, lane, &chunk);
          if (kSegmented) {
#pragma unroll 1
            for (int s = 0; s < kChunkSteps; s += 2) {
              uint32_t a[4];
              const uint4 v = s == 0 ? chunk.codes[0] : chunk.codes[L::kLoads - 1];
              DecodeFp8(v.x, v.y, a);
              multiply(a, first + s);
              DecodeFp8(v.z, v.w, a);
              multiply(a, first + s + 1);
            }
          } else {
#pragma unroll
            for (int s = 0; s < kChunkSteps; s += 2) {
              uint32_t a0[4], a1[4];
              Decode(chunk, s, a0);
              Decode(chunk, s + 1, a1);
#pragma unroll
              for (int i = 0; i < kTokenBlocks; ++i) {
                const uint4 v = *reinterpret_cast<const uint4*>(pair + offset[i]);
                Mma(acc.c[i], a0, v.x, v.y);
                Mma(acc.c[i], a1, v.z, v.w);
              }
              pair += pair_bytes;
            }
          }
        }
        // Every lane has read the stage.
        __syncwarp();
        copy_next(slot);
        if (++slot == tile.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
      if (phase_end == leaf_steps) {
        const Stream stream = stream_of(round);
        for (int step = chunks * kChunkSteps; step < leaf_steps; ++step) {
          uint32_t a[4];
          DecodeTail<kFormat>(stream, step, leaf_steps, lane, a);
          multiply(a, step);
        }
      }
    }
    if (active) {
      acc.Finish(p, tokens, lane, sums + int64_t{round * tile.warps + warp} * tokens * 16);
    }
  }

  const int rows =
      static_cast<int>(min(all_groups - first_group, int64_t{tile.warps} * tile.groups) * 16);
  JoinLeaves(p, sums, first_group * 16, rows, token, tokens);
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
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {1, static_cast<unsigned>(p.leaves), 1};
  // Weights are fetched while the kernel before ends.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((p.n + rows - 1) / rows), static_cast<unsigned>(p.leaves),
           static_cast<unsigned>((p.m + tokens - 1) / tokens));
  config.blockDim = dim3(static_cast<unsigned>(tile.warps) * 32);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
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
    default:
      return Launch<kFormat, 4, kSegmented>(p, tile, stream);
  }
}

}  // namespace

LaunchStatus LaunchGemm(const GemmCudaProblem& p, const GemmTile& tile, void* stream) {
  if (p.m == 0 || p.n == 0) return LaunchStatus::kOk;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool segmented = IsSegmented(p);
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
