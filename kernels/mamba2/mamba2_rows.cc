// The replay form of Mamba2, row after row, for one sequence and one group. Sums over a state
// dimension and over the channels of the group norm have sixteen lanes (index mod 16, ascending,
// one fused multiply-add each) and one tree; sums over the rows of the open chunk ascend with one
// fused multiply-add per row.
#include "kernels/mamba2/mamba2_rows.h"

#include <cstring>

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

float At(const Mamba2Weight& w, int64_t i) {
  return w.bf16 ? ToFloat(static_cast<const BF16*>(w.data)[i])
                : static_cast<const float*>(w.data)[i];
}

F32x16 LanesAt(const Mamba2Weight& w, int64_t i) {
  return w.bf16 ? LoadAs(static_cast<const BF16*>(w.data) + i)
                : LoadAs(static_cast<const float*>(w.data) + i);
}

float Dot(const float* a, const float* b, int64_t dim) {
  F32x16 sum = Zero();
  for (int64_t i = 0; i < dim; i += 16) sum = Fma(Load(a + i), Load(b + i), sum);
  return ReduceAdd(sum);
}

// One group in one slot.
struct Group {
  int64_t first_head;
  int64_t num_heads;
  float* b;  // row i of B at b + i * b_stride
  int64_t b_stride;
};

// Caches of one head in one slot.
struct Head {
  float* state;  // [head_dim, state_dim]
  float* x;      // row i at x + i * x_stride
  float* g;      // row i at g + i * g_stride
  int64_t x_stride;
  int64_t g_stride;
};

Head HeadOf(const Mamba2Problem& p, int64_t slot, int64_t h) {
  Head head;
  head.state = p.state + (slot * p.num_heads + h) * p.head_dim * p.state_dim;
  head.x_stride = p.num_heads * p.head_dim;
  head.g_stride = p.num_heads;
  head.x = p.ring_x + slot * kMamba2Grid * head.x_stride + h * p.head_dim;
  head.g = p.ring_g + slot * kMamba2Grid * head.g_stride + h;
  return head;
}

// decay[i] = exp(G_j - G_i) for i <= j.
void Decays(const Head& head, int64_t j, float* decay) {
  const float g_j = head.g[j * head.g_stride];
  float difference[kMamba2Grid];
  const int64_t lanes = (j + 16) / 16 * 16;
  for (int64_t i = 0; i < lanes; ++i) {
    difference[i] = i <= j ? g_j - head.g[i * head.g_stride] : 0.0f;
  }
  for (int64_t i = 0; i < lanes; i += 16) Store(decay + i, ExpOf(Load(difference + i)));
}

// What one row of a group needs besides the caches.
struct Row {
  int64_t index;           // j
  int64_t t;               // row of the batch
  float c[kMaxMamba2Dim];  // C_j
  float bc[kMamba2Grid];   // B_i . C_j for the rows i <= j of the open chunk
};

// gated [head_dim] = y_j * silu(z_j) of one head.
template <typename Act>
void HeadRow(const Mamba2Problem& p, const Row& row, const Head& head, int64_t h, float* gated) {
  const int64_t j = row.index;
  const float dt =
      Softplus(ToFloat(static_cast<const Act*>(p.dt)[row.t * p.dt_stride + h]) + At(p.dt_bias, h));
  const float a = -Exp(At(p.a_log, h)) * dt;
  const float g_j = j == 0 ? a : head.g[(j - 1) * head.g_stride] + a;
  head.g[j * head.g_stride] = g_j;
  const float from_grid = Exp(g_j);
  const float d = At(p.d, h);
  float weight[kMamba2Grid];
  Decays(head, j, weight);
  for (int64_t i = 0; i <= j; ++i) weight[i] = weight[i] * row.bc[i];
  float state_c[kMaxMamba2Dim];
  for (int64_t i = 0; i < p.head_dim; ++i) {
    state_c[i] = Dot(head.state + i * p.state_dim, row.c, p.state_dim);
  }
  const Act* x = static_cast<const Act*>(p.xbc) + row.t * p.xbc_stride + h * p.head_dim;
  const Act* z = static_cast<const Act*>(p.z) + row.t * p.z_stride + h * p.head_dim;
  for (int64_t c = 0; c < p.head_dim; c += 16) {
    const F32x16 x_j = LoadAs(x + c);
    Store(head.x + j * head.x_stride + c, Mul(Set(dt), x_j));
    F32x16 sum = Zero();
    for (int64_t i = 0; i <= j; ++i) {
      sum = Fma(Set(weight[i]), Load(head.x + i * head.x_stride + c), sum);
    }
    const F32x16 y = Fma(Set(d), x_j, Add(Mul(Set(from_grid), Load(state_c + c)), sum));
    Store(gated + c, Mul(y, SiluOf(LoadAs(z + c))));
  }
}

