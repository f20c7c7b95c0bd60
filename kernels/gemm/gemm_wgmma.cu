// The matrix product on CUDA for many tokens: warpgroup instructions with 64 rows of the weight
// from registers and 128 tokens from shared memory. One warp copies tiles of x; two warpgroups
// unpack weights and multiply. CTAs stay and take tiles of the output in turn.
//
// With some tokens, tiles are of 64 and every leaf has its own CTA.
//
// An element sees the steps of gemm.cu in the same order, so its bits are the same. Leaves of K
// follow each other, and their sums join as a binary counter: the sum of a full subtree waits in
// shared memory (pairs of leaves) or in global scratch (larger ones) for its right neighbour.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/gemm/async_copy.cuh"
#include "kernels/gemm/gemm_device.cuh"
#include "kernels/gemm/gemm_launch.h"
#include "kernels/gemm/wgmma.cuh"

namespace lockstep {
namespace {

constexpr int kTileColumns = 64;    // of x in a stage: one chunk
constexpr int kRing = 5;            // stages
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2;       // warpgroups that multiply; the first ones of a CTA
constexpr int kConsumerThreads = kConsumers * kGroupThreads;
constexpr int kManyTokens = 128;  // of a tile of the kernel for many tokens
constexpr int kSomeTokens = 64;   // of a tile of the kernel for some tokens
constexpr int kManyThreads = kConsumerThreads + kGroupThreads;
constexpr int kSomeThreads = kConsumerThreads + 32;
constexpr int kRasterRows = 8;  // row tiles that take the same tokens one after the other

// Row tiles of 64 per warpgroup with many tokens. Segments need a second set of sums.
template <bool kSegmented>
constexpr __device__ __host__ int RowTiles() {
  return kSegmented ? 1 : 2;
}

template <int kTokens>
constexpr __device__ __host__ int StageBytes() {
  return kTokens * kTileColumns * 2;
}

// One tile of the output and where it lies.
struct Tile {
  int64_t group;  // first group of 16 rows
  int64_t token;
};

template <bool kSegmented>
__device__ __forceinline__ Tile TileAt(const GemmCudaProblem& p, int64_t index) {
  constexpr int kGroups = kConsumers * RowTiles<kSegmented>() * 4;
  const int64_t groups = (p.n + 15) / 16;
  const int64_t row_tiles = (groups + kGroups - 1) / kGroups;
  const int64_t token_tiles = (p.m + kManyTokens - 1) / kManyTokens;
  const int64_t band = index / (kRasterRows * token_tiles);
  const int64_t rows = min(row_tiles - band * kRasterRows, int64_t{kRasterRows});
  const int64_t in_band = index - band * kRasterRows * token_tiles;
  return {(band * kRasterRows + in_band % rows) * kGroups, in_band / rows * kManyTokens};
}

template <bool kSegmented>
int64_t TilesOf(const GemmCudaProblem& p) {
  const int64_t rows = kConsumers * RowTiles<kSegmented>() * 64;
  return (p.n + rows - 1) / rows * ((p.m + kManyTokens - 1) / kManyTokens);
}

// The ring of tiles of x in shared memory, and a thread's place in it.
struct Ring {
  uint8_t* tiles;
  uint64_t* full;
  uint64_t* empty;
  int slot = 0;
  uint32_t parity = 0;

  __device__ Ring(uint8_t* shared, int stage_bytes)
      : tiles(shared),
        full(reinterpret_cast<uint64_t*>(shared + kRing * stage_bytes)),
        empty(full + kRing) {}
  // By one thread.
  __device__ void Init() {
    for (int i = 0; i < kRing; ++i) {
      BarrierInit(full + i, 1);
      BarrierInit(empty + i, kConsumers * 4);
    }
    BarrierInitFence();
  }
  __device__ __forceinline__ void Advance() {
    if (++slot == kRing) {
      slot = 0;
      parity ^= 1;
    }
  }
};
constexpr int kRingBarrierBytes = 128;

__device__ __forceinline__ uint8_t* Align1024(uint8_t* p) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 1023) / 1024 * 1024);
}

