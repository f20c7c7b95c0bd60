// Sampling on CUDA: the passes over the rows of logits, one block of threads per chunk of ids, and
// the state of the slots.
#include <cuda_runtime.h>

#include "kernels/sampling/device_sampler_launch.h"
#include "kernels/sampling/sample_row.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = kChunkThreads;

// The first id of a thread of a chunk; its others follow at a distance of 16.
__device__ uint32_t FirstId(int chunk) {
  return static_cast<uint32_t>(chunk) * kSamplerChunk + threadIdx.x / 16 * 128 + threadIdx.x % 16;
}

// The thread's raw logits of a chunk; 0 beyond the vocabulary.
__device__ void LoadRaw(const SampleProblem& p, const RowView& view, uint32_t first, float* raw) {
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    const uint32_t id = first + i * 16;
    raw[i] = id < static_cast<uint32_t>(p.state.vocab) ? view.Raw(id) : 0.0f;
  }
}

// Digest, flags and maxima of a block's chunks; clears what the next kernels count in.
__global__ void __launch_bounds__(kThreads) ScanKernel(SampleProblem p) {
  const int64_t r = blockIdx.y;
  const SampleRow row = p.rows[r];
  if (row.row < 0) return;
  const RowView view(p, row);
  if (view.cut()) {
    const int stride = p.parts * kThreads;
    for (int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < kSamplerBins;
         i += stride) {
      p.scratch.counts[r * kSamplerBins + i] = 0;
      p.scratch.weights[r * kSamplerBins + i] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) p.scratch.list_size[r] = 0;
  }
  RowScanPart scan = EmptyScan();
  for (int chunk = static_cast<int>(blockIdx.x); chunk < NumChunks(p.state); chunk += p.parts) {
    float raw[kIdsPerThread];
    const uint32_t first = FirstId(chunk);
    LoadRaw(p, view, first, raw);
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      const uint32_t id = first + i * 16;
      if (id >= static_cast<uint32_t>(p.state.vocab)) break;
      const uint32_t bits = FloatToBits(raw[i]);
      scan.digest += Mix64(static_cast<uint64_t>(id) << 32 | bits);
      if ((bits & 0x7fffffffu) > 0x7f800000u) scan.broken |= kHasNan;
      if (bits == 0x7f800000u) scan.broken |= kHasInfinity;
      scan.raw_maximum = raw[i] > scan.raw_maximum ? raw[i] : scan.raw_maximum;
      const float x = view.Change(raw[i], id);
      if (x > scan.maximum) {
        scan.maximum = x;
        scan.arg = static_cast<int32_t>(id);
      }
    }
  }
  scan = BlockReduce<kThreads>(scan, JoinScans());
  if (threadIdx.x == 0) {
    static_cast<RowScanPart*>(p.scratch.scans)[r * p.parts + blockIdx.x] = scan;
  }
}

// Leaf sums of exp(raw - maximum), in the order of SumExp (logits_rows.h).
__device__ void SumLeaves(const SampleProblem& p, int64_t r, int chunk, const float* raw,
                          float maximum) {
  const uint32_t first = FirstId(chunk);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    const bool inside = first + i * 16 < static_cast<uint32_t>(p.state.vocab);
    sum = __fadd_rn(sum, inside ? Exp(ScaledLogit(raw[i], maximum, 1.0f)) : 0.0f);
  }
  for (int width = 8; width >= 1; width /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, width, 16));
  }
  if (threadIdx.x % 16 == 0) {
    p.scratch.leaf_sums[(r * NumChunks(p.state) + chunk) * 16 + threadIdx.x / 16] = sum;
  }
}

// The `count` best raw logits of the chunk, as keys, best first.
__device__ void FindTop(const SampleProblem& p, int64_t r, int chunk, const float* raw, int count) {
  const uint32_t first = FirstId(chunk);
  uint64_t keys[kIdsPerThread];
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    const bool inside = first + i * 16 < static_cast<uint32_t>(p.state.vocab);
    keys[i] = inside ? OrderKey(raw[i], first + i * 16) : 0;
  }
  uint64_t* top = p.scratch.tops + (r * NumChunks(p.state) + chunk) * kSamplerMaxTop;
  const auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
  for (int n = 0; n < count; ++n) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) best = larger(best, keys[i]);
    best = BlockReduce<kThreads>(best, larger);
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      if (keys[i] == best) keys[i] = 0;
    }
    if (threadIdx.x == 0) top[n] = best;
  }
}

// Numbers and weights of ids per bin, of the chunks of a block. A weight is added in three parts of
// 14 bits, so that their sums over a whole vocabulary fit into 32 bits.
struct BlockBins {
  uint32_t counts[kSamplerBins];
  uint32_t parts[3][kSamplerBins];

