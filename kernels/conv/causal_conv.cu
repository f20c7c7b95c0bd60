// The causal convolution on CUDA: one thread per group of neighbouring channels. Taps sit
// right-aligned in a window of inputs, so that every index is a constant.
#include <cuda_runtime.h>

#include "kernels/base/float_types.h"
#include "kernels/base/math.h"
#include "kernels/batch/device_rows.cuh"
#include "kernels/conv/causal_conv_launch.h"

namespace lockstep {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 32;  // that one thread of the stateless kernel walks

// kVec elements that are loaded and stored at once.
template <typename T, int kVec>
struct alignas(kVec * sizeof(T)) Vec {
  T at[kVec];
};

template <typename T, int kVec>
__device__ Vec<T, kVec> LoadVec(const T* p) {
  return *reinterpret_cast<const Vec<T, kVec>*>(p);
}
template <typename T, int kVec>
__device__ void StoreVec(T* p, const Vec<T, kVec>& v) {
  *reinterpret_cast<Vec<T, kVec>*>(p) = v;
}

// The last kWindow inputs of kVec channels, and what they are multiplied with.
template <typename Act, typename Weight, int kVec, int kWindow>
struct Channels {
  using Inputs = Vec<Act, kVec>;
  float taps[kVec][kWindow], window[kVec][kWindow], bias[kVec];
  int first;  // tap that exists first

  __device__ Channels(const ConvProblem& p, int64_t c) {
    const int width = static_cast<int>(p.width);
    first = kWindow - width;
    const Weight* weight = static_cast<const Weight*>(p.weight) + c * width;
#pragma unroll
    for (int u = 0; u < kVec; ++u) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        taps[u][j] = j >= first ? ToFloat(weight[u * width + j - first]) : 0.0f;
        window[u][j] = 0.0f;
      }
      bias[u] = p.bias == nullptr ? 0.0f
                : p.bias_bf16     ? ToFloat(static_cast<const BF16*>(p.bias)[c + u])
                                  : static_cast<const float*>(p.bias)[c + u];
    }
  }

  __device__ void Push(const Inputs& x) {
#pragma unroll
    for (int u = 0; u < kVec; ++u) {
#pragma unroll
      for (int j = 0; j + 1 < kWindow; ++j) window[u][j] = window[u][j + 1];
      window[u][kWindow - 1] = ToFloat(x.at[u]);
    }
  }

  __device__ Inputs Output() const {
    Inputs y;
#pragma unroll
    for (int u = 0; u < kVec; ++u) {
      float sum = bias[u];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        if (j >= first) sum = __fmaf_rn(taps[u][j], window[u][j], sum);
      }
      y.at[u] = FromFloat<Act>(Silu(sum));
    }
    return y;
  }
};

// The first width - 1 rows of a sequence, its snapshots, and its new state.
template <typename Act, typename Weight, int kVec, int kWindow>
__global__ void __launch_bounds__(kThreads) StateKernel(ConvProblem p) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (c >= p.channels) return;
  const int b = blockIdx.y;
  const int begin = p.batch.row_offsets[b], rows = p.batch.row_offsets[b + 1] - begin;
  if (rows <= 0) return;
  const int start = p.batch.start_positions[b];
  const int kept = static_cast<int>(p.width) - 1;
  const Act* x = static_cast<const Act*>(p.x) + begin * p.x_stride + c;
  Act* state = static_cast<Act*>(p.conv) + p.batch.slots[b] * kept * p.channels + c;
  // Input `row` of the chunk; negative rows are those of the state.
  const auto input = [&](int row) -> Vec<Act, kVec> {
    if (row >= 0) return LoadVec<Act, kVec>(x + row * p.x_stride);
    if (start != 0) return LoadVec<Act, kVec>(state + (kept + row) * p.channels);
    Vec<Act, kVec> zeros;
#pragma unroll
    for (int u = 0; u < kVec; ++u) zeros.at[u] = FromFloat<Act>(0.0f);
    return zeros;
  };
  Channels<Act, Weight, kVec, kWindow> channels(p, c);
