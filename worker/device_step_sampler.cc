#include "worker/device_step_sampler.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/pinned_buffer.h"
#include "kernels/sampling/device_sampler.h"

namespace lockstep {
namespace {

class DeviceStepSampler : public StepSampler {
 public:
  DeviceStepSampler(DeviceStream* stream, const BatchLimits& limits, Counters* counters)
      : stream_(stream), counters_(counters), num_top_(static_cast<size_t>(limits.slots), 0) {}

  absl::Status Allocate(const BatchLimits& limits) {
    DeviceSamplerLimits sampler;
    sampler.slots = limits.slots;
    sampler.vocab_size = limits.vocab_size;
    sampler.max_rows = limits.max_logit_rows;
    ASSIGN_OR_RETURN(sampler_, DeviceSampler::Create(sampler));
    const int64_t bytes = limits.max_logit_rows * static_cast<int64_t>(sizeof(SampleRow));
    ASSIGN_OR_RETURN(plan_, DeviceBuffer::Allocate(DeviceType::kCuda, bytes));
    for (Ticket& ticket : tickets_) {
      ASSIGN_OR_RETURN(ticket.staging, PinnedBuffer::Allocate(DeviceType::kCuda, bytes));
    }
    return absl::OkStatus();
  }

  absl::Status BeginStep() override {
    sampler_->BeginStep();
    return absl::OkStatus();
  }

  absl::Status Begin(ExecContext* ctx, int32_t slot, const SamplingParams& params,
                     const std::vector<int32_t>& prompt,
                     const std::vector<int32_t>& output) override {
    num_top_[static_cast<size_t>(slot)] = std::max(params.num_logprobs, 0);
    return sampler_->Reset(ctx, slot, params, prompt, output);
  }

  absl::Status Feed(ExecContext* ctx, const ForwardBatch& batch) override {
    if (ctx->dry_run()) return absl::OkStatus();
    // The batch is this rank's own upload.
    const ConstTensorView& t = batch.tokens;
    const TensorView tokens(const_cast<void*>(t.data), t.dtype, t.shape, t.device);
    return sampler_->ResolveFeedback(ctx, tokens, batch.row_offsets, batch.slots);
  }

  absl::Status Stage(ExecContext*, const std::vector<LogitRow>& rows, int ticket) override {
    Ticket& t = tickets_[ticket];
    t.num_rows = static_cast<int64_t>(rows.size());
    t.with_top = false;
    SampleRow* staged = static_cast<SampleRow*>(t.staging.data());
    for (size_t r = 0; r < rows.size(); ++r) {
      staged[r] = sampler_->Row(static_cast<int32_t>(r), rows[r].slot, rows[r].position);
      t.with_top |= rows[r].slot >= 0 && num_top_[static_cast<size_t>(rows[r].slot)] > 0;
    }
    const int64_t bytes = t.num_rows * static_cast<int64_t>(sizeof(SampleRow));
    counters_->Add(Traffic::kPlanToDevice, bytes);
    return stream_->CopyToDevice(plan_.data(), staged, bytes);
  }

  absl::Status Launch(ExecContext* ctx, ConstTensorView gathered) override {
    const int64_t rows = gathered.shape[1];
    // Two words per row; in a dry run only the shape counts.
    const ConstTensorView plan = plan_.View(DType::kI64, {rows, 2});
    return sampler_->Launch(ctx, gathered, plan);
  }

  absl::Status Finish(ExecContext* ctx, int ticket) override {
    const Ticket& t = tickets_[ticket];
    if (t.num_rows == 0) return absl::OkStatus();
    return sampler_->CopyResults(ctx, t.num_rows, t.with_top, ticket);
  }

  absl::Status Collect(int ticket, std::vector<SampleResult>* results) override {
    results->clear();
    for (int64_t i = 0; i < tickets_[ticket].num_rows; ++i) {
      results->push_back(sampler_->Result(ticket, i));
    }
    return absl::OkStatus();
  }

 private:
  struct Ticket {
    PinnedBuffer staging;
    int64_t num_rows = 0;
    bool with_top = false;
  };

  DeviceStream* const stream_;
  Counters* const counters_;
  std::unique_ptr<DeviceSampler> sampler_;
  DeviceBuffer plan_;
  Ticket tickets_[kTickets];
  std::vector<int32_t> num_top_;  // of the slots
};

}  // namespace

absl::StatusOr<std::unique_ptr<StepSampler>> MakeDeviceStepSampler(DeviceStream* stream,
                                                                   const BatchLimits& limits,
                                                                   Counters* counters) {
  auto sampler = std::make_unique<DeviceStepSampler>(stream, limits, counters);
  RETURN_IF_ERROR(sampler->Allocate(limits));
  return std::unique_ptr<StepSampler>(std::move(sampler));
}

}  // namespace lockstep
