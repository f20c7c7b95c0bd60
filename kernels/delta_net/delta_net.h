// Gated delta net in the replay form (numerics N6). A slot keeps the state of the last grid point,
// read-only between grid points, and the rows since (normalized key, corrected value d, cumulative
// gate). Row j of the open chunk, in prefill and in decode alike, with G_j = g_0 + ... + g_j added
// row by row from the grid point, per value head with its key head:
//   d_j = beta_j * (v_j - exp(G_j) S k_j - sum_{i<j} exp(G_j - G_i) (k_i . k_j) d_i)
//   o_j =               exp(G_j) S q_j + sum_{i<=j} exp(G_j - G_i) (k_i . q_j) d_i
// and at the grid point, once per 64 rows:
//   S  <- exp(G_63) S + sum_i exp(G_63 - G_i) d_i (outer) k_i
// Sums run over i ascending. Equal to the recurrence S = exp(g) S; d = beta (v - S k); S += d
// (outer) k; o = S q in exact arithmetic.
//
// A sequence that starts at position 0 starts from zero states, whatever its slot holds: a slot
// needs no clearing between sequences. A sequence that starts at a grid point needs `state`
// there (a restored snapshot) and nothing in the rings. Limits: Dk and Dv are multiples of 16 up to
// 256. q, k and v come from kernels/conv. A sequence's rows and heads depend on nothing but its own
// slot and rows.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

enum class OutputGate { kSilu, kSigmoid };

struct DeltaNetParams {
  int64_t num_k_heads = 0;  // Hk of this rank
  int64_t num_v_heads = 0;  // Hv of this rank; value head h uses key head h / (Hv / Hk)
  int64_t k_dim = 0;        // Dk
  int64_t v_dim = 0;        // Dv
  float norm_eps = 1e-6f;   // of the output norm
  OutputGate output_gate = OutputGate::kSilu;

  int64_t conv_channels() const { return 2 * num_k_heads * k_dim + num_v_heads * v_dim; }
};

// States of one layer for all slots, and their snapshots.
struct DeltaNetState {
  TensorView state;           // F32 [slots, Hv, Dv, Dk] at the last grid point
  TensorView ring_k;          // F32 [slots, kGrid, Hk * Dk]
  TensorView ring_d;          // F32 [slots, kGrid, Hv * Dv]
  TensorView ring_g;          // F32 [slots, kGrid, Hv] cumulative gate G_j
  TensorView state_snapshot;  // F32 [snapshots, Hv, Dv, Dk]
};

// qkv [T, conv_channels()] = q | k | v, after the convolution; z [T, Hv * Dv], b and a [T, Hv]: act
// dtype; a_log, dt_bias [Hv] and norm_weight [Dv]: F32 or BF16; out [T, Hv * Dv] act dtype.
//   q, k l2-normalized over Dk (sum, eps 1e-6), q then times Dk^-0.5
//   beta = sigmoid(b), g = -exp(a_log) * softplus(a + dt_bias)
//   out = round(rms_norm(o, norm_weight) * gate(z))       norm first, then gate
absl::Status GatedDeltaNet(ExecContext* ctx, const ForwardBatch& batch,
                           const DeltaNetParams& params, ConstTensorView qkv, ConstTensorView z,
                           ConstTensorView b, ConstTensorView a, ConstTensorView a_log,
                           ConstTensorView dt_bias, ConstTensorView norm_weight,
                           const DeltaNetState& state, TensorView out);

}  // namespace lockstep
