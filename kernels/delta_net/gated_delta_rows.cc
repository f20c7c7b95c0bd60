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

F32x16 DotLanes(const float* a, const float* b, int64_t dim) {
  F32x16 sum = Zero();
  for (int64_t i = 0; i < dim; i += 16) sum = Fma(Load(a + i), Load(b + i), sum);
  return sum;
}

float Dot(const float* a, const float* b, int64_t dim) { return ReduceAdd(DotLanes(a, b, dim)); }

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
  float kk[kDeltaNetGrid];  // k_i . k_j for the rows i <= j of the open chunk
  float kq[kDeltaNetGrid];  // k_i . q_j
  int64_t index;            // j
};

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

template <typename Act>
void HeadRow(const DeltaNetProblem& p, const Row& row, const Head& head, int64_t t, int64_t h,
             const float* norm_weight) {
  const int64_t j = row.index;
  const float beta = Sigmoid(ToFloat(static_cast<const Act*>(p.b)[t * p.b_stride + h]));
  const float a = ToFloat(static_cast<const Act*>(p.a)[t * p.a_stride + h]);
  const float g = -Exp(ReadScalar(p.a_log, p.a_log_bf16, h)) *
                  Softplus(a + ReadScalar(p.dt_bias, p.dt_bias_bf16, h));
  const float g_j = j == 0 ? g : head.g[(j - 1) * head.g_stride] + g;
  head.g[j * head.g_stride] = g_j;
  const float from_grid = Exp(g_j);

  float ck[kDeltaNetGrid], cq[kDeltaNetGrid];
  Decays(head, j, ck);
  for (int64_t i = 0; i <= j; ++i) {
    cq[i] = ck[i] * row.kq[i];
    ck[i] = ck[i] * row.kk[i];
  }
  float state_k[kMaxDeltaNetDim], state_q[kMaxDeltaNetDim];
  for (int64_t v = 0; v < p.v_dim; ++v) {
    state_k[v] = Dot(head.state + v * p.k_dim, row.k, p.k_dim);
    state_q[v] = Dot(head.state + v * p.k_dim, row.q, p.k_dim);
  }
  const Act* values =
      static_cast<const Act*>(p.qkv) + t * p.qkv_stride + 2 * p.num_k_heads * p.k_dim + h * p.v_dim;
  float o[kMaxDeltaNetDim];
  F32x16 squares = Zero();
  for (int64_t v = 0; v < p.v_dim; v += 16) {
    F32x16 sum_k = Zero(), sum_q = Zero();
    for (int64_t i = 0; i < j; ++i) {
      const F32x16 d_i = Load(head.d + i * head.d_stride + v);
      sum_k = Fma(Set(ck[i]), d_i, sum_k);
      sum_q = Fma(Set(cq[i]), d_i, sum_q);
    }
    const F32x16 old = Mul(Set(from_grid), Load(state_k + v));
    const F32x16 d = Mul(Set(beta), Sub(Sub(LoadAs(values + v), old), sum_k));
    Store(head.d + j * head.d_stride + v, d);
    sum_q = Fma(Set(cq[j]), d, sum_q);
    const F32x16 o_v = Add(Mul(Set(from_grid), Load(state_q + v)), sum_q);
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
  float decay[kDeltaNetGrid], weight[kDeltaNetGrid];
  Decays(head, last, decay);
  const float from_grid = Exp(head.g[last * head.g_stride]);
  for (int64_t v = 0; v < p.v_dim; ++v) {
    for (int64_t i = 0; i < kDeltaNetGrid; ++i)
      weight[i] = decay[i] * head.d[i * head.d_stride + v];
    float* state = head.state + v * p.k_dim;
    for (int64_t c = 0; c < p.k_dim; c += 16) {
      F32x16 sum = Mul(Set(from_grid), Load(state + c));
      for (int64_t i = 0; i < kDeltaNetGrid; ++i) {
        sum = Fma(Set(weight[i]), Load(keys + i * k_stride + c), sum);
      }
      Store(state + c, sum);
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
    for (int64_t i = 0; i <= row.index; ++i) {
      row.kk[i] = Dot(keys + i * k_stride, row.k, p.k_dim);
      row.kq[i] = Dot(keys + i * k_stride, row.q, p.k_dim);
    }
    for (int64_t h = first_head; h < first_head + ratio; ++h) {
      HeadRow<Act>(p, row, HeadOf(p, slot, h), t, h, norm_weight);
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