  // Everybody before the first Count.
  __device__ void Clear() {
    for (int b = static_cast<int>(threadIdx.x); b < kSamplerBins; b += kThreads) {
      counts[b] = parts[0][b] = parts[1][b] = parts[2][b] = 0;
    }
    __syncthreads();
  }
  __device__ void Count(float scaled) {
    const uint64_t weight = NucleusWeight(scaled);
    const int bin = BinOf(scaled);
    atomicAdd(&counts[bin], 1u);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t part = static_cast<uint32_t>(weight >> (14 * i)) & 0x3fffu;
      if (part != 0) atomicAdd(&parts[i][bin], part);
    }
  }
  // Everybody after the last Count.
  __device__ void AddTo(uint32_t* row_counts, uint64_t* row_weights) const {
    __syncthreads();
    for (int b = static_cast<int>(threadIdx.x); b < kSamplerBins; b += kThreads) {
      if (counts[b] == 0) continue;
      const unsigned long long weight = (static_cast<unsigned long long>(parts[2][b]) << 28) +
                                        (static_cast<unsigned long long>(parts[1][b]) << 14) +
                                        parts[0][b];
      atomicAdd(&row_counts[b], counts[b]);
      if (weight != 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&row_weights[b]), weight);
      }
    }
  }
};

// With the maxima known: noisy scores of rows without cuts, histograms of rows with them, sums and
// best ids of rows whose logprobs are wanted.
__global__ void __launch_bounds__(kThreads) ScoreKernel(SampleProblem p) {
  __shared__ BlockBins bins;
  const int64_t r = blockIdx.y;
  const SampleRow row = p.rows[r];
  if (row.row < 0 || row.slot < 0) return;
  const RowView view(p, row);
  if (view.greedy() && view.slot.num_logprobs < 0) return;
  const RowScanPart scan = RowScanOf<kThreads>(p, r);
  if (scan.broken != 0 || scan.maximum == kMaskedLogit) return;
  if (view.cut()) bins.Clear();
  Race race(view, scan, row.key);
  for (int chunk = static_cast<int>(blockIdx.x); chunk < NumChunks(p.state); chunk += p.parts) {
    const uint32_t first = FirstId(chunk);
    float raw[kIdsPerThread];
    LoadRaw(p, view, first, raw);
    if (view.slot.num_logprobs >= 0) SumLeaves(p, r, chunk, raw, scan.raw_maximum);
    if (view.slot.num_logprobs > 0) {
      FindTop(p, r, chunk, raw, min(view.slot.num_logprobs, p.state.vocab));
    }
    if (view.greedy()) continue;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      const uint32_t id = first + i * 16;
      if (id >= static_cast<uint32_t>(p.state.vocab)) break;
      const float x = view.Change(raw[i], id);
      if (!(x > kMaskedLogit)) continue;
      if (view.cut()) {
        bins.Count(race.Scaled(x));
      } else {
        race.Enter(x, id);
      }
    }
  }
  if (view.cut()) {
    bins.AddTo(p.scratch.counts + r * kSamplerBins, p.scratch.weights + r * kSamplerBins);
  } else if (!view.greedy()) {
    const Best best = BlockReduce<kThreads>(race.best, BetterOf());
    if (threadIdx.x == 0) static_cast<Best*>(p.scratch.bests)[r * p.parts + blockIdx.x] = best;
  }
}

// Of rows with cuts: noisy scores of the ids that are surely in the set, and a list of those whose
// order decides.
__global__ void __launch_bounds__(kThreads) CollectKernel(SampleProblem p) {
  const int64_t r = blockIdx.y;
  const SampleRow row = p.rows[r];
  if (row.row < 0 || row.slot < 0) return;
  const RowView view(p, row);
  if (!view.cut()) return;
  const RowScanPart scan = RowScanOf<kThreads>(p, r);
  if (scan.broken != 0 || scan.maximum == kMaskedLogit) return;
  const CutBins cut = FindCut<kThreads>(p, r, view.slot);
  Race race(view, scan, row.key);
  for (int chunk = static_cast<int>(blockIdx.x); chunk < NumChunks(p.state); chunk += p.parts) {
    const uint32_t first = FirstId(chunk);
    float raw[kIdsPerThread];
    LoadRaw(p, view, first, raw);
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      const uint32_t id = first + i * 16;
      if (id >= static_cast<uint32_t>(p.state.vocab)) break;
      const float x = view.Change(raw[i], id);
      if (!(x > kMaskedLogit)) continue;
      const int bin = BinOf(race.Scaled(x));
      if (bin < cut.begin) {
        race.Enter(x, id);
      } else if (bin < cut.end) {
        const uint32_t at = atomicAdd(&p.scratch.list_size[r], 1u);
        if (at < kSamplerList) p.scratch.list[r * kSamplerList + at] = OrderKey(x, id);
      }
    }
  }
  const Best best = BlockReduce<kThreads>(race.best, BetterOf());
  if (threadIdx.x == 0) static_cast<Best*>(p.scratch.bests)[r * p.parts + blockIdx.x] = best;
}

