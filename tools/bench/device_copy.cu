#include "tools/bench/device_copy.h"

namespace lockstep {
namespace {

constexpr int kThreads = 512, kUnroll = 4;

__global__ void CopyKernel(uint4* to, const uint4* from, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  uint4 v[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kThreads < count) v[u] = __ldcs(from + first + u * kThreads);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kThreads < count) __stcs(to + first + u * kThreads, v[u]);
  }
}

}  // namespace

LaunchStatus LaunchDeviceCopy(void* to, const void* from, int64_t bytes, void* stream) {
  const int64_t count = bytes / 16, per_block = kThreads * kUnroll;
  CopyKernel<<<static_cast<unsigned>((count + per_block - 1) / per_block), kThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(static_cast<uint4*>(to),
                                                    static_cast<const uint4*>(from), count);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
