// Sampling on CUDA: the last kernel, one block of threads per row. Joins the chunks' findings,
// orders the ids on whose order top-k and top-p depend, writes results and updates the slots.
#include <cuda_runtime.h>

#include "kernels/sampling/device_sampler_launch.h"
#include "kernels/sampling/sample_row.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 512;

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Sorts keys[0, size) in descending order; size is a power of two.
__device__ void SortDescending(uint64_t* keys, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int step = width / 2; step >= 1; step /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kThreads) {
        const int a = i / step * step * 2 + i % step, b = a + step;
        const bool descending = (a & width) == 0;
        if ((keys[a] < keys[b]) == descending) {
          const uint64_t key = keys[a];
          keys[a] = keys[b];
          keys[b] = key;
        }
      }
    }
  }
  __syncthreads();
}

__device__ int PowerOfTwo(int count) {
  int size = 1;
  while (size < count) size *= 2;
  return size;
}

// One row that top-k or top-p cut.
struct CutRow {
  const SampleProblem& p;
  const RowView& view;
  const SampleRow& row;
  CutBins cut;
  float maximum;

  __device__ float Scaled(float x) const { return ScaledLogit(x, maximum, view.slot.temperature); }
  __device__ bool has_top_p() const { return view.slot.top_p < 1.0f; }
  // Ids to keep of those whose order decides, if top-k cuts.
  __device__ uint64_t top_k_left() const {
    return static_cast<uint64_t>(view.slot.top_k) - cut.before.count;
  }

  // The best id of the `count` listed ones that are in the set.
  __device__ Best FromList(int64_t r, int count, uint64_t* keys) const {
    const int size = PowerOfTwo(count);
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      keys[i] = i < count ? p.scratch.list[r * kSamplerList + i] : 0;
    }
    SortDescending(keys, size);
    const int left = cut.has_top_k ? static_cast<int>(top_k_left()) : count;
    const int each = (left + kThreads - 1) / kThreads;
    const int begin = min(left, static_cast<int>(threadIdx.x) * each),
              end = min(left, begin + each);
    CountAndWeight own = {0, 0}, all;
    for (int i = begin; i < end; ++i) own.weight += NucleusWeight(Scaled(ValueOfKey(keys[i])));
    uint64_t weight = cut.before.weight + BlockExclusiveSum<kThreads>(own, &all).weight;
    uint32_t below = 0;  // ids in front of the one that reaches top-p
    if (has_top_p()) {
      const double wanted = WantedWeight(
          view.slot.top_p, cut.has_top_k ? cut.before.weight + all.weight : cut.total_weight);
      for (int i = begin; i < end; ++i) {
        weight += NucleusWeight(Scaled(ValueOfKey(keys[i])));
        if (static_cast<double>(weight) < wanted) ++below;
      }
    }
    below = BlockReduce<kThreads>(below, Add());
    const int kept = has_top_p() ? min(left, static_cast<int>(below) + 1) : left;
    Best best = {0.0f, -1};
    for (int i = static_cast<int>(threadIdx.x); i < kept; i += kThreads) {
      best = BetterOf()(best, view.Score(Scaled(ValueOfKey(keys[i])), row.key, IdOfKey(keys[i])));
    }
    return best;
  }

  // Calls fn(scaled logit, key, id) for the ids whose order decides.
  template <typename Fn>
  __device__ void ForEach(Fn fn) const {
    const uint32_t vocab = static_cast<uint32_t>(p.state.vocab);
    for (uint32_t id = threadIdx.x; id < vocab; id += kThreads) {
      const float x = view.Logit(id);
      if (!(x > kMaskedLogit)) continue;
      const float scaled = Scaled(x);
      const int bin = BinOf(scaled);
      if (bin >= cut.begin && bin < cut.end) fn(scaled, OrderKey(x, id), id);
    }
  }

  // Number and weight of those with at least this key.
  __device__ CountAndWeight AtLeast(uint64_t key) const {
    CountAndWeight sum = {0, 0};
    ForEach([&](float scaled, uint64_t other, uint32_t) {
      if (other >= key) sum = sum + CountAndWeight{1, NucleusWeight(scaled)};
    });
    return BlockReduce<kThreads>(sum, Add());
  }

  // The largest key for which enough(AtLeast(key)). Keys differ in the value's bits and in the
  // lowest 18 bits; those between are ones.
  template <typename Fn>
  __device__ uint64_t LargestKey(Fn enough) const {
    uint64_t key = 0xffffffffull & ~static_cast<uint64_t>(kSamplerMaxVocab - 1);
    for (int bit = 63; bit >= 0; --bit) {
      if (bit >= 18 && bit < 32) continue;
      const uint64_t candidate = key | 1ull << bit;
      if (enough(AtLeast(candidate))) key = candidate;
    }
    return key;
  }

  // The same as FromList for a row whose ids do not fit into the list: nearly all of them are
  // equal. Reads the row once per bit of a key.
  __device__ Best FromRow() const {
    uint64_t least = 0, total = cut.total_weight;
    if (cut.has_top_k) {
      const uint64_t left = top_k_left();
      least = LargestKey([&](CountAndWeight sum) { return sum.count >= left; });
      total = cut.before.weight + AtLeast(least).weight;
    }
    if (has_top_p()) {
      const double wanted = WantedWeight(view.slot.top_p, total);
      const uint64_t key = LargestKey([&](CountAndWeight sum) {
        return static_cast<double>(cut.before.weight + sum.weight) >= wanted;
      });
      least = key > least ? key : least;
    }
    Best best = {0.0f, -1};
    ForEach([&](float scaled, uint64_t key, uint32_t id) {
      if (key >= least) best = BetterOf()(best, view.Score(scaled, row.key, id));
    });
    return best;
  }
};

