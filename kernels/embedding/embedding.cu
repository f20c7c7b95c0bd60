// Embedding rows on CUDA: one thread per element of a lookup, whole rows for a selection.
#include <cuda_runtime.h>

#include "kernels/base/float_types.h"
#include "kernels/embedding/embedding_launch.h"
#include "kernels/rows/copy_rows.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To>
__global__ void LookupKernel(EmbeddingLookupProblem p) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (i >= p.dim) return;
  const int64_t t = blockIdx.x, row = p.tokens[t] - p.vocab_begin;
  To* out = static_cast<To*>(p.out) + t * p.out_stride;
  const bool owned = row >= 0 && row < p.table_rows;
  const From* from = static_cast<const From*>(p.table) + row * p.table_stride;
  out[i] = FromFloat<To>(owned ? ToFloat(from[i]) : 0.0f);
}

struct SelectCopy {
  EmbeddingSelectProblem p;
  __device__ RowCopy operator()(int64_t t) const {
    const int64_t token = p.tokens[t], owner = token / p.rows_per_rank;
    const bool inside = token >= 0 && owner < p.world;
    const uint8_t* from =
        static_cast<const uint8_t*>(p.gathered) + (owner * p.rank_stride + t * p.dim) * p.element;
    return {inside ? from : nullptr, static_cast<uint8_t*>(p.out) + t * p.out_stride * p.element,
            p.dim * p.element};
  }
};

template <typename From, typename To>
void Launch(const EmbeddingLookupProblem& p, dim3 grid, cudaStream_t stream) {
  LookupKernel<From, To><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

LaunchStatus LaunchEmbeddingLookup(const EmbeddingLookupProblem& p, void* stream) {
  if (p.num_tokens == 0 || p.dim == 0) return LaunchStatus::kOk;
  const int64_t blocks = (p.dim + kThreads - 1) / kThreads;
  if (p.num_tokens > 0x7fffffff || blocks > 65535) {
    return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  }
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(blocks));
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.table_bf16) {
    p.out_bf16 ? Launch<BF16, BF16>(p, grid, s) : Launch<BF16, float>(p, grid, s);
  } else {
    p.out_bf16 ? Launch<float, BF16>(p, grid, s) : Launch<float, float>(p, grid, s);
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

LaunchStatus LaunchEmbeddingSelect(const EmbeddingSelectProblem& p, void* stream) {
  const int64_t strides = (p.dim | p.rank_stride | p.out_stride) * p.element;
  const uint64_t alignment =
      AddressBits(p.gathered) | AddressBits(p.out) | static_cast<uint64_t>(strides);
  return LaunchCopyRows(SelectCopy{p}, p.num_tokens, p.dim * p.element, alignment, stream);
}

}  // namespace lockstep
