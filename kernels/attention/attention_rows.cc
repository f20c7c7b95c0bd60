// Attention of one query row over its key blocks, ascending. A score has sixteen lanes (dimension
// mod 16, ascending, one fused multiply-add each) and one tree; an output element takes its values
// in ascending position with one fused multiply-add each. The running maximum, sum and output are
// rescaled once per block.
#include "kernels/attention/attention_rows.h"

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

struct Softmax {
  float maximum = kNegativeInfinity;
  float sum = 0.0f;
  float out[kMaxHeadDim] = {};
};

// Adds the first `count` positions of one cache block.
template <typename Cache>
void AddBlock(const float* q, const Cache* keys, const Cache* values, int64_t count, int64_t dim,
              float scale, Softmax* state) {
  float p[kKeyBlock];
  float maximum = state->maximum;
  // The cache holds whole blocks: keys past `count` may be read, what they give is dropped.
  for (int64_t j = 0; j < count; j += 16) {
    Store(p + j, Mul(Dots16(keys + j * dim, dim, q, dim), Set(scale)));
  }
  for (int64_t j = count; j < kKeyBlock; ++j) p[j] = kNegativeInfinity;
  float largest[16];
  for (int l = 0; l < 16; ++l) largest[l] = maximum;
  for (int64_t j = 0; j < kKeyBlock; j += 16) {
    for (int l = 0; l < 16; ++l) largest[l] = p[j + l] > largest[l] ? p[j + l] : largest[l];
  }
  for (int l = 0; l < 16; ++l) maximum = largest[l] > maximum ? largest[l] : maximum;
  F32x16 sums = Zero();
  for (int64_t j = 0; j < kKeyBlock; j += 16) {
    const F32x16 e = ExpOf(Sub(Load(p + j), Set(maximum)));
    Store(p + j, e);
    sums = Add(sums, e);
  }
  const float rescale = Exp(state->maximum - maximum);
  state->maximum = maximum;
  state->sum = state->sum * rescale + ReduceAdd(sums);
  for (int64_t i = 0; i < dim; i += 64) {
    const int64_t width = dim - i < 64 ? dim - i : 64;
    F32x16 acc[4] = {Zero(), Zero(), Zero(), Zero()};
    for (int64_t w = 0; w < width; w += 16) {
      acc[w / 16] = Mul(Load(state->out + i + w), Set(rescale));
    }
    if (width == 64) {
      for (int64_t j = 0; j < count; ++j) {
        const F32x16 weight = Set(p[j]);
        const Cache* v = values + j * dim + i;
        acc[0] = Fma(weight, LoadAs(v), acc[0]);
        acc[1] = Fma(weight, LoadAs(v + 16), acc[1]);
        acc[2] = Fma(weight, LoadAs(v + 32), acc[2]);
        acc[3] = Fma(weight, LoadAs(v + 48), acc[3]);
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t w = 0; w < width; w += 16) {
          acc[w / 16] = Fma(Set(p[j]), LoadAs(values + j * dim + i + w), acc[w / 16]);
        }
      }
    }
    for (int64_t w = 0; w < width; w += 16) Store(state->out + i + w, acc[w / 16]);
  }
}

template <typename Act, typename Cache>
void HeadRow(const AttentionProblem& p, int64_t sequence, int64_t t, int64_t kv_head, int64_t h) {
  const int64_t dim = p.head_dim;
  const Act* q_row = static_cast<const Act*>(p.q) + t * p.q_stride + h * dim;
  float q[kMaxHeadDim];
  for (int64_t i = 0; i < dim; i += 16) Store(q + i, LoadAs(q_row + i));
  const int32_t* table = p.block_table + sequence * p.block_table_stride;
  const int64_t keys_count = int64_t{p.positions[t]} + 1;
  Softmax state;
  for (int64_t begin = 0; begin < keys_count; begin += kKeyBlock) {
    const int64_t block = table[begin / kKeyBlock];
    const int64_t offset = (block * p.num_kv_heads + kv_head) * kKeyBlock * dim;
    const int64_t left = keys_count - begin;
    AddBlock(q, static_cast<const Cache*>(p.keys) + offset,
             static_cast<const Cache*>(p.values) + offset, left < kKeyBlock ? left : kKeyBlock, dim,
             p.scale, &state);
  }
  Act* out = static_cast<Act*>(p.out) + t * p.out_stride + h * dim;
  const F32x16 inverse = Set(1.0f / state.sum);
  for (int64_t i = 0; i < dim; i += 16) StoreAs(out + i, Mul(Load(state.out + i), inverse));
  if (!p.output_gate) return;
  const Act* gate =
      static_cast<const Act*>(p.q_and_gate) + t * p.q_and_gate_stride + (2 * h + 1) * dim;
  for (int64_t i = 0; i < dim; i += 16) {
    StoreAs(out + i, Mul(LoadAs(out + i), SigmoidOf(LoadAs(gate + i))));
  }
}

template <typename Act, typename Cache>
void Run(const AttentionProblem& p, int64_t sequence, int64_t t, int64_t kv_head) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    HeadRow<Act, Cache>(p, sequence, t, kv_head, h);
  }
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
