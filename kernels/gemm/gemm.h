// Gemm: out[t, n] = sum over k of x[t, k] * w[n, k] for a packed weight in any stored format.
//
// Order (the numerics contract, CPU arm): k ascends with one fused multiply-add each, from zero,
// within a segment; its fp32 sum is multiplied by (activation scale x weight scale), formed first;
// segments of a virtual shard add in ascending order; shards join as ((0+1)+(2+3))+((4+5)+(6+7)).
// An element does not depend on T, on other rows, on threads, or on the instruction set.
//
// Order (CUDA arm): the same, with k ascending in the 16-deep steps of one tensor core instruction
// for every T, and with a shard of a column-parallel weight cut into a fixed number of splits that
// join as the shards do. Weights are NVFP4, FP8 or BF16 and x is BF16 or codes: products of F32
// operands are the CPU's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/gemm_args.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

// How a rank's K is cut.
struct KLayout {
  int64_t begin = 0;       // first column of the full tensor that the rank holds
  int64_t k = 0;           // columns held
  int64_t shard_size = 0;  // columns per virtual shard; divides k
  bool weight_blocks =
      false;  // a 128-block scale changes at every 128 of the full tensor's columns
  int64_t act_group =
      0;  // columns per activation scale, counted from the start of each shard; 0: none
};
std::vector<KSegment> MakeSegments(const KLayout& layout);
// Activation scales per token of that layout: shards x groups of a shard (the last may be shorter).
int64_t ActScalesPerToken(int64_t k, int64_t shard_size, int64_t act_group);
// The parts with sums of their own that the whole K of a column-parallel weight is cut into on a
// device; they join as a tree. A function of the full K alone: 1, 2 or 4. Always 1 on the CPU.
int64_t SplitsOf(DeviceType device, int64_t k);

// The part [n, k] of a weight that one rank holds, packed: gemm_args.h on the CPU,
// pack_fragments.h on CUDA. Borrows its memory, which is the device's.
struct GemmWeight {
  WeightFormat format = WeightFormat::kF32;
  WeightScaling scaling = WeightScaling::kNone;
  DeviceType device = DeviceType::kCpu;
  int64_t n = 0;
  int64_t k = 0;
  const void* codes = nullptr;
  const void* block16_scales = nullptr;  // NVFP4: E4M3 per 16 of K
  float tensor_scale = 1.0f;             // kTensor; for NVFP4 its global multiplier
  const void* scales = nullptr;          // kChannel [n]; kBlock128 [rows held, scale_columns]
  DType scale_dtype = DType::kF32;       // or kBF16
  int64_t scale_columns = 0;             // kBlock128
  std::vector<BlockRows> block_rows;     // kBlock128: cover [0, n) in order
  std::vector<KSegment> segments;        // CPU: cover [0, k) in order; of MakeSegments
  KLayout layout;                        // CUDA: what segments are made of
  int64_t shards = 1;                    // local virtual shards: 1, 2, 4 or 8
  int64_t splits = 1;                    // CUDA: parts of each virtual shard; of SplitsOf
};

// x [T, k]: F32 or BF16, or E4M3 codes as U8. act_scales F32 [T, scales]: needed with codes, and
// only then; nullptr otherwise. out [T, n] F32, or BF16 rounded once. InvalidArgument names the
// operand; FailedPrecondition tells why no arm of the weight's device takes it.
absl::Status Gemm(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                  const ConstTensorView* act_scales, TensorView out);

// As Gemm, but the sums of the virtual shards are kept apart: out F32 [weight.shards, T, n], whose
// row stride (between shards) is honoured. Joining them as a tree gives Gemm's F32 result.
absl::Status GemmShards(ExecContext* ctx, const GemmWeight& weight, ConstTensorView x,
                        const ConstTensorView* act_scales, TensorView out);

}  // namespace lockstep
