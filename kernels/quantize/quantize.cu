// Activation quantization on CUDA: one warp, or for long groups one block, per group. The largest
// magnitude is exact in any order and everything else is per element, so the geometry does not show
// in the bits.
#include <cuda_runtime.h>

#include "kernels/base/float_types.h"
#include "kernels/quantize/quantize_element.h"
#include "kernels/quantize/quantize_launch.h"

namespace lockstep {
namespace {

constexpr int kBlockThreads = 256;
// Groups up to this length have one warp.
constexpr int64_t kWarpGroup = 512;

// kCount consecutive values as one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

__device__ uint32_t Magnitude(float f) {
  const uint32_t bits = FloatToBits(f) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0u : bits;  // a NaN is passed over
}

// Magnitudes are compared as integers: the same order.
template <int kThreads>
__device__ float GroupMax(uint32_t magnitude) {
  magnitude = __reduce_max_sync(0xffffffffu, magnitude);
  if (kThreads > 32) {
    __shared__ uint32_t warps[kBlockThreads / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = magnitude;
    __syncthreads();
    for (int w = 0; w < kBlockThreads / 32; ++w) magnitude = max(magnitude, warps[w]);
  }
  return BitsToFloat(magnitude);
}

// kThreads threads per group, kVector elements per access.
template <typename Act, int kThreads, int kVector>
__global__ void __launch_bounds__(kBlockThreads) QuantizeKernel(QuantizeProblem p) {
  const int64_t per_shard = (p.shard_size + p.group - 1) / p.group;
  const int64_t per_row = p.k / p.shard_size * per_shard;
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * (kBlockThreads / kThreads) + threadIdx.x / kThreads;
  if (index >= p.rows * per_row) return;  // whole groups of threads leave
  const int64_t r = index / per_row, g = index % per_row;
  const int64_t shard_end = (g / per_shard + 1) * p.shard_size;
  const int64_t begin = g / per_shard * p.shard_size + g % per_shard * p.group;
  const int64_t end = begin + p.group < shard_end ? begin + p.group : shard_end;
  const Act* x = static_cast<const Act*>(p.x) + r * p.x_stride;
  uint8_t* codes = p.codes + r * p.codes_stride;
  const int64_t first = begin + threadIdx.x % kThreads * kVector;

  float scale = p.static_scale;
  if (p.scale_rule != 0) {
    uint32_t amax = 0;
    for (int64_t i = first; i < end; i += kThreads * kVector) {
      const auto in = *reinterpret_cast<const Pack<Act, kVector>*>(x + i);
      for (int j = 0; j < kVector; ++j) amax = max(amax, Magnitude(ToFloat(in.values[j])));
    }
    scale = DynamicScale(p.scale_rule, GroupMax<kThreads>(amax));
  }
  if (threadIdx.x % kThreads == 0) p.scales[r * p.scales_stride + g] = scale;
  for (int64_t i = first; i < end; i += kThreads * kVector) {
    const auto in = *reinterpret_cast<const Pack<Act, kVector>*>(x + i);
    Pack<uint8_t, kVector> out;
    for (int j = 0; j < kVector; ++j) {
      out.values[j] = static_cast<uint8_t>(E4M3Code(__fdiv_rn(ToFloat(in.values[j]), scale)));
    }
    *reinterpret_cast<Pack<uint8_t, kVector>*>(codes + i) = out;
  }
}

template <typename Act, int kThreads, int kVector>
LaunchStatus Launch(const QuantizeProblem& p, cudaStream_t stream) {
  const int64_t per_row = p.k / p.shard_size * ((p.shard_size + p.group - 1) / p.group);
  const int64_t per_block = kBlockThreads / kThreads;
  const int64_t blocks = (p.rows * per_row + per_block - 1) / per_block;
  if (blocks > 0x7fffffff) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  QuantizeKernel<Act, kThreads, kVector>
      <<<static_cast<unsigned>(blocks), kBlockThreads, 0, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

template <typename Act>
LaunchStatus LaunchFor(const QuantizeProblem& p, cudaStream_t stream) {
  constexpr int kVector = static_cast<int>(16 / sizeof(Act));
  const int64_t lengths = p.shard_size | p.group | p.x_stride | p.codes_stride;
  const bool vectors = lengths % kVector == 0 && reinterpret_cast<uint64_t>(p.x) % 16 == 0 &&
                       reinterpret_cast<uint64_t>(p.codes) % kVector == 0;
  if (p.group <= kWarpGroup) {
    return vectors ? Launch<Act, 32, kVector>(p, stream) : Launch<Act, 32, 1>(p, stream);
  }
  return vectors ? Launch<Act, kBlockThreads, kVector>(p, stream)
                 : Launch<Act, kBlockThreads, 1>(p, stream);
}

}  // namespace

LaunchStatus LaunchQuantize(const QuantizeProblem& p, void* stream) {
  if (p.rows == 0 || p.k == 0) return LaunchStatus::kOk;
  const auto s = static_cast<cudaStream_t>(stream);
  return p.x_bf16 ? LaunchFor<BF16>(p, s) : LaunchFor<float>(p, s);
}

}  // namespace lockstep