// The sampled id of a row that has one.
__device__ int32_t SampledId(const SampleProblem& p, int64_t r, const SampleRow& row,
                             const RowView& view, const RowScanPart& scan, uint64_t* keys) {
  if (view.greedy()) return scan.arg;
  const int t = static_cast<int>(threadIdx.x);
  const Best* bests = static_cast<const Best*>(p.scratch.bests) + r * p.parts;
  Best best = t < p.parts ? bests[t] : Best{0.0f, -1};
  if (view.cut()) {
    const CutRow cut{p, view, row, FindCut<kThreads>(p, r, view.slot), scan.maximum};
    const uint32_t listed = p.scratch.list_size[r];
    if (listed > kSamplerList) {
      best = BetterOf()(best, cut.FromRow());
    } else if (listed > 0) {
      best = BetterOf()(best, cut.FromList(r, static_cast<int>(listed), keys));
    }
  }
  return BlockReduce<kThreads>(best, BetterOf()).id;
}

// Joins the leaf sums pairwise like the digits of a binary counter, as SumExp does. `sums` has room
// for two times the number of leaves.
__device__ float JoinLeaves(const float* leaf_sums, int leaves, float* sums) {
  __shared__ float total;
  float* from = sums;
  float* to = sums + leaves;
  for (int i = static_cast<int>(threadIdx.x); i < leaves; i += kThreads) from[i] = leaf_sums[i];
  __syncthreads();
  bool first = true;
  for (int n = leaves; n > 0; n /= 2) {
    if (n % 2 == 1) {
      if (threadIdx.x == 0) total = first ? from[n - 1] : __fadd_rn(from[n - 1], total);
      first = false;
    }
    for (int i = static_cast<int>(threadIdx.x); i < n / 2; i += kThreads) {
      to[i] = __fadd_rn(from[2 * i], from[2 * i + 1]);
    }
    __syncthreads();
    float* next = from;
    from = to;
    to = next;
  }
  return total;
}

__device__ void WriteLogprobs(const SampleProblem& p, int64_t r, const RowView& view, float maximum,
                              uint64_t* keys, SampledRow* result) {
  const int chunks = NumChunks(p.state), leaves = (p.state.vocab + 127) / 128;
  const float sum =
      JoinLeaves(p.scratch.leaf_sums + r * chunks * 16, leaves, reinterpret_cast<float*>(keys));
  const float log_sum = Log(sum);
  const uint32_t id = static_cast<uint32_t>(result->id);
  result->logprob = __fsub_rn(__fsub_rn(view.Raw(id), maximum), log_sum);
  const int count = min(view.slot.num_logprobs, p.state.vocab);
  if (count <= 0) return;
  result->num_top = count;
  const int size = PowerOfTwo(chunks * count);
  __syncthreads();  // the sums are read
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    const uint64_t* top = p.scratch.tops + (r * chunks + i / count) * kSamplerMaxTop;
    keys[i] = i < chunks * count ? top[i % count] : 0;
  }
  SortDescending(keys, size);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const uint32_t top_id = IdOfKey(keys[i]);
    const float logprob = __fsub_rn(__fsub_rn(view.Raw(top_id), maximum), log_sum);
    p.top[r * kSamplerMaxTop + i] = {static_cast<int32_t>(top_id), logprob};
  }
}

__global__ void __launch_bounds__(kThreads) FinishKernel(SampleProblem p) {
  __shared__ uint64_t keys[kSamplerList];
  const int64_t r = blockIdx.x;
  const SampleRow row = p.rows[r];
  SampledRow result = {-1, 0, 0, 0.0f, 0};
  if (row.row < 0) {
    if (threadIdx.x == 0) p.results[r] = result;
    return;
  }
  const RowScanPart scan = RowScanOf<kThreads>(p, r);
  result.digest = scan.digest;
  if (row.slot < 0) {
    if (scan.broken & kHasNan) result.flags = kRowNan;
    if (threadIdx.x == 0) p.results[r] = result;
    return;
  }
  const RowView view(p, row);
  if (scan.broken != 0) {
    result.flags = kRowNan;
  } else if (scan.maximum == kMaskedLogit) {
    result.flags = kRowAllMasked;
  } else {
    result.id = SampledId(p, r, row, view, scan, keys);
    __syncthreads();  // `keys` is free
    if (view.slot.num_logprobs >= 0) WriteLogprobs(p, r, view, scan.raw_maximum, keys, &result);
  }
  __syncthreads();  // the state was read
  if (threadIdx.x != 0) return;
  p.results[r] = result;
  const SamplerState& s = p.state;
  s.last_sampled[row.slot] = result.id < 0 ? 0 : result.id;
  if (result.id < 0) return;
  ++s.num_output[row.slot];
  if (view.slot.flags & kSlotPenalties) {
    s.uses[static_cast<int64_t>(row.slot) * s.vocab + result.id] += 2;
  }
}

}  // namespace

void LaunchSampleFinish(const SampleProblem& p, void* stream) {
  FinishKernel<<<static_cast<unsigned>(p.num_rows), kThreads, 0,
                 static_cast<cudaStream_t>(stream)>>>(p);
}

}  // namespace lockstep