#pragma unroll
  for (int j = 1; j < kWindow; ++j) {
    if (j > channels.first) channels.Push(input(j - kWindow));
  }
  Act* y = static_cast<Act*>(p.y) + begin * p.y_stride + c;
  for (int row = 0; row < rows && row < kept; ++row) {
    channels.Push(input(row));
    StoreVec(y + row * p.y_stride, channels.Output());
  }
  for (int64_t s = 0; s < p.batch.num_snapshots; ++s) {
    const int end = p.batch.snapshot_position[s] - start;
    if (p.batch.snapshot_sequence[s] != b || end <= 0 || end > rows) continue;
    Act* to = static_cast<Act*>(p.conv_snapshot) + p.batch.snapshot_slot[s] * kept * p.channels + c;
    for (int i = 0; i < kept; ++i) StoreVec(to + i * p.channels, input(end - kept + i));
  }
  // Ascending: entry i comes from an entry past it, which has not been written yet.
  for (int i = 0; i < kept; ++i) StoreVec(state + i * p.channels, input(rows - kept + i));
}

// Rows that see their own chunk only. Rows of StateKernel pass through the window.
template <typename Act, typename Weight, int kVec, int kWindow>
__global__ void __launch_bounds__(kThreads) StatelessKernel(ConvProblem p) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (c >= p.channels) return;
  const int num_sequences = static_cast<int>(p.num_sequences);
  const int kept = static_cast<int>(p.width) - 1;
  const int first = blockIdx.y * kRows;
  const int last = min(first + kRows, p.batch.row_offsets[num_sequences]);
  if (first >= last) return;
  const Act* x = static_cast<const Act*>(p.x) + c;
  Act* y = static_cast<Act*>(p.y) + c;
  Channels<Act, Weight, kVec, kWindow> channels(p, c);
  for (int row = max(first - kept, 0); row < first; ++row) {
    channels.Push(LoadVec<Act, kVec>(x + row * p.x_stride));
  }
  int b = SequenceOfRow(p.batch.row_offsets, num_sequences, first);
  int begin = p.batch.row_offsets[b], end = p.batch.row_offsets[b + 1];
#pragma unroll 4
  for (int row = first; row < last; ++row) {
    while (row >= end) {
      ++b;
      begin = end;
      end = p.batch.row_offsets[b + 1];
    }
    channels.Push(LoadVec<Act, kVec>(x + row * p.x_stride));
    if (row - begin >= kept) StoreVec(y + row * p.y_stride, channels.Output());
  }
}

template <typename Act, typename Weight, int kVec, int kWindow>
LaunchStatus Launch(const ConvProblem& p, cudaStream_t stream) {
  const int64_t per_block = kThreads * kVec;
  const unsigned blocks = static_cast<unsigned>((p.channels + per_block - 1) / per_block);
  if (p.num_tokens > p.num_sequences) {
    const dim3 grid(blocks, static_cast<unsigned>((p.num_tokens + kRows - 1) / kRows));
    StatelessKernel<Act, Weight, kVec, kWindow><<<grid, kThreads, 0, stream>>>(p);
  }
  const dim3 grid(blocks, static_cast<unsigned>(p.num_sequences));
  StateKernel<Act, Weight, kVec, kWindow><<<grid, kThreads, 0, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

template <typename Act, typename Weight>
LaunchStatus Choose(const ConvProblem& p, cudaStream_t stream) {
  constexpr int kVec = 4;
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (kVec * sizeof(Act)) == 0;
  };
  const bool vectors = p.channels % kVec == 0 && p.x_stride % kVec == 0 && p.y_stride % kVec == 0 &&
                       aligned(p.x) && aligned(p.y) && aligned(p.conv) && aligned(p.conv_snapshot);
  if (!vectors) return Launch<Act, Weight, 1, kMaxConvWidth>(p, stream);
  return p.width <= 4 ? Launch<Act, Weight, kVec, 4>(p, stream)
                      : Launch<Act, Weight, kVec, kMaxConvWidth>(p, stream);
}

}  // namespace

LaunchStatus LaunchCausalConv(const ConvProblem& p, void* stream) {
  if (p.num_sequences > 65535 || p.num_tokens > int64_t{65535} * kRows) {
    return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  }
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p.bf16) return p.weight_bf16 ? Choose<BF16, BF16>(p, s) : Choose<BF16, float>(p, s);
  return p.weight_bf16 ? Choose<float, BF16>(p, s) : Choose<float, float>(p, s);
}

}  // namespace lockstep
