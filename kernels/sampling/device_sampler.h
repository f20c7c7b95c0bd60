// DeviceSampler: Sample (sampling.h) where logits, token counts and sampled ids never leave the
// device. For equal logits and equal requests its results are those of the CPU arm, bit for bit:
// ids, digests, flags, logprobs.
//
// One thread, the one that launches ops. Everything is asynchronous on ctx->stream. Launch,
// ResolveFeedback and CopyResults can be captured in a graph: their addresses are fixed, and the
// plan of a replay is what `rows` holds then. Reset is not captured: it goes before the graph.
//
// A step, two of which may be in flight:
//   sampler->BeginStep();
//   for (new sequences) sampler->Reset(ctx, slot, params, prompt, output);
//   rows[i] = sampler->Row(i, slot, position);                  // part of the step's upload
//   sampler->ResolveFeedback(ctx, tokens, row_offsets, slots);  // before the embedding
//   sampler->Launch(ctx, gathered_logits, rows);                // after the gather of the ranks
//   sampler->CopyResults(ctx, num_rows, half);
//   ... once an event behind the copy has happened:
//   sampler->Result(half, i)
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/exec_context.h"
#include "kernels/runtime/pinned_buffer.h"
#include "kernels/sampling/device_sampler_launch.h"
#include "kernels/sampling/sampling.h"

namespace lockstep {

struct DeviceSamplerLimits {
  int64_t slots = 0;
  int64_t vocab_size = 0;  // at most kSamplerMaxVocab
  int64_t max_rows = 0;    // of a launch
  // Pinned bytes for the token logs and lists of one step's Resets; see Reset.
  int64_t staging_bytes = int64_t{4} << 20;
};

class DeviceSampler {
 public:
  // Allocates: about 4 bytes per slot and id. InvalidArgument for limits; ResourceExhausted;
  // FailedPrecondition in a build without CUDA.
  static absl::StatusOr<std::unique_ptr<DeviceSampler>> Create(const DeviceSamplerLimits& limits);

  // Device memory held.
  int64_t bytes() const;

  // Once per step, before its first Reset. The step before the last one must have happened on the
  // device: what it staged is overwritten.
  void BeginStep();

  // The slot's state becomes a function of (params, prompt, output), as SamplingState::Reset: ids
  // are in [0, vocab_size), those of bias and masks may be outside. last_sampled stays. What is
  // read from the host (token logs of requests with penalties, lists) counts as kPlanToDevice.
  // When a step's lists exceed the staging memory more is allocated and kept (staging_blocks()).
  // InvalidArgument when there are more than kSamplerMaxBias biases or kSamplerMaxTop logprobs.
  absl::Status Reset(ExecContext* ctx, int32_t slot, const SamplingParams& params,
                     const std::vector<int32_t>& prompt, const std::vector<int32_t>& output);
  int64_t staging_blocks() const;

  // The plan's entry for row `row` of the logits: sampled for `slot`, for the token at absolute
  // position `position`. With slot -1 the row gives its digest and whether it holds a NaN.
  SampleRow Row(int32_t row, int32_t slot, int64_t position) const;
  static SampleRow PaddingRow() { return {-1, -1, 0}; }

  // Samples rows: I64 [N, 2], each a SampleRow; N <= max_rows. logits F32 [world, R, L], the shards
  // of the vocabulary that the ranks computed, world * L >= vocab_size; columns from vocab_size on
  // are padding. A slot occurs at most once. Updates counts and last_sampled of the slots whose row
  // gave an id; a row without one makes last_sampled 0. Temporaries come from the workspace.
  absl::Status Launch(ExecContext* ctx, ConstTensorView logits, ConstTensorView rows);

  // Copies the results of the last launch to pinned memory `half`, 0 or 1. `with_top`: some row has
  // num_logprobs > 0. Counts kResultsToHost, and kLogitsToHost for the top logprobs.
  absl::Status CopyResults(ExecContext* ctx, int64_t num_rows, bool with_top, int half);
  // What row i of the plan gave; valid once the copy has happened and until the next one to `half`.
  SampleResult Result(int half, int64_t i) const;

  // tokens[row_offsets[b]] becomes the id that was sampled last for slots[b] where it is negative.
  // tokens I32 [T], row_offsets I32 [B + 1], slots I32 [B], as in ForwardBatch.
  absl::Status ResolveFeedback(ExecContext* ctx, TensorView tokens, ConstTensorView row_offsets,
                               ConstTensorView slots);

  // I32 [slots], on the device.
  ConstTensorView last_sampled() const;

 private:
  explicit DeviceSampler(const DeviceSamplerLimits& limits) : limits_(limits) {}
  absl::Status Allocate();
  // Pinned memory of this step.
  absl::StatusOr<void*> Stage(int64_t bytes);

  struct Staging {
    std::vector<PinnedBuffer> blocks;
    size_t block = 0;  // in use
    int64_t used = 0;  // of it
  };

  const DeviceSamplerLimits limits_;
  SamplerState state_;
  std::vector<DeviceBuffer> buffers_;
  SampledRow* results_ = nullptr;
  TopLogprob* top_ = nullptr;
  std::array<PinnedBuffer, 2> host_results_;
  std::array<PinnedBuffer, 2> host_top_;
  std::array<Staging, 2> staging_;
  int step_half_ = 0;
  std::vector<uint64_t> request_keys_;  // [slots]
};

}  // namespace lockstep
