// StepSampler: the part of a step after the logits: rows are digested and sampled, sampled tokens
// feed later steps. One implementation per kind of device; both follow kernels/sampling/sampling.h
// bit for bit. Used by the executor thread alone.
//
// A step is queued by BeginStep, Begin (for its new sequences), Stage, Feed, Launch, Finish; its
// results are there once the event recorded after Finish is done, and Collect hands them out. At
// most kTickets steps are queued and not collected. Feed and Launch may be captured in a graph.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/batch/forward_batch.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/exec_context.h"
#include "kernels/sampling/sampling.h"
#include "worker/slot_table.h"

namespace lockstep {

// What is wanted of one row of logits.
struct LogitRow {
  int32_t slot = -1;     // samples for this slot; -1: the digest only
  int64_t position = 0;  // absolute position of the token that is sampled
};

class StepSampler {
 public:
  static constexpr int kTickets = 2;

  virtual ~StepSampler() = default;

  virtual absl::Status BeginStep() = 0;

  // A new sequence owns `slot`, with these tokens so far.
  virtual absl::Status Begin(ExecContext* ctx, int32_t slot, const SamplingParams& params,
                             const std::vector<int32_t>& prompt,
                             const std::vector<int32_t>& output) = 0;

  // Tokens of `batch` that are negative become the token sampled last for their sequence's slot
  // (0 after a row without a choosable id). Such sequences have one token.
  virtual absl::Status Feed(ExecContext* ctx, const ForwardBatch& batch) = 0;

  // Says what is wanted of the rows of logits of the step that follows.
  virtual absl::Status Stage(ExecContext* ctx, const std::vector<LogitRow>& rows, int ticket) = 0;

  // `gathered` F32 [world, R, L]: the R rows of logits as the ranks hold them. A dry run takes the
  // workspace it needs.
  virtual absl::Status Launch(ExecContext* ctx, ConstTensorView gathered) = 0;

  // Brings the results to the host.
  virtual absl::Status Finish(ExecContext* ctx, int ticket) = 0;

  // One result per row of the step with that ticket; rows without a slot have a digest and `nan`.
  virtual absl::Status Collect(int ticket, std::vector<SampleResult>* results) = 0;
};

// `stream` outlives the sampler. ResourceExhausted.
absl::StatusOr<std::unique_ptr<StepSampler>> MakeStepSampler(DeviceStream* stream,
                                                             const BatchLimits& limits,
                                                             Counters* counters);

}  // namespace lockstep
