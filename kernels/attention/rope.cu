// Norms, rotary embedding and cache write on CUDA: one warp per row and head, whose sum of squares
// has 32 lanes (index mod 32, ascending) and one tree.
#include <cuda_runtime.h>

#include "kernels/attention/attention_launch.h"
#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/batch/device_rows.cuh"

namespace lockstep {
namespace {

constexpr int kWarps = 4;

__device__ float ReadScalar(const void* data, bool bf16, int64_t i) {
  return bf16 ? ToFloat(static_cast<const BF16*>(data)[i]) : static_cast<const float*>(data)[i];
}

template <typename Act, typename Cache>
__global__ void RopeKernel(RopeProblem p) {
  __shared__ float heads[kWarps][kMaxHeadDim];
  const int lane = threadIdx.x % 32, dim = static_cast<int>(p.head_dim);
  const int64_t num_heads = p.num_q_heads + 2 * p.num_kv_heads;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t t = unit / num_heads;
  const int num_sequences = static_cast<int>(p.num_sequences);
  if (t >= p.row_offsets[num_sequences]) return;
  int64_t h = unit % num_heads;
  const bool is_q = h < p.num_q_heads;
  if (!is_q) h -= p.num_q_heads;
  const bool is_k = !is_q && h < p.num_kv_heads;
  if (!is_q && !is_k) h -= p.num_kv_heads;

  const Act* from = is_q   ? static_cast<const Act*>(p.q) + t * p.q_stride + h * p.q_head_stride
                    : is_k ? static_cast<const Act*>(p.k) + t * p.k_stride + h * dim
                           : static_cast<const Act*>(p.v) + t * p.v_stride + h * dim;
  const int64_t position = p.positions[t];
  int64_t cache_row = 0;
  if (!is_q) {
    const int b = SequenceOfRow(p.row_offsets, num_sequences, static_cast<int>(t));
    const int64_t block = p.block_table[b * p.block_table_stride + position / kKeyBlock];
    cache_row = ((block * p.num_kv_heads + h) * kKeyBlock + position % kKeyBlock) * dim;
  }
  if (!is_q && !is_k) {
    Cache* to = static_cast<Cache*>(p.values) + cache_row;
    for (int i = lane; i < dim; i += 32) to[i] = FromFloat<Cache>(ToFloat(from[i]));
    return;
  }

  float* x = heads[threadIdx.x / 32];
  float sum = 0.0f;
  for (int i = lane; i < dim; i += 32) {
    x[i] = ToFloat(from[i]);
    sum = __fadd_rn(sum, __fmul_rn(x[i], x[i]));
  }
  if (p.qk_norm) {
    for (int width = 16; width >= 1; width /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, width));
    }
    const float mean = __fdiv_rn(sum, static_cast<float>(dim));
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.norm_eps)));
    const void* weight = is_q ? p.q_norm : p.k_norm;
    const bool weight_bf16 = is_q ? p.q_norm_bf16 : p.k_norm_bf16;
    for (int i = lane; i < dim; i += 32) {
      const float w = __fadd_rn(p.norm_weight_offset, ReadScalar(weight, weight_bf16, i));
      x[i] = ToFloat(FromFloat<Act>(__fmul_rn(__fmul_rn(x[i], scale), w)));
    }
  }
  __syncwarp();
  const int half = static_cast<int>(p.rotary_dim) / 2;
  for (int i = lane; i < half; i += 32) {
    float sine, cosine;
    SinCos(__fmul_rn(static_cast<float>(position), p.inv_freq[i]), &sine, &cosine);
    const float a = x[i], b = x[i + half];
    x[i] = ToFloat(FromFloat<Act>(__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine))));
    x[i + half] = ToFloat(FromFloat<Act>(__fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine))));
  }
  __syncwarp();
  if (is_q) {
    Act* to = static_cast<Act*>(p.q_out) + t * p.q_out_stride + h * dim;
    for (int i = lane; i < dim; i += 32) to[i] = FromFloat<Act>(x[i]);
  } else {
    Cache* to = static_cast<Cache*>(p.keys) + cache_row;
    for (int i = lane; i < dim; i += 32) to[i] = FromFloat<Cache>(x[i]);
  }
}

template <typename Act, typename Cache>
LaunchStatus Launch(const RopeProblem& p, cudaStream_t stream) {
  const int64_t units = p.num_tokens * (p.num_q_heads + 2 * p.num_kv_heads);
  const int64_t blocks = (units + kWarps - 1) / kWarps;
  if (blocks > 0x7fffffff) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  RopeKernel<Act, Cache><<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

LaunchStatus LaunchRope(const RopeProblem& p, void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p.bf16) return p.cache_bf16 ? Launch<BF16, BF16>(p, s) : Launch<BF16, float>(p, s);
  return p.cache_bf16 ? Launch<float, BF16>(p, s) : Launch<float, float>(p, s);
}

}  // namespace lockstep
