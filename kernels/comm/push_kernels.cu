// The push collectives. Grids are small enough for two ranks to run on one GPU at the same time.
#include <cuda_runtime.h>

#include "kernels/comm/push_launch.h"
#include "kernels/comm/push_ptx.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kMaxBlocks = 32;
constexpr int kPollsPerCheck = 256;

struct Op {
  uint32_t sequence;
  int64_t offset;  // packets before this collective's slot
  bool dead;       // the channel has failed
};

__device__ Op BeginOp(const PushChannel& ch) {
  Op op;
  op.sequence = LoadVolatile(ch.sequence) + 1;
  op.offset = (op.sequence & 1) * ch.capacity;
  op.dead = LoadVolatile(ch.failed) != 0;
  return op;
}

// The last block to end gives the collective its number.
__device__ void EndOp(const PushChannel& ch, const Op& op) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(ch.ended, 1u) + 1 == gridDim.x) {
    *ch.ended = 0;
    *ch.sequence = op.sequence;
  }
}

__device__ void Fail(const PushChannel& ch, PushFailure failure, uint32_t sequence, int peer,
                     uint64_t mine, uint64_t theirs) {
  if (atomicExch(ch.failed, 1u) != 0) return;
  ch.record->sequence = sequence;
  ch.record->peer = static_cast<uint32_t>(peer);
  ch.record->mine = mine;
  ch.record->theirs = theirs;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&ch.record->failure) = static_cast<uint32_t>(failure);
}

__device__ void Push(const PushChannel& ch, const Op& op, int peer, int64_t packet, uint32_t a,
                     uint32_t b) {
  StorePacket(static_cast<uint4*>(ch.to[peer]) + op.offset + packet,
              make_uint4(a, op.sequence, b, op.sequence));
}

// Waits for a packet of `peer`. False when the channel fails; `start` is when this thread began.
__device__ bool Wait(const PushChannel& ch, const Op& op, int peer, int64_t packet, uint64_t start,
                     uint32_t* a, uint32_t* b) {
  const uint4* from = static_cast<const uint4*>(ch.from[peer]) + op.offset + packet;
  for (int polls = 1;; ++polls) {
    const uint4 p = LoadPacket(from);
    if (p.y == op.sequence && p.w == op.sequence) {
      *a = p.x;
      *b = p.z;
      return true;
    }
    if (polls % kPollsPerCheck != 0) continue;
    if (LoadVolatile(ch.failed) != 0) return false;
    if (LoadVolatile(ch.abort) != 0) {
      Fail(ch, PushFailure::kAborted, op.sequence, peer, 0, 0);
      return false;
    }
    if (GlobalTimer() - start > ch.timeout_ns) {
      Fail(ch, PushFailure::kTimeout, op.sequence, peer, 0, 0);
      return false;
    }
  }
}

template <int kWorld>
__device__ float Tree(const float* parts) {
  const float left = Tree<kWorld / 2>(parts);
  return __fadd_rn(left, Tree<kWorld / 2>(parts + kWorld / 2));
}
template <>
__device__ float Tree<1>(const float* parts) {
  return parts[0];
}

template <int kWorld>
__global__ void __launch_bounds__(kThreads)
    AllReduceKernel(const PushChannel* channel, float* data, int64_t n) {
  const PushChannel& ch = *channel;
  const Op op = BeginOp(ch);
  const int64_t packets = (n + 1) / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (!op.dead) {
    for (int64_t p = first; p < packets; p += step) {
      const uint32_t a = __float_as_uint(data[2 * p]);
      const uint32_t b = 2 * p + 1 < n ? __float_as_uint(data[2 * p + 1]) : 0u;
#pragma unroll
      for (int r = 0; r < kWorld; ++r) {
        if (r != ch.rank) Push(ch, op, r, p, a, b);
      }
    }
    const uint64_t start = GlobalTimer();
    for (int64_t p = first; p < packets; p += step) {
      float even[kWorld];
      float odd[kWorld];
      const float mine_even = data[2 * p];
      const float mine_odd = 2 * p + 1 < n ? data[2 * p + 1] : 0.0f;
      bool there = true;
#pragma unroll
      for (int r = 0; r < kWorld; ++r) {
        uint32_t a = __float_as_uint(mine_even);
        uint32_t b = __float_as_uint(mine_odd);
        if (r != ch.rank) there = there && Wait(ch, op, r, p, start, &a, &b);
        even[r] = __uint_as_float(a);
        odd[r] = __uint_as_float(b);
      }
      if (!there) break;
      data[2 * p] = Tree<kWorld>(even);
      if (2 * p + 1 < n) data[2 * p + 1] = Tree<kWorld>(odd);
    }
  }
  EndOp(ch, op);
}

