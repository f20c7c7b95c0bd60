// What the kernels of sampling share: one row's changed logits, its chunks, its histogram.
//
// Sums of floats have one fixed order (leaves, see logits_rows.h); everything else that is combined
// over threads is a maximum or a sum of integers, so no result depends on the grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/base/float_types.h"
#include "kernels/base/hash.h"
#include "kernels/base/math.h"
#include "kernels/sampling/device_sampler_launch.h"
#include "kernels/sampling/gumbel_noise.h"

namespace lockstep {

constexpr float kMaskedLogit = -__builtin_inff();
constexpr int kChunkThreads = 256;
// Ids of one thread of a chunk: lane (id mod 16) of one leaf.
constexpr int kIdsPerThread = kSamplerChunk / kChunkThreads;

// ---- reductions over a block ----

template <typename T>
__device__ T ShuffleXor(T value, int mask) {
  static_assert(sizeof(T) % 4 == 0, "shuffled word by word");
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof value);
  for (uint32_t& w : words) w = __shfl_xor_sync(0xffffffffu, w, mask);
  memcpy(&value, words, sizeof value);
  return value;
}

// op over the values of all threads, the same on each of them. op is exact, associative and
// commutative.
template <int kThreads, typename T, typename Op>
__device__ T BlockReduce(T value, Op op) {
  __shared__ T warps[kThreads / 32];
  for (int mask = 16; mask >= 1; mask /= 2) value = op(value, ShuffleXor(value, mask));
  __syncthreads();  // the reads of the reduction before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
  for (int w = 1; w < kThreads / 32; ++w) value = op(value, warps[w]);
  return value;
}

struct CountAndWeight {
  uint64_t count;
  uint64_t weight;
};

__device__ inline CountAndWeight operator+(CountAndWeight a, CountAndWeight b) {
  return {a.count + b.count, a.weight + b.weight};
}

// Sums over the threads before this one, and over all of them.
template <int kThreads>
__device__ CountAndWeight BlockExclusiveSum(CountAndWeight value, CountAndWeight* total) {
  __shared__ CountAndWeight warps[kThreads / 32];
  const unsigned lane = threadIdx.x % 32;
  CountAndWeight sum = value;
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const CountAndWeight before = {__shfl_up_sync(0xffffffffu, sum.count, delta),
                                   __shfl_up_sync(0xffffffffu, sum.weight, delta)};
    if (lane >= delta) sum = sum + before;
  }
  __syncthreads();
  if (lane == 31) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  CountAndWeight before = {0, 0}, all = {0, 0};
  for (unsigned w = 0; w < kThreads / 32; ++w) {
    if (w == threadIdx.x / 32) before = all;
    all = all + warps[w];
  }
  *total = all;
  return {before.count + sum.count - value.count, before.weight + sum.weight - value.weight};
}

// ---- one chunk's findings ----

constexpr uint32_t kHasNan = 1;
constexpr uint32_t kHasInfinity = 2;

struct RowScanPart {
  uint64_t digest;
  float raw_maximum;
  float maximum;    // of the changed logits
  int32_t arg;      // the lowest id that has it
  uint32_t broken;  // kHasNan, kHasInfinity
};
static_assert(sizeof(RowScanPart) == kSamplerScanBytes, "stated in device_sampler_launch.h");

__device__ inline RowScanPart EmptyScan() { return {0, kMaskedLogit, kMaskedLogit, -1, 0}; }

struct JoinScans {
  __device__ RowScanPart operator()(RowScanPart a, const RowScanPart& b) const {
    a.digest += b.digest;
    a.raw_maximum = b.raw_maximum > a.raw_maximum ? b.raw_maximum : a.raw_maximum;
    if (b.maximum > a.maximum || (b.maximum == a.maximum && b.arg < a.arg)) {
      a.maximum = b.maximum;
      a.arg = b.arg;
    }
    a.broken |= b.broken;
    return a;
  }
};

// The best noisy score so far; id -1: none.
struct Best {
  float score;
  int32_t id;
};
static_assert(sizeof(Best) == kSamplerBestBytes, "stated in device_sampler_launch.h");

struct BetterOf {
  __device__ Best operator()(Best a, Best b) const {
    const bool take =
        b.id >= 0 && (a.id < 0 || b.score > a.score || (b.score == a.score && b.id < a.id));
    return take ? b : a;
  }
};

// ---- a row ----

__device__ inline int NumChunks(const SamplerState& s) {
  return (s.vocab + kSamplerChunk - 1) / kSamplerChunk;
}

// One row of a launch and the state of its slot.
struct RowView {
  const float* logits;
  int64_t piece_stride;
  uint32_t local;
  SamplerSlot slot;
  bool stop_masked;  // fewer than min_tokens ids were generated
  const uint32_t* uses;
  const uint4* masks;
  const int32_t* bias_ids;
  const float* bias_values;

