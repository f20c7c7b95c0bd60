// Quantization of activations to E4M3 codes with F32 scales (numerics N9). All arithmetic is F32:
//   code = e4m3(x / scale), saturating at +-448; a NaN gives the NaN code.
// Formulas of the scales: models-qwen3_5-nemotronh-llama.md 5.3, with amax / 448 evaluated as
// amax * f32(1 / 448), which is what gives the bits of the stored reference outputs.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// Which columns share a scale: K is cut into shards of `shard_size` columns, each into groups of
// `group` columns counted from its start; the last group of a shard may be shorter.
struct ActGroups {
  int64_t shard_size = 0;
  int64_t group = 0;

  int64_t Count(int64_t k) const { return k / shard_size * ((shard_size + group - 1) / group); }
};

enum class ActScaleRule {
  kPerToken,  // max(amax * r, r / 512), r = f32(1 / 448)
  kBlock128,  // max(amax, 1e-10) * r
};

// x [T, K] F32 or BF16; codes U8 [T, K]; scales F32 [T, groups.Count(K)]. K is a multiple of
// shard_size. Rows do not influence each other. InvalidArgument names the operand.
absl::Status QuantizeDynamic(ExecContext* ctx, ConstTensorView x, ActScaleRule rule,
                             const ActGroups& groups, TensorView codes, TensorView scales);

// As above with the one given scale (finite, positive), which every element of `scales` becomes.
absl::Status QuantizeStatic(ExecContext* ctx, ConstTensorView x, float scale,
                            const ActGroups& groups, TensorView codes, TensorView scales);

}  // namespace lockstep
