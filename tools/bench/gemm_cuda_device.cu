#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tools/bench/gemm_cuda_device.h"

namespace lockstep {
namespace bench {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

__global__ void FillKernel(uint64_t* out, int64_t count, Fill fill, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t v = Mix(seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    if (fill == Fill::kBlockScales) v = (v & 0x1f1f1f1f1f1f1f1full) | 0x4040404040404040ull;
    if (fill == Fill::kBf16) v = (v & 0x80ff80ff80ff80ffull) | 0x3f003f003f003f00ull;
    out[i] = v;
  }
}

__global__ void StreamReadKernel(const uint4* data, int64_t count, uint32_t* sink) {
  constexpr int kUnroll = 8;
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < count; i += stride) {
    const uint4 v = __ldcs(data + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

__device__ uint32_t sink;

}  // namespace

void* RandomBytes(int64_t bytes, Fill fill, uint64_t seed) {
  const int64_t count = (bytes + 7) / 8;
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(count) * 8), "cudaMalloc");
  FillKernel<<<1024, 256>>>(static_cast<uint64_t*>(data), count, fill, seed);
  Check(cudaDeviceSynchronize(), "fill");
  return data;
}

double TimeInGraph(int calls, const std::function<void(int, void*)>& launch) {
  cudaStream_t stream;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) launch(i, stream);
  cudaGraph_t graph;
  Check(cudaStreamEndCapture(stream, &graph), "end of capture");
  cudaGraphExec_t exec;
  Check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> times;
  for (int round = 0; round < 6; ++round) {
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "replay");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (round > 0) times.push_back(ms * 1e3 / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void LaunchStreamRead(const void* data, int64_t bytes, int blocks, int threads, void* stream) {
  uint32_t* to = nullptr;
  Check(cudaGetSymbolAddress(reinterpret_cast<void**>(&to), sink), "cudaGetSymbolAddress");
  StreamReadKernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), bytes / 16, to);
  Check(cudaGetLastError(), "stream read");
}

}  // namespace bench
}  // namespace lockstep