// Copies the tiles of x that a leaf needs. One thread.
template <int kTokens>
__device__ void CopyLeaf(const GemmCudaProblem& p, const CUtensorMap* x_map, int leaf,
                         int64_t token, Ring* ring) {
  for (int column = 0; column < p.leaf_k; column += kTileColumns) {
    // The first time around the ring is empty: a fresh barrier has passed parity 1.
    BarrierWait(ring->empty + ring->slot, ring->parity ^ 1);
    BarrierExpect(ring->full + ring->slot, StageBytes<kTokens>());
    TensorCopy(ring->tiles + ring->slot * StageBytes<kTokens>(), x_map,
               static_cast<int>(leaf * p.leaf_k) + column, static_cast<int>(token),
               ring->full + ring->slot);
    ring->Advance();
  }
}

// The codes of a lane for a chunk, straight from global memory.
template <WeightFormat kFormat>
__device__ __forceinline__ void LoadChunk(const Stream& s, int chunk, int lane,
                                          Chunk<kFormat>* out) {
  using L = Layout<kFormat>;
#pragma unroll
  for (int i = 0; i < L::kLoads; ++i) {
    out->codes[i] = __ldg(reinterpret_cast<const uint4*>(s.codes + int64_t{chunk} * L::kChunkBytes +
                                                         i * 512 + lane * 16));
  }
  if (kFormat == WeightFormat::kNvfp4) {
    out->scales = __ldg(reinterpret_cast<const uint2*>(s.scales + int64_t{chunk} * 64) + lane / 4);
  }
}

// Multiplies the sums of 64 rows: this lane's are rows `row` and `row` + 8, tokens `token` +
// 8 j + {0, 1}.
template <int kSums>
__device__ __forceinline__ void ScaleTile(const GemmCudaProblem& p, const SegmentCursor& segment,
                                          int64_t row, int64_t token, float (&c)[kSums]) {
  if (p.scaling == WeightScaling::kNone) return;
  const float low = WeightScale(p, row, segment.weight_column);
  const float high = WeightScale(p, row + 8, segment.weight_column);
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float s0 = low, s1 = high;
      if (p.act_scales != nullptr) {
        const int64_t t = min(token + j * 8 + i, p.m - 1);
        const float act = __ldg(p.act_scales + t * p.act_scale_stride + segment.act_column);
        s0 = __fmul_rn(act, s0);
        s1 = __fmul_rn(act, s1);
      }
      c[j * 4 + i] = __fmul_rn(c[j * 4 + i], s0);
      c[j * 4 + i + 2] = __fmul_rn(c[j * 4 + i + 2], s1);
    }
  }
}

template <int kSums>
__device__ __forceinline__ void StoreTile(const GemmCudaProblem& p, int shard, int64_t row,
                                          int64_t token, const float (&c)[kSums]) {
  const int64_t base = shard * p.out_shard_stride + token * p.out_stride + row;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = j * 8 + i % 2;
      const int r = i / 2 * 8;
      if (token + t >= p.m || row + r >= p.n) continue;
      const int64_t at = base + t * p.out_stride + r;
      if (p.out_bf16) {
        static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(c[j * 4 + i]);
      } else {
        static_cast<float*>(p.out)[at] = c[j * 4 + i];
      }
    }
  }
}