__global__ void __launch_bounds__(kThreads)
    AllGatherKernel(const PushChannel* channel, const uint32_t* local, int64_t n, uint32_t* out,
                    int64_t out_stride) {
  const PushChannel& ch = *channel;
  const Op op = BeginOp(ch);
  const int64_t packets = (n + 1) / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (!op.dead) {
    for (int64_t p = first; p < packets; p += step) {
      const uint32_t a = local[2 * p];
      const uint32_t b = 2 * p + 1 < n ? local[2 * p + 1] : 0u;
      for (int r = 0; r < ch.world; ++r) {
        if (r != ch.rank) Push(ch, op, r, p, a, b);
      }
      uint32_t* own = out + ch.rank * out_stride + 2 * p;
      own[0] = a;
      if (2 * p + 1 < n) own[1] = b;
    }
    const uint64_t start = GlobalTimer();
    for (int64_t p = first; p < packets; p += step) {
      bool there = true;
      for (int r = 0; r < ch.world && there; ++r) {
        if (r == ch.rank) continue;
        uint32_t a = 0;
        uint32_t b = 0;
        there = Wait(ch, op, r, p, start, &a, &b);
        uint32_t* to = out + r * out_stride + 2 * p;
        if (there) to[0] = a;
        if (there && 2 * p + 1 < n) to[1] = b;
      }
      if (!there) break;
    }
  }
  EndOp(ch, op);
}

__global__ void AgreeKernel(const PushChannel* channel, uint64_t value) {
  const PushChannel& ch = *channel;
  const Op op = BeginOp(ch);
  const int peer = static_cast<int>(threadIdx.x);
  if (!op.dead && peer < ch.world && peer != ch.rank) {
    Push(ch, op, peer, 0, static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32));
    uint32_t a = 0;
    uint32_t b = 0;
    if (Wait(ch, op, peer, 0, GlobalTimer(), &a, &b)) {
      const uint64_t theirs = static_cast<uint64_t>(b) << 32 | a;
      if (theirs != value) Fail(ch, PushFailure::kDisagreed, op.sequence, peer, value, theirs);
    }
  }
  EndOp(ch, op);
}

unsigned Blocks(int64_t n) {
  const int64_t packets = (n + 1) / 2;
  const int64_t blocks = (packets + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks);
}

}  // namespace

LaunchStatus LaunchPushAllReduce(const PushChannel* channel, int world, float* data, int64_t n,
                                 void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = Blocks(n);
  switch (world) {
    case 2:
      AllReduceKernel<2><<<blocks, kThreads, 0, s>>>(channel, data, n);
      break;
    case 4:
      AllReduceKernel<4><<<blocks, kThreads, 0, s>>>(channel, data, n);
      break;
    case 8:
      AllReduceKernel<8><<<blocks, kThreads, 0, s>>>(channel, data, n);
      break;
    default:
      return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

LaunchStatus LaunchPushAllGather(const PushChannel* channel, int world, const uint32_t* local,
                                 int64_t n, uint32_t* out, int64_t out_stride, void* stream) {
  if (world < 2 || world > kMaxPushRanks) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  AllGatherKernel<<<Blocks(n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(channel, local, n,
                                                                                 out, out_stride);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

LaunchStatus LaunchPushAgree(const PushChannel* channel, uint64_t value, void* stream) {
  AgreeKernel<<<1, kMaxPushRanks, 0, static_cast<cudaStream_t>(stream)>>>(channel, value);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
