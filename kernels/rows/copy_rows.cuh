// Copies rows of bytes on the device: which ones is a device functor's answer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

// One row to copy. From null: the row becomes bytes 0xff, a NaN in every float type.
struct RowCopy {
  const uint8_t* from;
  uint8_t* to;
  int64_t bytes;
};

template <typename Vector>
__device__ inline Vector AllOnes() {
  return static_cast<Vector>(~Vector{});
}
template <>
__device__ inline uint4 AllOnes<uint4>() {
  return make_uint4(~0u, ~0u, ~0u, ~0u);
}

constexpr int kCopyThreads = 256;

template <typename Vector, typename CopyOf>
__global__ void CopyRowsKernel(CopyOf copy_of) {
  const RowCopy copy = copy_of(static_cast<int64_t>(blockIdx.x));
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kCopyThreads + threadIdx.x;
  if (i * static_cast<int64_t>(sizeof(Vector)) >= copy.bytes) return;
  reinterpret_cast<Vector*>(copy.to)[i] =
      copy.from == nullptr ? AllOnes<Vector>() : reinterpret_cast<const Vector*>(copy.from)[i];
}

// Copies copy_of(0), ..., copy_of(rows - 1), none longer than max_bytes. `alignment` is the bitwise
// or of everything that addresses and lengths are sums of multiples of.
template <typename CopyOf>
LaunchStatus LaunchCopyRows(const CopyOf& copy_of, int64_t rows, int64_t max_bytes,
                            uint64_t alignment, void* stream) {
  if (rows == 0 || max_bytes == 0) return LaunchStatus::kOk;
  const int64_t width = alignment % 16 == 0  ? 16
                        : alignment % 4 == 0 ? 4
                        : alignment % 2 == 0 ? 2
                                             : 1;
  const int64_t blocks = (max_bytes / width + kCopyThreads - 1) / kCopyThreads;
  if (rows > 0x7fffffff || blocks > 65535) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(blocks));
  const auto s = static_cast<cudaStream_t>(stream);
  if (width == 16) {
    CopyRowsKernel<uint4><<<grid, kCopyThreads, 0, s>>>(copy_of);
  } else if (width == 4) {
    CopyRowsKernel<uint32_t><<<grid, kCopyThreads, 0, s>>>(copy_of);
  } else if (width == 2) {
    CopyRowsKernel<uint16_t><<<grid, kCopyThreads, 0, s>>>(copy_of);
  } else {
    CopyRowsKernel<uint8_t><<<grid, kCopyThreads, 0, s>>>(copy_of);
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

inline uint64_t AddressBits(const void* p) { return reinterpret_cast<uint64_t>(p); }

}  // namespace lockstep