// The scaled sums of one leaf: of 64 rows for each r, in groups group0 + 4 r + warp of the
// warpgroup.
template <WeightFormat kFormat, bool kSegmented, int kRowTiles, int kSums>
__device__ __forceinline__ void MultiplyLeaf(const GemmCudaProblem& p, int leaf, int64_t group0,
                                             int64_t token, int lane, Ring* ring,
                                             float (&c)[kRowTiles][kSums]) {
  using L = Layout<kFormat>;
  constexpr int kStage = StageBytes<kSums * 2>();
  const int leaf_steps = static_cast<int>(p.leaf_k / 16);
  const int whole = leaf_steps / kChunkSteps;
  Stream streams[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    // Rows beyond the last group repeat it; nothing is written for them.
    const int64_t group = min(group0 + r * 4, (p.n + 15) / 16 - 1);
    const int64_t at = (group * p.leaves + leaf) * leaf_steps;
    streams[r].codes = static_cast<const uint8_t*>(p.codes) + at * 32 * L::kStepBytes;
    streams[r].scales = static_cast<const uint8_t*>(p.block16_scales) + at * 16;
  }
  float sum[kSegmented ? kSums : 1];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) c[r][i] = 0.0f;
  }
  SegmentCursor segment = SegmentAt(p, leaf, 0);
  bool first = true;
  Chunk<kFormat> codes[kRowTiles];
  if (whole > 0) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) LoadChunk(streams[r], 0, lane, &codes[r]);
  }
  int last_slot = -1;
  for (int chunk = 0; chunk < whole; ++chunk) {
    Chunk<kFormat> next[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      LoadChunk(streams[r], min(chunk + 1, whole - 1), lane, &next[r]);
    }
    BarrierWait(ring->full + ring->slot, ring->parity);
    const uint64_t b = TileDescriptor(ring->tiles + ring->slot * kStage);
    // Two steps of all row tiles per group of instructions; while they run, the next two are
    // unpacked into the other set of registers.
    uint32_t a[2][2][kRowTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) Decode(codes[r], half * 2 + s, a[half][s][r]);
      }
      WgmmaFence();
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Wgmma(c[r], a[half][s][r], b + (half * 2 + s) * 2);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      // Everything before this group is done: the stage before this one is free.
      if (half == 0 && last_slot >= 0 && lane == 0) BarrierArrive(ring->empty + last_slot);
    }
    // BF16 codes are operands as they are: their registers must be free before they change.
    if (kFormat == WeightFormat::kBF16) WgmmaWait<0>();
    last_slot = ring->slot;
    ring->Advance();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) codes[r] = next[r];
    if (kSegmented && (chunk + 1) * kChunkSteps == segment.end_step) {
      WgmmaWait<0>();
      ScaleTile(p, segment, group0 * 16 + lane / 4, token, c[0]);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float& to = sum[kSegmented ? i : 0];
        to = first ? c[0][i] : __fadd_rn(to, c[0][i]);
        c[0][i] = 0.0f;
      }
      first = false;
      if (segment.end_step < leaf_steps) segment = SegmentAt(p, leaf, segment.end_step);
    }
  }
  WgmmaWait<0>();
  if (last_slot >= 0 && lane == 0) BarrierArrive(ring->empty + last_slot);
  if (kSegmented) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) c[0][i] = sum[kSegmented ? i : 0];
    return;
  }
  if (whole * kChunkSteps < leaf_steps) {
    // The short chunk, step by step.
    BarrierWait(ring->full + ring->slot, ring->parity);
    const uint64_t b = TileDescriptor(ring->tiles + ring->slot * kStage);
    for (int step = whole * kChunkSteps; step < leaf_steps; ++step) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        DecodeTail<kFormat>(streams[r], step, leaf_steps, lane, a[r]);
      }
      WgmmaFence();
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) Wgmma(c[r], a[r], b + (step - whole * kChunkSteps) * 2);
      WgmmaCommit();
      WgmmaWait<0>();
    }
    if (lane == 0) BarrierArrive(ring->empty + ring->slot);
    ring->Advance();
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    ScaleTile(p, segment, (group0 + r * 4) * 16 + lane / 4, token, c[r]);
  }
}

