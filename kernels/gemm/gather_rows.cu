// Rows of BF16 fragments: one block per token.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/gemm/gather_rows_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 256;

__global__ void GatherRowsKernel(GatherRowsProblem p) {
  const int64_t t = blockIdx.x;
  const int64_t row = p.tokens[t] - p.row_begin;
  const bool held = row >= 0 && row < p.n;
  const int64_t r = row % 16;
  // A word is a pair of columns of one row.
  for (int64_t pair = threadIdx.x; pair < p.k / 2; pair += kThreads) {
    uint32_t word = 0;
    if (held) {
      const int64_t step = pair / 8;
      const int64_t c = pair % 8;
      const int64_t lane = r % 8 * 4 + c % 4;
      const int64_t at = (row / 16 * (p.k / 16) + step) * 128 + lane * 4 + r / 8 + c / 4 * 2;
      word = static_cast<const uint32_t*>(p.codes)[at];
    }
    const int64_t to = t * p.out_stride + pair * 2;
    if (p.out_bf16) {
      uint16_t* out = static_cast<uint16_t*>(p.out) + to;
      out[0] = static_cast<uint16_t>(word);
      out[1] = static_cast<uint16_t>(word >> 16);
    } else {
      float* out = static_cast<float*>(p.out) + to;
      out[0] = __uint_as_float(word << 16);
      out[1] = __uint_as_float(word & 0xffff0000u);
    }
  }
}

}  // namespace

LaunchStatus LaunchGatherRows(const GatherRowsProblem& p, void* stream) {
  if (p.num_tokens == 0) return LaunchStatus::kOk;
  GatherRowsKernel<<<static_cast<unsigned>(p.num_tokens), kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
