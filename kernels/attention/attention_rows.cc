// Attention of one query row over its key blocks, ascending, several query heads of a kv head side
// by side. A score has sixteen lanes (dimension mod 16, ascending, one fused multiply-add each) and
// one tree; an output element takes its values in ascending position with one fused multiply-add
// each. The running maximum, sum and output are rescaled once per block.
#include "kernels/attention/attention_rows.h"

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

constexpr int kHeadsAtOnce = 4;  // query heads that share a pass over keys and values

struct Softmax {
  float q[kMaxHeadDim];
  float maximum;
  float sum;
  float out[kMaxHeadDim];
};

// p[0, count) become exp(p - maximum), where the maximum includes the earlier blocks'; entries up
// to the next multiple of 16 are of no meaning. What the sum and output so far are to be multiplied
// with.
float AddScores(int64_t count, float* p, Softmax* state) {
  float maximum = state->maximum;
  const int64_t lanes = (count + 15) / 16 * 16;
  for (int64_t j = count; j < lanes; ++j) p[j] = kNegativeInfinity;
  float largest[16];
  for (int l = 0; l < 16; ++l) largest[l] = maximum;
  for (int64_t j = 0; j < lanes; j += 16) {
    for (int l = 0; l < 16; ++l) largest[l] = p[j + l] > largest[l] ? p[j + l] : largest[l];
  }
  for (int l = 0; l < 16; ++l) maximum = largest[l] > maximum ? largest[l] : maximum;
  F32x16 sums = Zero();
  for (int64_t j = 0; j < lanes; j += 16) {
    const F32x16 e = ExpOf(Sub(Load(p + j), Set(maximum)));
    Store(p + j, e);
    sums = Add(sums, e);
  }
  const float rescale = Exp(state->maximum - maximum);
  state->maximum = maximum;
  state->sum = state->sum * rescale + ReduceAdd(sums);
  return rescale;
}

// out = out * rescale + sum over j of p[j] values[j], for kVectors vectors of values from `begin`.
template <int kHeads, int kVectors, typename Cache>
void AddValues(const Cache* values, int64_t begin, int64_t count, int64_t dim,
               const float (*p)[kKeyBlock], const float* rescale, Softmax* states) {
  F32x16 acc[kHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int u = 0; u < kVectors; ++u) {
      acc[h][u] = Mul(Load(states[h].out + begin + 16 * u), Set(rescale[h]));
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    F32x16 v[kVectors];
#pragma GCC unroll 4
    for (int u = 0; u < kVectors; ++u) v[u] = LoadAs(values + j * dim + begin + 16 * u);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const F32x16 weight = Set(p[h][j]);
#pragma GCC unroll 4
      for (int u = 0; u < kVectors; ++u) acc[h][u] = Fma(weight, v[u], acc[h][u]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int u = 0; u < kVectors; ++u) Store(states[h].out + begin + 16 * u, acc[h][u]);
  }
}

// Adds the first `count` positions of one cache block to the heads of `states`.
template <int kHeads, typename Cache>
void AddBlock(const Cache* keys, const Cache* values, int64_t count, int64_t dim, float scale,
              Softmax* states) {
  float p[kHeads][kKeyBlock];
  const float* q[kHeads];
  for (int h = 0; h < kHeads; ++h) q[h] = states[h].q;
  // The cache holds whole blocks: keys past `count` may be read, what they give is dropped.
  for (int64_t j = 0; j < count; j += 16) {
    F32x16 scores[kHeads];
    Dots16<kHeads>(keys + j * dim, dim, q, dim, scores);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) Store(p[h] + j, Mul(scores[h], Set(scale)));
  }
  float rescale[kHeads];
  for (int h = 0; h < kHeads; ++h) rescale[h] = AddScores(count, p[h], &states[h]);
    // Eight registers of sums fill the pipeline.
#if defined(LOCKSTEP_ISA_AVX512)
  constexpr int kVectors = kHeads == 4 ? 2 : 4;
#else
  constexpr int kVectors = kHeads == 4 ? 1 : kHeads == 2 ? 2 : 4;
#endif
  int64_t i = 0;
  for (; i + 16 * kVectors <= dim; i += 16 * kVectors) {
    AddValues<kHeads, kVectors>(values, i, count, dim, p, rescale, states);
  }
  for (; i < dim; i += 16) AddValues<kHeads, 1>(values, i, count, dim, p, rescale, states);
}

// Query heads [h, h + kHeads) of one kv head.
template <int kHeads, typename Act, typename Cache>
void HeadRows(const AttentionProblem& p, int64_t sequence, int64_t t, int64_t kv_head, int64_t h) {
  const int64_t dim = p.head_dim;
  Softmax states[kHeads];
  for (int n = 0; n < kHeads; ++n) {
    const Act* q_row = static_cast<const Act*>(p.q) + t * p.q_stride + (h + n) * dim;
    for (int64_t i = 0; i < dim; i += 16) {
      Store(states[n].q + i, LoadAs(q_row + i));
      Store(states[n].out + i, Zero());
    }
    states[n].maximum = kNegativeInfinity;
    states[n].sum = 0.0f;
  }
  const int32_t* table = p.block_table + sequence * p.block_table_stride;
  const int64_t keys_count = int64_t{p.positions[t]} + 1;
  for (int64_t begin = 0; begin < keys_count; begin += kKeyBlock) {
    const int64_t block = table[begin / kKeyBlock];
    const int64_t offset = (block * p.num_kv_heads + kv_head) * kKeyBlock * dim;
    const int64_t left = keys_count - begin;
    AddBlock<kHeads>(static_cast<const Cache*>(p.keys) + offset,
                     static_cast<const Cache*>(p.values) + offset,
                     left < kKeyBlock ? left : kKeyBlock, dim, p.scale, states);
  }
  for (int n = 0; n < kHeads; ++n) {
    Act* out = static_cast<Act*>(p.out) + t * p.out_stride + (h + n) * dim;
    const F32x16 inverse = Set(1.0f / states[n].sum);
    for (int64_t i = 0; i < dim; i += 16) StoreAs(out + i, Mul(Load(states[n].out + i), inverse));
    if (!p.output_gate) continue;
    const Act* gate =
        static_cast<const Act*>(p.q_and_gate) + t * p.q_and_gate_stride + (2 * (h + n) + 1) * dim;
    for (int64_t i = 0; i < dim; i += 16) {
      StoreAs(out + i, Mul(LoadAs(out + i), SigmoidOf(LoadAs(gate + i))));
    }
  }
}

template <typename Act, typename Cache>
void Run(const AttentionProblem& p, int64_t sequence, int64_t t, int64_t kv_head) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const int64_t end = (kv_head + 1) * group;
  int64_t h = kv_head * group;
  for (; h + kHeadsAtOnce <= end; h += kHeadsAtOnce) {
    HeadRows<kHeadsAtOnce, Act, Cache>(p, sequence, t, kv_head, h);
  }
  for (; h + 2 <= end; h += 2) HeadRows<2, Act, Cache>(p, sequence, t, kv_head, h);
  if (h < end) HeadRows<1, Act, Cache>(p, sequence, t, kv_head, h);
}

}  // namespace

void AttentionUnit(const AttentionProblem& p, int64_t sequence, int64_t t, int64_t kv_head) {
  if (p.bf16) {
    p.cache_bf16 ? Run<BF16, BF16>(p, sequence, t, kv_head)
                 : Run<BF16, float>(p, sequence, t, kv_head);
  } else {
    p.cache_bf16 ? Run<float, BF16>(p, sequence, t, kv_head)
                 : Run<float, float>(p, sequence, t, kv_head);
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
