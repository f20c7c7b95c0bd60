// Row operations on CUDA.
#include <cuda_runtime.h>

#include "kernels/rows/copy_rows.cuh"
#include "kernels/rows/rows_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 256;

struct GatherCopy {
  GatherRowsProblem p;
  __device__ RowCopy operator()(int64_t r) const {
    const int64_t row = p.rows[r];
    const bool inside = row >= 0 && row < p.source_rows;
    return {inside ? static_cast<const uint8_t*>(p.source) + row * p.source_stride : nullptr,
            static_cast<uint8_t*>(p.out) + r * p.out_stride, p.row_bytes};
  }
};

// Block row i is piece i % num_pieces of row i / num_pieces.
struct JoinCopy {
  JoinColumnsProblem p;
  __device__ RowCopy operator()(int64_t i) const {
    const int64_t r = i / p.num_pieces, piece = i % p.num_pieces;
    const int64_t begin = piece * p.piece_columns, left = p.columns - begin;
    const int64_t row = p.order == nullptr ? r : p.order[r];
    const bool inside = row >= 0 && row < p.piece_rows;
    const float* from = p.pieces + piece * p.piece_stride + row * p.piece_columns;
    const int64_t count = left < p.piece_columns ? left : p.piece_columns;
    return {inside ? reinterpret_cast<const uint8_t*>(from) : nullptr,
            reinterpret_cast<uint8_t*>(p.out + r * p.out_stride + begin), count * 4};
  }
};

template <typename Element>
__global__ void FillKernel(FillProblem p) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (i >= p.dim) return;
  Element* out = static_cast<Element*>(p.out) + static_cast<int64_t>(blockIdx.x) * p.stride;
  out[i] = static_cast<Element>(p.bits);
}

}  // namespace

LaunchStatus LaunchGatherRows(const GatherRowsProblem& p, void* stream) {
  const uint64_t alignment = AddressBits(p.source) | AddressBits(p.out) |
                             static_cast<uint64_t>(p.row_bytes | p.source_stride | p.out_stride);
  return LaunchCopyRows(GatherCopy{p}, p.num_rows, p.row_bytes, alignment, stream);
}

LaunchStatus LaunchJoinColumns(const JoinColumnsProblem& p, void* stream) {
  const int64_t strides = p.piece_columns | p.piece_stride | p.out_stride | p.columns;
  const uint64_t alignment =
      AddressBits(p.pieces) | AddressBits(p.out) | static_cast<uint64_t>(strides) * 4;
  return LaunchCopyRows(JoinCopy{p}, p.rows * p.num_pieces, p.piece_columns * 4, alignment, stream);
}

LaunchStatus LaunchFill(const FillProblem& p, void* stream) {
  if (p.rows == 0 || p.dim == 0) return LaunchStatus::kOk;
  const int64_t blocks = (p.dim + kThreads - 1) / kThreads;
  if (p.rows > 0x7fffffff || blocks > 65535) {
    return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  }
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(blocks));
  const auto s = static_cast<cudaStream_t>(stream);
  p.half ? FillKernel<uint16_t><<<grid, kThreads, 0, s>>>(p)
         : FillKernel<uint32_t><<<grid, kThreads, 0, s>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