// ---- the state of the slots ----

__global__ void ClearSlotKernel(SamplerState s, int64_t slot, SamplerSlot params,
                                int32_t num_output, bool has_allowed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t == 0) {
    s.slots[slot] = params;
    s.num_output[slot] = num_output;
  }
  if (params.flags & kSlotPenalties) {
    for (int64_t i = t; i < s.vocab; i += stride) s.uses[slot * s.vocab + i] = 0;
  }
  if (params.flags & kSlotMasks) {
    uint4* masks = reinterpret_cast<uint4*>(s.masks) + slot * s.mask_words;
    const uint4 empty = make_uint4(has_allowed ? ~0u : 0u, 0u, 0u, 0u);
    for (int64_t i = t; i < s.mask_words; i += stride) masks[i] = empty;
  }
}

__global__ void FillSlotKernel(SamplerState s, int64_t slot, SamplerLists lists) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t* uses = s.uses + slot * s.vocab;
  uint32_t* masks = s.masks + slot * s.mask_words * 4;
  const int64_t prompt = lists.num_prompt, output = prompt + lists.num_output;
  const int64_t allowed = output + lists.num_allowed, banned = allowed + lists.num_banned;
  const int64_t stop = banned + lists.num_stop, bias = stop + lists.num_bias;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bias;
       i += stride) {
    const int32_t id = lists.ids[i];
    if (i >= stop) {
      s.bias_ids[slot * kSamplerMaxBias + (i - stop)] = id;
      s.bias_values[slot * kSamplerMaxBias + (i - stop)] = lists.bias_values[i - stop];
    }
    if (id < 0 || id >= s.vocab) continue;
    const uint32_t bit = 1u << (id % 32);
    uint32_t* planes = masks + id / 32 * 4;
    if (i < prompt) {
      atomicOr(&uses[id], 1u);
    } else if (i < output) {
      atomicAdd(&uses[id], 2u);
    } else if (i < allowed) {
      atomicAnd(&planes[0], ~bit);
    } else if (i < banned) {
      atomicOr(&planes[1], bit);
    } else {
      atomicOr(&planes[i < stop ? 2 : 3], bit);
    }
  }
}

__global__ void ResolveFeedbackKernel(SamplerState s, int32_t* tokens, const int32_t* row_offsets,
                                      const int32_t* slots, int64_t num_tokens,
                                      int64_t num_sequences, int64_t num_slots) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (b >= num_sequences) return;
  const int64_t t = row_offsets[b], slot = slots[b];
  if (t < 0 || t >= num_tokens || slot < 0 || slot >= num_slots) return;
  if (tokens[t] < 0) tokens[t] = s.last_sampled[slot];
}

}  // namespace

void LaunchSampleScans(const SampleProblem& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const dim3 grid(static_cast<unsigned>(p.parts), static_cast<unsigned>(p.num_rows));
  ScanKernel<<<grid, kThreads, 0, s>>>(p);
  ScoreKernel<<<grid, kThreads, 0, s>>>(p);
  CollectKernel<<<grid, kThreads, 0, s>>>(p);
}

LaunchStatus LaunchSample(const SampleProblem& p, void* stream) {
  if (p.num_rows == 0) return LaunchStatus::kOk;
  LaunchSampleScans(p, stream);
  LaunchSampleFinish(p, stream);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

LaunchStatus LaunchResetSlot(const SamplerState& state, int32_t slot, const SamplerSlot& params,
                             const SamplerLists& lists, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  constexpr unsigned kBlocks = 64;
  ClearSlotKernel<<<kBlocks, kThreads, 0, s>>>(state, slot, params, lists.num_output,
                                               lists.num_allowed > 0);
  SamplerLists read = lists;
  if ((params.flags & kSlotPenalties) == 0) {
    // Their numbers are known; the ids were not staged.
    read.num_prompt = read.num_output = 0;
  }
  FillSlotKernel<<<kBlocks, kThreads, 0, s>>>(state, slot, read);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

LaunchStatus LaunchResolveFeedback(const SamplerState& state, int32_t* tokens,
                                   const int32_t* row_offsets, const int32_t* slots,
                                   int64_t num_tokens, int64_t num_sequences, int64_t num_slots,
                                   void* stream) {
  if (num_sequences == 0) return LaunchStatus::kOk;
  const unsigned blocks = static_cast<unsigned>((num_sequences + kThreads - 1) / kThreads);
  ResolveFeedbackKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      state, tokens, row_offsets, slots, num_tokens, num_sequences, num_slots);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
