// RMS norm on CUDA: one block per row, one fixed reduction geometry for every width.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/norm/rms_norm_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 256;

__device__ float Load(const float* p, int64_t i) { return p[i]; }
__device__ float Load(const __nv_bfloat16* p, int64_t i) { return __bfloat162float(p[i]); }
__device__ void Store(float* p, int64_t i, float x) { p[i] = x; }
__device__ void Store(__nv_bfloat16* p, int64_t i, float x) { p[i] = __float2bfloat16_rn(x); }

// Sum over the block: lane l takes lane l + 128, then l + 64, ..., l + 1.
__device__ float BlockSum(float x) {
  __shared__ float lanes[kThreads];
  lanes[threadIdx.x] = x;
  __syncthreads();
  for (int width = kThreads / 2; width >= 1; width /= 2) {
    if (threadIdx.x < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    __syncthreads();
  }
  return lanes[0];
}

template <typename Act, typename Weight>
__global__ void RmsNormKernel(RmsNormProblem p) {
  const int64_t r = blockIdx.x;
  Act* residual = static_cast<Act*>(p.residual) + r * p.x_stride;
  const Act* x = p.delta != nullptr ? residual : static_cast<const Act*>(p.x) + r * p.x_stride;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.dim; i += kThreads) {
    // Each thread reads again below only what it wrote itself.
    if (p.delta != nullptr) {
      Store(residual, i, Load(residual, i) + p.delta[r * p.delta_stride + i]);
    }
    const float v = Load(x, i);
    sum = __fadd_rn(sum, __fmul_rn(v, v));
  }
  const float mean = __fdiv_rn(BlockSum(sum), static_cast<float>(p.dim));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
  const Weight* weight = static_cast<const Weight*>(p.weight);
  Act* y = static_cast<Act*>(p.y) + r * p.y_stride;
  for (int64_t i = threadIdx.x; i < p.dim; i += kThreads) {
    const float w = __fadd_rn(p.weight_offset, Load(weight, i));
    Store(y, i, __fmul_rn(__fmul_rn(Load(x, i), scale), w));
  }
}

template <typename Act, typename Weight>
void Launch(const RmsNormProblem& p, cudaStream_t stream) {
  RmsNormKernel<Act, Weight><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(p);
}

}  // namespace

LaunchStatus LaunchRmsNorm(const RmsNormProblem& p, void* stream) {
  if (p.rows == 0) return LaunchStatus::kOk;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p.bf16) {
    p.weight_bf16 ? Launch<__nv_bfloat16, __nv_bfloat16>(p, s) : Launch<__nv_bfloat16, float>(p, s);
  } else {
    p.weight_bf16 ? Launch<float, __nv_bfloat16>(p, s) : Launch<float, float>(p, s);
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
