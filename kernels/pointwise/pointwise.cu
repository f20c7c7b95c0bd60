// Elementwise operations on CUDA: one thread per element.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/pointwise/pointwise_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 30;

__device__ float Load(const float* p, int64_t i) { return p[i]; }
__device__ float Load(const __nv_bfloat16* p, int64_t i) { return __bfloat162float(p[i]); }
__device__ void Store(float* p, int64_t i, float x) { p[i] = x; }
__device__ void Store(__nv_bfloat16* p, int64_t i, float x) { p[i] = __float2bfloat16_rn(x); }

// x * sigmoid(x) with one exponential of a non-positive number: no overflow on either side.
__device__ float Silu(float x) {
  const float e = expf(x < 0.0f ? x : -x);
  const float positive = __fdiv_rn(1.0f, __fadd_rn(1.0f, e));
  return __fmul_rn(x, x < 0.0f ? __fmul_rn(e, positive) : positive);
}

template <typename Act>
__global__ void AddResidualKernel(AddResidualProblem p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.rows * p.dim) return;
  const int64_t r = index / p.dim, i = index % p.dim;
  Act* residual = static_cast<Act*>(p.residual) + r * p.residual_stride;
  Store(residual, i, __fadd_rn(Load(residual, i), p.delta[r * p.delta_stride + i]));
}

template <typename Act>
__global__ void SwiGluKernel(SwiGluProblem p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.rows * p.dim) return;
  const int64_t r = index / p.dim, i = index % p.dim;
  const float gate = p.gate[r * p.gate_stride + i], up = p.up[r * p.up_stride + i];
  Store(static_cast<Act*>(p.out) + r * p.out_stride, i, __fmul_rn(Silu(gate), up));
}

template <typename Problem>
LaunchStatus Launch(void (*kernel)(Problem), const Problem& p, void* stream) {
  const int64_t blocks = (p.rows * p.dim + kThreads - 1) / kThreads;
  if (blocks == 0) return LaunchStatus::kOk;
  if (blocks > kMaxBlocks) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

LaunchStatus LaunchAddResidual(const AddResidualProblem& p, void* stream) {
  return p.bf16 ? Launch(AddResidualKernel<__nv_bfloat16>, p, stream)
                : Launch(AddResidualKernel<float>, p, stream);
}

LaunchStatus LaunchSwiGlu(const SwiGluProblem& p, void* stream) {
  return p.bf16 ? Launch(SwiGluKernel<__nv_bfloat16>, p, stream)
                : Launch(SwiGluKernel<float>, p, stream);
}

}  // namespace lockstep
