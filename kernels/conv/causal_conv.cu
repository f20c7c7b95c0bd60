// The causal convolution on CUDA: one thread per channel. Taps sit right-aligned in a window of
// kMaxConvWidth inputs, so that every index is a constant.
#include <cuda_runtime.h>

#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/batch/device_rows.cuh"
#include "kernels/conv/causal_conv_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 128;
constexpr int kWindow = static_cast<int>(kMaxConvWidth);
constexpr int kRows = 32;  // that one thread of the stateless kernel walks

template <typename Act, typename Weight>
struct Channel {
  float taps[kWindow];
  float bias;
  int first;  // tap that exists first

  __device__ Channel(const ConvProblem& p, int64_t c) {
    first = kWindow - static_cast<int>(p.width);
    const Weight* weight = static_cast<const Weight*>(p.weight) + c * p.width;
#pragma unroll
    for (int j = 0; j < kWindow; ++j) taps[j] = j >= first ? ToFloat(weight[j - first]) : 0.0f;
    bias = p.bias == nullptr ? 0.0f
           : p.bias_bf16     ? ToFloat(static_cast<const BF16*>(p.bias)[c])
                             : static_cast<const float*>(p.bias)[c];
  }

  __device__ Act Output(const float (&window)[kWindow]) const {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      if (j >= first) sum = __fmaf_rn(taps[j], window[j], sum);
    }
    return FromFloat<Act>(Silu(sum));
  }
};

__device__ void Push(float (&window)[kWindow], float x) {
#pragma unroll
  for (int j = 0; j + 1 < kWindow; ++j) window[j] = window[j + 1];
  window[kWindow - 1] = x;
}

// The first width - 1 rows of a sequence, its snapshots, and its new state.
template <typename Act, typename Weight>
__global__ void StateKernel(ConvProblem p) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= p.channels) return;
  const int b = blockIdx.y;
  const int begin = p.batch.row_offsets[b], rows = p.batch.row_offsets[b + 1] - begin;
  if (rows <= 0) return;
  const int start = p.batch.start_positions[b];
  const int kept = static_cast<int>(p.width) - 1;
  const Act* x = static_cast<const Act*>(p.x) + begin * p.x_stride + c;
  Act* state = static_cast<Act*>(p.conv) + p.batch.slots[b] * kept * p.channels + c;
  // Input `row` of the chunk; negative rows are those of the state.
  const auto input = [&](int row) -> Act {
    if (row >= 0) return x[row * p.x_stride];
    return start == 0 ? FromFloat<Act>(0.0f) : state[(kept + row) * p.channels];
  };
  const Channel<Act, Weight> channel(p, c);
  float window[kWindow] = {};
#pragma unroll
  for (int j = 1; j < kWindow; ++j) {
    if (j > channel.first) window[j] = ToFloat(input(j - kWindow));
  }
  Act* y = static_cast<Act*>(p.y) + begin * p.y_stride + c;
  for (int row = 0; row < rows && row < kept; ++row) {
    Push(window, ToFloat(x[row * p.x_stride]));
    y[row * p.y_stride] = channel.Output(window);
  }
  for (int64_t s = 0; s < p.batch.num_snapshots; ++s) {
    const int end = p.batch.snapshot_position[s] - start;
    if (p.batch.snapshot_sequence[s] != b || end <= 0 || end > rows) continue;
    Act* to = static_cast<Act*>(p.conv_snapshot) + p.batch.snapshot_slot[s] * kept * p.channels + c;
    for (int i = 0; i < kept; ++i) to[i * p.channels] = input(end - kept + i);
  }
  // Ascending: entry i comes from an entry past it, which has not been written yet.
  for (int i = 0; i < kept; ++i) state[i * p.channels] = input(rows - kept + i);
}

// Rows that see their own chunk only. Rows of StateKernel pass through the window.
template <typename Act, typename Weight>
__global__ void StatelessKernel(ConvProblem p) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= p.channels) return;
  const int num_sequences = static_cast<int>(p.num_sequences);
  const int kept = static_cast<int>(p.width) - 1;
  const int first = blockIdx.y * kRows;
  const int last = min(first + kRows, p.batch.row_offsets[num_sequences]);
  if (first >= last) return;
  const Act* x = static_cast<const Act*>(p.x) + c;
  Act* y = static_cast<Act*>(p.y) + c;
  const Channel<Act, Weight> channel(p, c);
  float window[kWindow] = {};
  for (int row = max(first - kept, 0); row < first; ++row) {
    Push(window, ToFloat(x[row * p.x_stride]));
  }
  int b = SequenceOfRow(p.batch.row_offsets, num_sequences, first);
  int begin = p.batch.row_offsets[b], end = p.batch.row_offsets[b + 1];
  for (int row = first; row < last; ++row) {
    while (row >= end) {
      ++b;
      begin = end;
      end = p.batch.row_offsets[b + 1];
    }
    Push(window, ToFloat(x[row * p.x_stride]));
    if (row - begin >= kept) y[row * p.y_stride] = channel.Output(window);
  }
}

template <typename Act, typename Weight>
LaunchStatus Launch(const ConvProblem& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((p.channels + kThreads - 1) / kThreads);
  if (p.num_tokens > p.num_sequences) {
    const dim3 grid(blocks, static_cast<unsigned>((p.num_tokens + kRows - 1) / kRows));
    StatelessKernel<Act, Weight><<<grid, kThreads, 0, stream>>>(p);
  }
  const dim3 grid(blocks, static_cast<unsigned>(p.num_sequences));
  StateKernel<Act, Weight><<<grid, kThreads, 0, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

LaunchStatus LaunchCausalConv(const ConvProblem& p, void* stream) {
  if (p.num_sequences > 65535 || p.num_tokens > int64_t{65535} * kRows) {
    return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  }
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p.bf16) return p.weight_bf16 ? Launch<BF16, BF16>(p, s) : Launch<BF16, float>(p, s);
  return p.weight_bf16 ? Launch<float, BF16>(p, s) : Launch<float, float>(p, s);
}

}  // namespace lockstep