  __device__ RowView(const SampleProblem& p, const SampleRow& row) {
    const SamplerState& s = p.state;
    logits = p.logits + static_cast<int64_t>(row.row) * p.local;
    piece_stride = p.piece_stride;
    local = p.local;
    slot = {};
    slot.num_logprobs = -1;
    stop_masked = false;
    if (row.slot < 0) return;
    const int64_t i = row.slot;
    slot = s.slots[i];
    stop_masked = s.num_output[i] < slot.min_tokens;
    uses = s.uses + i * s.vocab;
    masks = reinterpret_cast<const uint4*>(s.masks) + i * s.mask_words;
    bias_ids = s.bias_ids + i * kSamplerMaxBias;
    bias_values = s.bias_values + i * kSamplerMaxBias;
  }

  __device__ bool greedy() const { return slot.temperature == 0.0f; }
  // top-k or top-p cut the set of ids.
  __device__ bool cut() const { return !greedy() && (slot.top_k > 0 || slot.top_p < 1.0f); }

  __device__ float Raw(uint32_t id) const {
    if (id < local) return logits[id];
    const uint32_t piece = id / local;
    return logits[piece * piece_stride + (id - piece * local)];
  }

  // Penalties, bias, masks.
  __device__ float Change(float x, uint32_t id) const {
    if (slot.flags & kSlotPenalties) {
      const uint32_t use = uses[id];
      if (use != 0) {
        x = x > 0.0f ? __fdiv_rn(x, slot.repetition_penalty)
                     : __fmul_rn(x, slot.repetition_penalty);
      }
      if (use > 1) {
        const float count = static_cast<float>(static_cast<int32_t>(use >> 1));
        x = __fsub_rn(x, __fmul_rn(slot.frequency_penalty, count));
        x = __fsub_rn(x, slot.presence_penalty);
      }
    }
    if (slot.flags & kSlotMasks) {
      const uint4 planes = masks[id / 32];
      const uint32_t bit = 1u << (id % 32);
      if (planes.w & bit) x = AddBias(x, static_cast<int32_t>(id));
      if ((planes.x | planes.y | (stop_masked ? planes.z : 0u)) & bit) x = kMaskedLogit;
    }
    return x;
  }
  __device__ float Logit(uint32_t id) const { return Change(Raw(id), id); }

  __device__ float AddBias(float x, int32_t id) const {
    int32_t begin = 0, end = slot.num_bias;
    while (begin < end) {
      const int32_t middle = (begin + end) / 2;
      if (bias_ids[middle] < id) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    for (; begin < slot.num_bias && bias_ids[begin] == id; ++begin) {
      x = __fadd_rn(x, bias_values[begin]);
    }
    return x;
  }

  // The noisy score of an id of the set; none if min-p drops it.
  __device__ Best Score(float scaled, uint64_t key, uint32_t id) const {
    if (slot.min_p > 0.0f && scaled != 0.0f && Exp(scaled) < slot.min_p) return {0.0f, -1};
    return {__fadd_rn(scaled, GumbelNoise(key, id)), static_cast<int32_t>(id)};
  }
};

// The findings of all blocks of row r. All threads of the block get them.
template <int kThreads>
__device__ RowScanPart RowScanOf(const SampleProblem& p, int64_t r) {
  static_assert(kThreads * kSamplerChunk >= kSamplerMaxVocab, "one part per thread");
  const auto* scans = static_cast<const RowScanPart*>(p.scratch.scans) + r * p.parts;
  const int t = static_cast<int>(threadIdx.x);
  return BlockReduce<kThreads>(t < p.parts ? scans[t] : EmptyScan(), JoinScans());
}

// The ids of a row's set compete by noisy score. The id of the maximum is in every set, so its
// score is where the best one starts.
struct Race {
  const RowView& view;
  const float maximum;
  const float inverse_temperature;
  const uint64_t key;
  Best best;

  __device__ Race(const RowView& row, const RowScanPart& scan, uint64_t noise_key)
      : view(row),
        maximum(scan.maximum),
        inverse_temperature(1.0f / row.slot.temperature),
        key(noise_key),
        best(row.Score(0.0f, noise_key, static_cast<uint32_t>(scan.arg))) {}

  __device__ float Scaled(float x) const { return ScaledLogit(x, maximum, view.slot.temperature); }

