// The Mamba2 mixer in the replay form (numerics N6). A slot keeps the state of the last grid point,
// read-only between grid points, and the rows since (dt_i x_i, B_i, cumulative decay). Row j of the
// open chunk, in prefill and in decode alike, per head h with its group's B and C:
//   dt_j = softplus(dt_in_j + dt_bias)      a_j = -exp(a_log) * dt_j
//   G_j  = a_0 + ... + a_j                  added row by row from the grid point
//   y_j  = exp(G_j) S C_j + sum_{i<=j} exp(G_j - G_i) (B_i . C_j) dt_i x_i + D x_j
// and at the grid point, once per 64 rows:
//   S   <- exp(G_63) S + sum_i exp(G_63 - G_i) dt_i x_i (outer) B_i
// Sums run over i ascending. Equal to the recurrence S = exp(a) S + dt x (outer) B; y = S C + D x
// in exact arithmetic. dt has no clamp: its limits are (0, infinity). Then, gate first:
//   t = y * silu(z)     out = round(t * rsqrt(mean(t^2 over the group's channels) + eps) * weight)
// Source: the transformers library and design 3.3.
//
// A sequence that starts at position 0 starts from zero states, whatever its slot holds. A sequence
// that starts at a grid point needs `state` there (a restored snapshot) and nothing in the rings.
// Limits: head_dim and state_dim are multiples of 16 up to 256, a group has at most
// 16384 channels. x, B and C come from kernels/conv. Rows and groups of a sequence depend on
// nothing but its own slot and rows.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

struct Mamba2Params {
  int64_t num_heads = 0;   // nh of this rank
  int64_t num_groups = 0;  // G of this rank; head h has group h / (nh / G)
  int64_t head_dim = 0;    // P
  int64_t state_dim = 0;   // N
  float norm_eps = 1e-5f;  // of the group norm

  int64_t inner() const { return num_heads * head_dim; }
  int64_t conv_channels() const { return inner() + 2 * num_groups * state_dim; }
};

// States of one layer for all slots, and their snapshots.
struct Mamba2State {
  TensorView state;           // F32 [slots, nh, P, N] at the last grid point
  TensorView ring_x;          // F32 [slots, kGrid, nh * P] dt_i x_i
  TensorView ring_b;          // F32 [slots, kGrid, G * N]
  TensorView ring_g;          // F32 [slots, kGrid, nh] cumulative decay G_j
  TensorView state_snapshot;  // F32 [snapshots, nh, P, N]
};

// Per head and channel, as the checkpoint stores them: F32 or BF16.
struct Mamba2Weights {
  ConstTensorView a_log;    // [nh]
  ConstTensorView d;        // [nh]
  ConstTensorView dt_bias;  // [nh]
  ConstTensorView norm;     // [nh * P]
};

// xbc [T, conv_channels()] = x | B | C, after the convolution; z [T, nh * P], dt [T, nh]; out
// [T, nh * P]: act dtype, F32 or BF16.
absl::Status Mamba2(ExecContext* ctx, const ForwardBatch& batch, const Mamba2Params& params,
                    ConstTensorView xbc, ConstTensorView z, ConstTensorView dt,
                    const Mamba2Weights& weights, const Mamba2State& state, TensorView out);

}  // namespace lockstep
