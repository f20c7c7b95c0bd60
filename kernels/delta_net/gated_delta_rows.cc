// The replay form of the gated delta net, row after row, for one sequence and one key head. Sums
// over a head dimension have sixteen lanes (index mod 16, ascending, one fused multiply-add each)
// and one tree; sums over the rows of the open chunk ascend with one fused multiply-add per row.
#include <cstring>

#include "kernels/base/simd_math.h"
#include "kernels/delta_net/delta_net_rows.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr float kL2Eps = 1e-6f;

float ReadScalar(const void* data, bool bf16, int64_t i) {
  return bf16 ? ToFloat(static_cast<const BF16*>(data)[i]) : static_cast<const float*>(data)[i];
}

// y = x / sqrt(sum(x^2) + eps)
template <typename Act>
void L2Normalize(const Act* x, int64_t dim, float* y) {
  F32x16 sum = Zero();
  for (int64_t i = 0; i < dim; i += 16) {
    const F32x16 v = LoadAs(x + i);
    Store(y + i, v);
    sum = Fma(v, v, sum);
  }
  const float scale = 1.0f / __builtin_sqrtf(ReduceAdd(sum) + kL2Eps);
  for (int64_t i = 0; i < dim; i += 16) Store(y + i, Mul(Load(y + i), Set(scale)));
}

// What one row needs besides the caches.
struct Row {
  float k[kMaxDeltaNetDim];
  float q[kMaxDeltaNetDim];
  // Entries past j are of no meaning.
  float kk[kDeltaNetGrid];  // k_i . k_j for the rows i <= j of the open chunk
  float kq[kDeltaNetGrid];  // k_i . q_j
  int64_t index;            // j
};

// The dot products of sixteen rows with k and q.
void DotsKq(const float* rows, int64_t stride, const Row& row, int64_t dim, F32x16 (&dots)[2]) {
  const float* const x[2] = {row.k, row.q};
  if (dim == 32) return Dots16<2>(rows, stride, x, 32, dots);  // unrolled
  Dots16<2>(rows, stride, x, dim, dots);
}

// Caches of one value head in one slot.
struct Head {
  float* state;  // [v_dim, k_dim]
  float* d;      // row i at d + i * d_stride
  float* g;      // row i at g + i * g_stride
  int64_t d_stride;
  int64_t g_stride;
};

Head HeadOf(const DeltaNetProblem& p, int64_t slot, int64_t h) {
  Head head;
  head.state = p.state + (slot * p.num_v_heads + h) * p.v_dim * p.k_dim;
  head.d_stride = p.num_v_heads * p.v_dim;
  head.g_stride = p.num_v_heads;
  head.d = p.ring_d + slot * kDeltaNetGrid * head.d_stride + h * p.v_dim;
  head.g = p.ring_g + slot * kDeltaNetGrid * head.g_stride + h;
  return head;
}

// decay[i] = exp(G_j - G_i) for i <= j.
void Decays(const Head& head, int64_t j, float* decay) {
  const float g_j = head.g[j * head.g_stride];
  float difference[kDeltaNetGrid];
  const int64_t lanes = (j + 16) / 16 * 16;
  for (int64_t i = 0; i < lanes; ++i) {
    difference[i] = i <= j ? g_j - head.g[i * head.g_stride] : 0.0f;
  }
  for (int64_t i = 0; i < lanes; i += 16) Store(decay + i, ExpOf(Load(difference + i)));
}