// out = round(gated / rms(gated) * weight) over the group's channels.
template <typename Act>
void NormRow(const Mamba2Problem& p, const Group& group, int64_t t, const float* gated) {
  const int64_t width = group.num_heads * p.head_dim, first = group.first_head * p.head_dim;
  const float mean = Dot(gated, gated, width) / static_cast<float>(width);
  const float scale = 1.0f / __builtin_sqrtf(mean + p.norm_eps);
  Act* out = static_cast<Act*>(p.out) + t * p.out_stride + first;
  for (int64_t c = 0; c < width; c += 16) {
    StoreAs(out + c, Mul(Mul(Load(gated + c), Set(scale)), LanesAt(p.norm, first + c)));
  }
}

// S <- exp(G_63) S + sum_i exp(G_63 - G_i) dt_i x_i (outer) B_i.
void FoldHead(const Mamba2Problem& p, const Group& group, const Head& head) {
  const int64_t last = kMamba2Grid - 1;
  float decay[kMamba2Grid], weight[kMamba2Grid];
  Decays(head, last, decay);
  const float from_grid = Exp(head.g[last * head.g_stride]);
  for (int64_t r = 0; r < p.head_dim; ++r) {
    for (int64_t i = 0; i < kMamba2Grid; ++i) weight[i] = decay[i] * head.x[i * head.x_stride + r];
    float* state = head.state + r * p.state_dim;
    for (int64_t c = 0; c < p.state_dim; c += 16) {
      F32x16 sum = Mul(Set(from_grid), Load(state + c));
      for (int64_t i = 0; i < kMamba2Grid; ++i) {
        sum = Fma(Set(weight[i]), Load(group.b + i * group.b_stride + c), sum);
      }
      Store(state + c, sum);
    }
  }
}

template <typename Act>
void Run(const Mamba2Problem& p, int64_t sequence, int64_t g) {
  const BatchRows& batch = p.batch;
  const int64_t slot = batch.slots[sequence];
  Group group;
  group.num_heads = p.num_heads / p.num_groups;
  group.first_head = g * group.num_heads;
  group.b_stride = p.num_groups * p.state_dim;
  group.b = p.ring_b + slot * kMamba2Grid * group.b_stride + g * p.state_dim;
  const int64_t last_head = group.first_head + group.num_heads;
  const int64_t states_size = group.num_heads * p.head_dim * p.state_dim;
  float* states = HeadOf(p, slot, group.first_head).state;
  float gated[kMaxMamba2GroupWidth];

  int64_t position = batch.start_positions[sequence];
  if (position == 0) std::memset(states, 0, static_cast<size_t>(states_size) * sizeof(float));
  for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t) {
    Row row;
    row.index = position % kMamba2Grid;
    row.t = t;
    const Act* b = static_cast<const Act*>(p.xbc) + t * p.xbc_stride + p.num_heads * p.head_dim +
                   g * p.state_dim;
    const Act* c = b + group.b_stride;
    for (int64_t i = 0; i < p.state_dim; i += 16) {
      Store(group.b + row.index * group.b_stride + i, LoadAs(b + i));
      Store(row.c + i, LoadAs(c + i));
    }
    for (int64_t i = 0; i <= row.index; ++i) {
      row.bc[i] = Dot(group.b + i * group.b_stride, row.c, p.state_dim);
    }
    for (int64_t h = group.first_head; h < last_head; ++h) {
      HeadRow<Act>(p, row, HeadOf(p, slot, h), h, gated + (h - group.first_head) * p.head_dim);
    }
    NormRow<Act>(p, group, t, gated);
    ++position;
    if (position % kMamba2Grid != 0) continue;
    for (int64_t h = group.first_head; h < last_head; ++h) FoldHead(p, group, HeadOf(p, slot, h));
    for (int64_t s = 0; s < batch.num_snapshots; ++s) {
      if (batch.snapshot_sequence[s] != sequence || batch.snapshot_position[s] != position) {
        continue;
      }
      std::memcpy(p.state_snapshot + (batch.snapshot_slot[s] * p.num_heads + group.first_head) *
                                         p.head_dim * p.state_dim,
                  states, static_cast<size_t>(states_size) * sizeof(float));
    }
  }
}

}  // namespace

void Mamba2Unit(const Mamba2Problem& p, int64_t sequence, int64_t group) {
  p.bf16 ? Run<BF16>(p, sequence, group) : Run<float>(p, sequence, group);
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
