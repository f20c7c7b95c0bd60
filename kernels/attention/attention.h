// Causal attention over the paged KV cache, with grouped query heads, optional per-head norms,
// partial rotary embedding and an optional output gate.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/batch/cache_view.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

struct AttentionParams {
  int64_t num_q_heads = 0;  // of this rank
  int64_t num_kv_heads =
      0;  // of this rank; query head h uses kv head h / (num_q_heads / num_kv_heads)
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // R <= head_dim, even; 0: no positional encoding. Pairs are (i, i + R/2)
  float scale = 0.0f;      // of the scores, head_dim^-0.5
  bool output_gate = false;  // q projection rows are, per head, [q | gate]
  bool qk_norm = false;
  float norm_eps = 1e-6f;
  float norm_weight_offset = 0.0f;
};

// Prepares queries and writes the step's keys and values into the cache:
//   q = rope(norm(q)), k = rope(norm(k)), both rounded to their dtypes after each of the two; v as
//   is.
// q_and_gate [T, Hq * (gate ? 2 : 1) * hd]; k, v [T, Hkv * hd]; q_norm, k_norm [hd] F32 or BF16
// (ignored without qk_norm); inv_freq F32 [R / 2]; q_out [T, Hq * hd]. Activations are F32 or BF16,
// one dtype. The angle is the F32 product float(position) * inv_freq[i]; its sine and cosine are
// exact to F32.
absl::Status RopeAndCacheWrite(ExecContext* ctx, const ForwardBatch& batch,
                               const AttentionParams& params, ConstTensorView q_and_gate,
                               ConstTensorView k, ConstTensorView v, ConstTensorView q_norm,
                               ConstTensorView k_norm, ConstTensorView inv_freq, KvCacheView cache,
                               TensorView q_out);

// out = round(round(attention(q, cache)) * sigmoid(gate)), or round(attention) without a gate.
// Every query row reads keys and values as the cache stores them, its own chunk's rows included, in
// key blocks of kGrid ascending; the online softmax rescales once per block (numerics N5).
// q [T, Hq * hd]; q_and_gate as above (for the gate); out [T, Hq * hd].
absl::Status PagedAttention(ExecContext* ctx, const ForwardBatch& batch,
                            const AttentionParams& params, ConstTensorView q,
                            ConstTensorView q_and_gate, KvCacheView cache, TensorView out);

}  // namespace lockstep