// What the rows i < j of the open chunk add to kVectors vectors of values: sum_k += ck[i] d_i and
// sum_q += cq[i] d_i.
template <int kVectors>
inline void AddRows(const Head& head, int64_t v, int64_t j, const float* ck, const float* cq,
                    F32x16* sum_k, F32x16* sum_q) {
  F32x16 k[kVectors], q[kVectors];
#pragma GCC unroll 4
  for (int u = 0; u < kVectors; ++u) k[u] = q[u] = Zero();
  for (int64_t i = 0; i < j; ++i) {
    const float* row = head.d + i * head.d_stride + v;
    const F32x16 weight_k = Set(ck[i]), weight_q = Set(cq[i]);
#pragma GCC unroll 4
    for (int u = 0; u < kVectors; ++u) {
      const F32x16 d = Load(row + 16 * u);
      k[u] = Fma(weight_k, d, k[u]);
      q[u] = Fma(weight_q, d, q[u]);
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < kVectors; ++u) {
    sum_k[u] = k[u];
    sum_q[u] = q[u];
  }
}

constexpr int64_t kGateLanes = 16;

// What one row needs for up to sixteen value heads, one per lane.
struct Gates {
  float beta[kGateLanes];
  float from_grid[kGateLanes];  // exp(G_j)
};

// Gates of `count` heads from `first_head`; writes their G_j.
template <typename Act>
void ComputeGates(const DeltaNetProblem& p, int64_t slot, int64_t t, int64_t j, int64_t first_head,
                  int64_t count, Gates* gates) {
  const Act* b = static_cast<const Act*>(p.b) + t * p.b_stride + first_head;
  const Act* a = static_cast<const Act*>(p.a) + t * p.a_stride + first_head;
  float* ring = p.ring_g + (slot * kDeltaNetGrid + j) * p.num_v_heads + first_head;
  float x[kGateLanes] = {}, rate[kGateLanes] = {}, step[kGateLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    x[i] = ToFloat(b[i]);
    rate[i] = ReadScalar(p.a_log, p.a_log_bf16, first_head + i);
    step[i] = ToFloat(a[i]) + ReadScalar(p.dt_bias, p.dt_bias_bf16, first_head + i);
  }
  Store(gates->beta, SigmoidOf(Load(x)));
  Store(rate, ExpOf(Load(rate)));
  Store(step, SoftplusOf(Load(step)));
  for (int64_t i = 0; i < count; ++i) {
    const float g = -rate[i] * step[i];
    x[i] = j == 0 ? g : ring[i - p.num_v_heads] + g;
    ring[i] = x[i];
  }
  Store(gates->from_grid, ExpOf(Load(x)));
}

template <typename Act>
void HeadRow(const DeltaNetProblem& p, const Row& row, const Head& head, int64_t t, int64_t h,
             float beta, float from_grid, const float* norm_weight) {
  const int64_t j = row.index;
  float ck[kDeltaNetGrid], cq[kDeltaNetGrid];
  Decays(head, j, ck);
  for (int64_t i = 0; i <= j; i += 16) {
    const F32x16 decay = Load(ck + i);
    Store(cq + i, Mul(decay, Load(row.kq + i)));
    Store(ck + i, Mul(decay, Load(row.kk + i)));
  }
  const Act* values =
      static_cast<const Act*>(p.qkv) + t * p.qkv_stride + 2 * p.num_k_heads * p.k_dim + h * p.v_dim;
  F32x16 sums_k[kMaxDeltaNetDim / 16], sums_q[kMaxDeltaNetDim / 16];
  for (int64_t v = 0; v < p.v_dim;) {
    const int64_t left = (p.v_dim - v) / 16;
    const int vectors = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    auto* add = vectors == 4 ? AddRows<4> : vectors == 2 ? AddRows<2> : AddRows<1>;
    add(head, v, j, ck, cq, sums_k + v / 16, sums_q + v / 16);
    v += 16 * vectors;
  }
  float o[kMaxDeltaNetDim];
  F32x16 squares = Zero();
  for (int64_t v = 0; v < p.v_dim; v += 16) {
    F32x16 state_kq[2];
    DotsKq(head.state + v * p.k_dim, p.k_dim, row, p.k_dim, state_kq);
    const F32x16 old = Mul(Set(from_grid), state_kq[0]);
    const F32x16 d = Mul(Set(beta), Sub(Sub(LoadAs(values + v), old), sums_k[v / 16]));
    Store(head.d + j * head.d_stride + v, d);
    const F32x16 sum_q = Fma(Set(cq[j]), d, sums_q[v / 16]);
    const F32x16 o_v = Add(Mul(Set(from_grid), state_kq[1]), sum_q);
    Store(o + v, o_v);
    squares = Fma(o_v, o_v, squares);
  }
  const float mean = ReduceAdd(squares) / static_cast<float>(p.v_dim);
  const float scale = 1.0f / __builtin_sqrtf(mean + p.norm_eps);
  const Act* z = static_cast<const Act*>(p.z) + t * p.z_stride + h * p.v_dim;
  Act* out = static_cast<Act*>(p.out) + t * p.out_stride + h * p.v_dim;
  for (int64_t v = 0; v < p.v_dim; v += 16) {
    const F32x16 normed = Mul(Mul(Load(o + v), Set(scale)), Load(norm_weight + v));
    const F32x16 gate = p.sigmoid_gate ? SigmoidOf(LoadAs(z + v)) : SiluOf(LoadAs(z + v));
    StoreAs(out + v, Mul(normed, gate));
  }
}

// S <- exp(G_63) S + sum_i exp(G_63 - G_i) d_i (outer) k_i; k row i at keys + i * k_stride.
void FoldHead(const DeltaNetProblem& p, const Head& head, const float* keys, int64_t k_stride) {
  const int64_t last = kDeltaNetGrid - 1;
  float decay[kDeltaNetGrid], weight[16 * kDeltaNetGrid];
  Decays(head, last, decay);
  const float from_grid = Exp(head.g[last * head.g_stride]);
  constexpr int kRows = 8;  // of the state, side by side
  for (int64_t v = 0; v < p.v_dim; v += 16) {
    for (int64_t i = 0; i < kDeltaNetGrid; ++i) {
      Store(weight + 16 * i, Mul(Set(decay[i]), Load(head.d + i * head.d_stride + v)));
    }
    for (int64_t block = 0; block < 16; block += kRows) {
      for (int64_t c = 0; c < p.k_dim; c += 16) {
        float* state = head.state + (v + block) * p.k_dim + c;
        F32x16 sum[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sum[r] = Mul(Set(from_grid), Load(state + r * p.k_dim));
        }
        for (int64_t i = 0; i < kDeltaNetGrid; ++i) {
          const F32x16 key = Load(keys + i * k_stride + c);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sum[r] = Fma(Set(weight[16 * i + block + r]), key, sum[r]);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) Store(state + r * p.k_dim, sum[r]);
      }
    }
  }
}

template <typename Act>
void Run(const DeltaNetProblem& p, int64_t sequence, int64_t k_head) {
  const BatchRows& batch = p.batch;
  const int64_t slot = batch.slots[sequence];
  const int64_t ratio = p.num_v_heads / p.num_k_heads;
  const int64_t first_head = k_head * ratio;
  const int64_t k_stride = p.num_k_heads * p.k_dim;
  const int64_t states_size = ratio * p.v_dim * p.k_dim;
  float* keys = p.ring_k + slot * kDeltaNetGrid * k_stride + k_head * p.k_dim;
  float* states = HeadOf(p, slot, first_head).state;
  const float q_scale = 1.0f / __builtin_sqrtf(static_cast<float>(p.k_dim));
  float norm_weight[kMaxDeltaNetDim];
  for (int64_t v = 0; v < p.v_dim; ++v) norm_weight[v] = ReadScalar(p.norm_weight, p.norm_bf16, v);

  int64_t position = batch.start_positions[sequence];
  if (position == 0) std::memset(states, 0, static_cast<size_t>(states_size) * sizeof(float));
  for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t) {
    Row row;
    row.index = position % kDeltaNetGrid;
    const Act* q = static_cast<const Act*>(p.qkv) + t * p.qkv_stride + k_head * p.k_dim;
    L2Normalize(q, p.k_dim, row.q);
    L2Normalize(q + k_stride, p.k_dim, row.k);
    for (int64_t c = 0; c < p.k_dim; c += 16) {
      Store(row.q + c, Mul(Load(row.q + c), Set(q_scale)));
      Store(keys + row.index * k_stride + c, Load(row.k + c));
    }
    for (int64_t i = 0; i <= row.index; i += 16) {
      const float* rows = keys + i * k_stride;
      F32x16 dots[2];
      DotsKq(rows, k_stride, row, p.k_dim, dots);
      Store(row.kk + i, dots[0]);
      Store(row.kq + i, dots[1]);
    }
    Gates gates;
    for (int64_t i = 0; i < ratio; ++i) {
      const int64_t lane = i % kGateLanes, h = first_head + i;
      if (lane == 0) {
        const int64_t left = ratio - i;
        ComputeGates<Act>(p, slot, t, row.index, h, left < kGateLanes ? left : kGateLanes, &gates);
      }
      HeadRow<Act>(p, row, HeadOf(p, slot, h), t, h, gates.beta[lane], gates.from_grid[lane],
                   norm_weight);
    }
    ++position;
    if (position % kDeltaNetGrid != 0) continue;
    for (int64_t h = first_head; h < first_head + ratio; ++h) {
      FoldHead(p, HeadOf(p, slot, h), keys, k_stride);
    }
    for (int64_t s = 0; s < batch.num_snapshots; ++s) {
      if (batch.snapshot_sequence[s] != sequence || batch.snapshot_position[s] != position)
        continue;
      std::memcpy(p.state_snapshot +
                      (batch.snapshot_slot[s] * p.num_v_heads + first_head) * p.v_dim * p.k_dim,
                  states, static_cast<size_t>(states_size) * sizeof(float));
    }
  }
}

}  // namespace

void DeltaNetUnit(const DeltaNetProblem& p, int64_t sequence, int64_t k_head) {
  p.bf16 ? Run<BF16>(p, sequence, k_head) : Run<float>(p, sequence, k_head);
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