  // Whether the id cannot win, at little cost. A uniform v becomes the noise -log(-log(1 - v)), and
  // -log(1 - v) >= v: to exceed a score by noise, v must lie below exp(scaled - score). The margin
  // is a thousand times the rounding errors of both sides; a NaN (temperatures whose inverse
  // overflows) decides nothing.
  __device__ bool CannotWin(float x, uint32_t id) const {
    const int32_t i = static_cast<int32_t>(Mix64(key + id) >> 33);
    const float v = __fmul_rn(static_cast<float>(i), 4.656612873077393e-10f);
    const float scaled = __fmul_rn(__fsub_rn(x, maximum), inverse_temperature);
    return v > __fmul_rn(__expf(__fsub_rn(scaled, best.score)), 1.001f);
  }

  __device__ void Enter(float x, uint32_t id) {
    if (!CannotWin(x, id)) best = BetterOf()(best, view.Score(Scaled(x), key, id));
  }
};

// ---- order of ids: by value, then by lower id ----

// Ascends with the value; -0 and 0 are one value.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = FloatToBits(__fadd_rn(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline uint64_t OrderKey(float x, uint32_t id) {
  return static_cast<uint64_t>(OrderedBits(x)) << 32 | (0xffffffffu - id);
}
__device__ inline uint32_t IdOfKey(uint64_t key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}
__device__ inline float ValueOfKey(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return BitsToFloat(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// ---- the histogram of a row ----

// The bin of a scaled logit (0 or less): never descends as the logit descends. Fine near the best
// id; from a distance of 20 on, 32 bins to each factor of two.
__device__ inline int BinOf(float scaled) {
  const float distance = -scaled;
  if (distance < 4.0f) return static_cast<int>(distance * 256.0f);
  if (distance < 20.0f) return 1024 + static_cast<int>((distance - 4.0f) * 32.0f);
  const uint32_t bin = (FloatToBits(distance) - FloatToBits(20.0f)) >> 18;
  return 1536 + static_cast<int>(bin < 511u ? bin : 511u);
}

// Where top-k and top-p cut a row. Ids of bins before `begin` are in the set; of ids in
// [begin, end) those that are best in order are, up to where the cuts fall; others are not.
struct CutBins {
  int begin;
  int end;
  bool has_top_k;         // there are more ids than top_k
  CountAndWeight before;  // of bins before `begin`
  uint64_t total_weight;
};

__device__ inline double WantedWeight(float top_p, uint64_t total) {
  return __dmul_rn(static_cast<double>(top_p), static_cast<double>(total));
}

template <int kThreads>
__device__ CutBins FindCut(const SampleProblem& p, int64_t r, const SamplerSlot& slot) {
  constexpr int kBins = kSamplerBins / kThreads;
  __shared__ int top_k_bin;
  __shared__ uint64_t least_weight;  // of the ids that top-k leaves
  __shared__ CutBins cut;
  const int first = static_cast<int>(threadIdx.x) * kBins;
  const uint32_t* counts = p.scratch.counts + r * kSamplerBins + first;
  const uint64_t* weights = p.scratch.weights + r * kSamplerBins + first;
  CountAndWeight own = {0, 0}, total;
  for (int b = 0; b < kBins; ++b) own = own + CountAndWeight{counts[b], weights[b]};
  const CountAndWeight base = BlockExclusiveSum<kThreads>(own, &total);
  const bool has_top_k = slot.top_k > 0 && static_cast<uint64_t>(slot.top_k) < total.count;
  const uint64_t k = static_cast<uint64_t>(slot.top_k);
  if (threadIdx.x == 0) {
    top_k_bin = kSamplerBins - 1;
    least_weight = total.weight;
    cut = {kSamplerBins, kSamplerBins, has_top_k, total, total.weight};
  }
  __syncthreads();
  CountAndWeight before = base;
  for (int b = 0; has_top_k && b < kBins; ++b) {
    const CountAndWeight after = before + CountAndWeight{counts[b], weights[b]};
    if (before.count < k && after.count >= k) {
      top_k_bin = first + b;
      least_weight = before.weight;
    }
    before = after;
  }
  __syncthreads();
  const bool has_top_p = slot.top_p < 1.0f;
  const double wanted = WantedWeight(slot.top_p, least_weight);
  before = base;
  for (int b = 0; (has_top_k || has_top_p) && b < kBins; ++b) {
    const CountAndWeight after = before + CountAndWeight{counts[b], weights[b]};
    const bool is_begin = has_top_p
                              ? (first + b == 0 || static_cast<double>(before.weight) < wanted) &&
                                    static_cast<double>(after.weight) >= wanted
                              : first + b == top_k_bin;
    if (is_begin) {
      const int end = has_top_k ? top_k_bin + 1 : first + b + 1;
      cut = {first + b, end, has_top_k, before, total.weight};
    }
    before = after;
  }
  __syncthreads();
  return cut;
}

}  // namespace lockstep