// Many tokens: CTAs stay and take tiles in turn; a tile's leaves follow each other.
template <WeightFormat kFormat, bool kSegmented>
__global__ void __launch_bounds__(kManyThreads, 1)
    ManyTokensKernel(const __grid_constant__ GemmCudaProblem p,
                     const __grid_constant__ CUtensorMap x_map, float* scratch, int64_t tiles) {
  constexpr int kRowTiles = RowTiles<kSegmented>();
  constexpr int kSums = kManyTokens / 2;
  constexpr int kStage = StageBytes<kManyTokens>();
  extern __shared__ uint8_t unaligned[];
  uint8_t* shared = Align1024(unaligned);
  float* level0 = reinterpret_cast<float*>(shared + kRing * kStage + kRingBarrierBytes);
  Ring ring(shared, kStage);
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();

  if (threadIdx.x >= kConsumerThreads) {
    LowerRegisters<40>();
    if (threadIdx.x != kConsumerThreads) return;
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
      const Tile tile = TileAt<kSegmented>(p, index);
      for (int leaf = 0; leaf < p.leaves; ++leaf) {
        CopyLeaf<kManyTokens>(p, &x_map, leaf, tile.token, &ring);
      }
    }
    return;
  }

  RaiseRegisters<232>();
  const int consumer = threadIdx.x;
  const int lane = consumer % 32;
  const int shards = p.keep_shards ? p.leaves / p.splits : 1;
  const int joined = p.leaves / shards;  // leaves per sum of the output
  constexpr int kLevelSize = kRowTiles * kSums * kConsumerThreads;
  float* const higher = scratch + int64_t{blockIdx.x} * 2 * kLevelSize;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = TileAt<kSegmented>(p, index);
    const int64_t group0 =
        tile.group + consumer / kGroupThreads * (kRowTiles * 4) + consumer / 32 % 4;
    const int64_t token = tile.token + lane % 4 * 2;
    for (int leaf = 0; leaf < p.leaves; ++leaf) {
      float c[kRowTiles][kSums];
      MultiplyLeaf<kFormat, kSegmented>(p, leaf, group0, token, lane, &ring, c);
      // The tree over the leaves that make up one sum of the output.
      const int place = leaf % joined;
      int level = 0;
      for (; (place >> level & 1) != 0; ++level) {
        const float* left = level == 0 ? level0 : higher + (level - 1) * kLevelSize;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            c[r][i] = __fadd_rn(left[(r * kSums + i) * kConsumerThreads + consumer], c[r][i]);
          }
        }
      }
      float* const to = level == 0 ? level0 : higher + (level - 1) * kLevelSize;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if (place + 1 == joined) {
          StoreTile(p, leaf / joined, (group0 + r * 4) * 16 + lane / 4, token, c[r]);
        } else {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            to[(r * kSums + i) * kConsumerThreads + consumer] = c[r][i];
          }
        }
      }
    }
  }
}

// Some tokens: a cluster per tile, a CTA per leaf; the sums join as in gemm.cu.
template <WeightFormat kFormat, bool kSegmented>
__global__ void __launch_bounds__(kSomeThreads, kSegmented ? 1 : 2)
    SomeTokensKernel(const __grid_constant__ GemmCudaProblem p,
                     const __grid_constant__ CUtensorMap x_map) {
  constexpr int kSums = kSomeTokens / 2;
  constexpr int kStage = StageBytes<kSomeTokens>();
  extern __shared__ uint8_t unaligned[];
  uint8_t* shared = Align1024(unaligned);
  float* sums = reinterpret_cast<float*>(shared + kRing * kStage + kRingBarrierBytes);
  Ring ring(shared, kStage);
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
  const int leaf = blockIdx.y;
  const int64_t first_group = int64_t{blockIdx.x} * (kConsumers * 4);
  const int64_t token = int64_t{blockIdx.z} * kSomeTokens;
  const int tokens = static_cast<int>(min(p.m - token, int64_t{kSomeTokens}));
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x == kConsumerThreads) {
      CopyLeaf<kSomeTokens>(p, &x_map, leaf, token, &ring);
    }
    __syncwarp();
  } else {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float c[1][kSums];
    MultiplyLeaf<kFormat, kSegmented>(p, leaf, first_group + warp, token + lane % 4 * 2, lane,
                                      &ring, c);
    float* to = sums + warp * tokens * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int t = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (t < tokens) to[t * 16 + i / 2 % 2 * 8] = c[0][i];
    }
  }
  const int rows =
      static_cast<int>(min((p.n + 15) / 16 - first_group, int64_t{kConsumers * 4}) * 16);
  JoinLeaves(p, sums, first_group * 16, rows, token, tokens);
}

// E4M3 codes of x as bf16 [m, k], 16 per thread.
__global__ void ExpandKernel(const uint8_t* x, int64_t x_stride, int64_t m, int64_t k,
                             uint32_t* out) {
  const int64_t steps = k / 16;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < m * steps;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + i / steps * x_stride + i % steps * 16);
    uint4* to = reinterpret_cast<uint4*>(out + i * 8);
    const uint2 a = ExpandCodes(v.x), b = ExpandCodes(v.y), c = ExpandCodes(v.z),
                d = ExpandCodes(v.w);
    to[0] = make_uint4(a.x, a.y, b.x, b.y);
    to[1] = make_uint4(c.x, c.y, d.x, d.y);
  }
}

