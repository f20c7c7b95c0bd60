// Attention on CUDA for every dtype and head dimension: one block per row and query head, key
// blocks ascending. A score is one ascending chain of fused multiply-adds; the sum of a block's
// weights is one tree over its 64 keys; an output element takes its keys in ascending order.
#include <cuda_runtime.h>

#include "kernels/attention/attention_launch.h"
#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/batch/device_rows.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 128;
constexpr int kBlock = static_cast<int>(kKeyBlock);
constexpr int kPerThread = static_cast<int>(kMaxHeadDim) / kThreads;

template <typename Act, typename Cache>
__global__ void AttentionKernel(AttentionProblem p) {
  __shared__ float q[kMaxHeadDim];
  __shared__ float weights[kBlock], tree[kBlock];
  const int64_t t = blockIdx.x / p.num_q_heads, h = blockIdx.x % p.num_q_heads;
  const int num_sequences = static_cast<int>(p.num_sequences);
  if (t >= p.row_offsets[num_sequences]) return;
  const int dim = static_cast<int>(p.head_dim), thread = threadIdx.x;
  const int b = SequenceOfRow(p.row_offsets, num_sequences, static_cast<int>(t));
  const int64_t kv_head = h / (p.num_q_heads / p.num_kv_heads);
  const Act* q_row = static_cast<const Act*>(p.q) + t * p.q_stride + h * dim;
  for (int i = thread; i < dim; i += kThreads) q[i] = ToFloat(q_row[i]);

  float maximum = -INFINITY, sum = 0.0f, out[kPerThread] = {};
  const int keys_count = p.positions[t] + 1;
  for (int begin = 0; begin < keys_count; begin += kBlock) {
    const int64_t block = p.block_table[b * p.block_table_stride + begin / kBlock];
    const int64_t offset = (block * p.num_kv_heads + kv_head) * kKeyBlock * dim;
    const Cache* keys = static_cast<const Cache*>(p.keys) + offset;
    const Cache* values = static_cast<const Cache*>(p.values) + offset;
    const int count = min(kBlock, keys_count - begin);
    __syncthreads();
    if (thread < kBlock) {
      float score = -INFINITY;
      if (thread < count) {
        float dot = 0.0f;
        const Cache* key = keys + thread * dim;
        for (int i = 0; i < dim; ++i) dot = __fmaf_rn(q[i], ToFloat(key[i]), dot);
        score = __fmul_rn(dot, p.scale);
      }
      weights[thread] = tree[thread] = score;
    }
    __syncthreads();
    for (int width = kBlock / 2; width >= 1; width /= 2) {
      if (thread < width) tree[thread] = fmaxf(tree[thread], tree[thread + width]);
      __syncthreads();
    }
    const float new_maximum = fmaxf(maximum, tree[0]);
    __syncthreads();
    if (thread < kBlock) {
      const float weight = Exp(__fsub_rn(weights[thread], new_maximum));
      weights[thread] = tree[thread] = weight;
    }
    __syncthreads();
    for (int width = kBlock / 2; width >= 1; width /= 2) {
      if (thread < width) tree[thread] = __fadd_rn(tree[thread], tree[thread + width]);
      __syncthreads();
    }
    const float rescale = Exp(__fsub_rn(maximum, new_maximum));
    maximum = new_maximum;
    sum = __fadd_rn(__fmul_rn(sum, rescale), tree[0]);
    for (int u = 0; u < kPerThread; ++u) {
      const int i = thread + u * kThreads;
      if (i >= dim) break;
      float x = __fmul_rn(out[u], rescale);
      for (int j = 0; j < count; ++j) x = __fmaf_rn(weights[j], ToFloat(values[j * dim + i]), x);
      out[u] = x;
    }
  }
  const float inverse = __fdiv_rn(1.0f, sum);
  Act* to = static_cast<Act*>(p.out) + t * p.out_stride + h * dim;
  const Act* gate =
      static_cast<const Act*>(p.q_and_gate) + t * p.q_and_gate_stride + (2 * h + 1) * dim;
  for (int u = 0; u < kPerThread; ++u) {
    const int i = thread + u * kThreads;
    if (i >= dim) break;
    Act y = FromFloat<Act>(__fmul_rn(out[u], inverse));
    if (p.output_gate) y = FromFloat<Act>(__fmul_rn(ToFloat(y), Sigmoid(ToFloat(gate[i]))));
    to[i] = y;
  }
}

template <typename Act, typename Cache>
LaunchStatus Launch(const AttentionProblem& p, cudaStream_t stream) {
  const int64_t blocks = p.num_tokens * p.num_q_heads;
  if (blocks > 0x7fffffff) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  AttentionKernel<Act, Cache><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

LaunchStatus LaunchAttentionGeneric(const AttentionProblem& p, void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p.bf16) return p.cache_bf16 ? Launch<BF16, BF16>(p, s) : Launch<BF16, float>(p, s);
  return p.cache_bf16 ? Launch<float, BF16>(p, s) : Launch<float, float>(p, s);
}

}  // namespace lockstep
