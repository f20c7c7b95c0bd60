// Moving and filling rows: no arithmetic.
//
// Indices are device memory: the CPU arms refuse one that is outside (InvalidArgument), the CUDA
// arms, which no host waits for, make its row bytes 0xff, a NaN in every float type.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// out[i] = source[rows[i]]. source [T, D], out [R, D] of one dtype; rows I32 [R] in [0, T).
absl::Status GatherRows(ExecContext* ctx, ConstTensorView source, ConstTensorView rows,
                        TensorView out);

// Every element of out [R, D], F32 or BF16 (rounded), becomes `value`; the row stride is honoured.
absl::Status Fill(ExecContext* ctx, float value, TensorView out);

// out[r] = pieces[0][r] | pieces[1][r] | ...: the columns of `world` ranks side by side.
// pieces [world, R, C], out [R, world * C], F32.
absl::Status JoinColumns(ExecContext* ctx, ConstTensorView pieces, TensorView out);

// Whole rows of logits from the shards of the vocabulary that the ranks computed:
// out[i][c] = gathered[c / L][order[i]][c % L] for c < V. gathered F32 [world, R, L] contiguous;
// order I32 [N] in [0, R); out F32 [N, V] with V <= world * L.
absl::Status AssembleLogits(ExecContext* ctx, ConstTensorView gathered, ConstTensorView order,
                            TensorView out);

}  // namespace lockstep