using EncodeFn = decltype(&cuTensorMapEncodeTiled);

// The driver's function, or nullptr: found through the runtime, so that nothing links the driver.
EncodeFn TensorMapEncoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeFn>(function);
}

template <WeightFormat kFormat, bool kSegmented>
cudaError_t LaunchMany(const GemmCudaProblem& p, const CUtensorMap& map, float* scratch,
                       cudaStream_t stream) {
  auto* kernel = ManyTokensKernel<kFormat, kSegmented>;
  const int level_bytes = RowTiles<kSegmented>() * (kManyTokens / 2) * kConsumerThreads * 4;
  const int shared = 1024 + kRing * StageBytes<kManyTokens>() + kRingBarrierBytes +
                     (p.leaves > 1 ? level_bytes : 0);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t tiles = TilesOf<kSegmented>(p);
  const int64_t ctas = tiles < kGemmWgmmaCtas ? tiles : kGemmWgmmaCtas;
  kernel<<<static_cast<unsigned>(ctas), kManyThreads, shared, stream>>>(p, map, scratch, tiles);
  return cudaGetLastError();
}

template <WeightFormat kFormat, bool kSegmented>
cudaError_t LaunchSome(const GemmCudaProblem& p, const CUtensorMap& map, cudaStream_t stream) {
  auto* kernel = SomeTokensKernel<kFormat, kSegmented>;
  const int rows = kConsumers * 64;
  const int shared =
      1024 + kRing * StageBytes<kSomeTokens>() + kRingBarrierBytes + rows * kSomeTokens * 4;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(p.leaves), 1};
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((p.n + rows - 1) / rows), static_cast<unsigned>(p.leaves),
           static_cast<unsigned>((p.m + kSomeTokens - 1) / kSomeTokens));
  config.blockDim = dim3(kSomeThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, map);
}

template <WeightFormat kFormat, bool kSegmented>
cudaError_t Launch(const GemmCudaProblem& p, GemmKernel kernel, const CUtensorMap& map,
                   float* scratch, cudaStream_t stream) {
  return kernel == GemmKernel::kManyTokens
             ? LaunchMany<kFormat, kSegmented>(p, map, scratch, stream)
             : LaunchSome<kFormat, kSegmented>(p, map, stream);
}

}  // namespace

LaunchStatus LaunchGemmWgmma(const GemmCudaProblem& problem, GemmKernel kernel, void* expanded,
                             float* scratch, void* stream) {
  if (problem.m == 0 || problem.n == 0) return LaunchStatus::kOk;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  GemmCudaProblem p = problem;
  if (p.x_codes) {
    ExpandKernel<<<1024, 256, 0, s>>>(static_cast<const uint8_t*>(p.x), p.x_stride, p.m, p.k,
                                      static_cast<uint32_t*>(expanded));
    p.x = expanded;
    p.x_stride = p.k;
  }
  static const EncodeFn encode = TensorMapEncoder();
  if (encode == nullptr) return static_cast<LaunchStatus>(cudaErrorNotSupported);
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.k), static_cast<cuuint64_t>(p.m)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(p.x_stride) * 2};
  const cuuint32_t box[2] = {
      kTileColumns,
      static_cast<cuuint32_t>(kernel == GemmKernel::kManyTokens ? kManyTokens : kSomeTokens)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult encoded =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(p.x), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  cudaError_t error;
  switch (p.format) {
    case WeightFormat::kNvfp4:
      error = Launch<WeightFormat::kNvfp4, false>(p, kernel, map, scratch, s);
      break;
    case WeightFormat::kFp8:
      error = IsSegmented(p) ? Launch<WeightFormat::kFp8, true>(p, kernel, map, scratch, s)
                             : Launch<WeightFormat::kFp8, false>(p, kernel, map, scratch, s);
      break;
    default:
      error = Launch<WeightFormat::kBF16, false>(p, kernel, map, scratch, s);
  }
  return static_cast<LaunchStatus>(error);
}

}  // namespace lockstep
