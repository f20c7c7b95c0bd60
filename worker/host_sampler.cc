#include "worker/host_sampler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/rows.h"

namespace lockstep {
namespace {

bool HasNan(const float* row, int64_t n) {
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) nan |= std::isnan(row[i]);
  return nan;
}

class HostSampler : public StepSampler {
 public:
  explicit HostSampler(const BatchLimits& limits)
      : vocab_(limits.vocab_size),
        states_(static_cast<size_t>(limits.slots)),
        last_(static_cast<size_t>(limits.slots), 0),
        results_(kTickets) {}

  absl::Status BeginStep() override { return absl::OkStatus(); }

  absl::Status Begin(ExecContext*, int32_t slot, const SamplingParams& params,
                     const std::vector<int32_t>& prompt,
                     const std::vector<int32_t>& output) override {
    states_[static_cast<size_t>(slot)].Reset(params, vocab_, prompt, output);
    return absl::OkStatus();
  }

  absl::Status Feed(ExecContext* ctx, const ForwardBatch& batch) override {
    if (ctx->dry_run()) return absl::OkStatus();
    const int32_t* offsets = batch.row_offsets.row<int32_t>(0);
    const int32_t* slots = batch.slots.row<int32_t>(0);
    // The batch is this rank's own upload.
    int32_t* tokens = const_cast<int32_t*>(batch.tokens.row<int32_t>(0));
    for (int64_t b = 0; b < batch.num_sequences; ++b) {
      int32_t* token = tokens + offsets[b];
      if (*token < 0) *token = last_[static_cast<size_t>(slots[b])];
    }
    return absl::OkStatus();
  }

  absl::Status Stage(ExecContext*, const std::vector<LogitRow>& rows, int ticket) override {
    rows_ = rows;
    ticket_ = ticket;
    return absl::OkStatus();
  }

  absl::Status Launch(ExecContext* ctx, ConstTensorView gathered) override {
    const int64_t count = gathered.shape[1];
    Workspace::Scope scope(ctx->workspace);
    TensorView logits = ctx->workspace->Take(DType::kF32, {count, vocab_});
    // Sampled rows come first, so that they are one tensor.
    std::vector<int32_t> order;
    std::vector<const SamplingState*> states;
    std::vector<int64_t> positions;
    if (ctx->dry_run()) {
      // Every row may be sampled.
      order.resize(static_cast<size_t>(count));
      states.resize(static_cast<size_t>(std::min<int64_t>(count, num_slots())), &states_[0]);
      positions.resize(states.size());
    } else {
      CHECK_EQ(count, static_cast<int64_t>(rows_.size()));
      for (int32_t r = 0; r < count; ++r) {
        const LogitRow& row = rows_[static_cast<size_t>(r)];
        if (row.slot < 0) continue;
        order.push_back(r);
        states.push_back(&states_[static_cast<size_t>(row.slot)]);
        positions.push_back(row.position);
      }
      for (int32_t r = 0; r < count; ++r) {
        if (rows_[static_cast<size_t>(r)].slot < 0) order.push_back(r);
      }
    }
    const int64_t sampled = static_cast<int64_t>(states.size());
    const ConstTensorView places(order.data(), DType::kI32, {count});
    RETURN_IF_ERROR(AssembleLogits(ctx, gathered, places, logits));
    std::vector<SampleResult> samples;
    if (sampled > 0) {
      RETURN_IF_ERROR(Sample(ctx, logits.Rows(0, sampled), vocab_, states, positions, &samples));
    }
    if (ctx->dry_run()) return absl::OkStatus();
    std::vector<SampleResult>& results = results_[static_cast<size_t>(ticket_)];
    results.assign(rows_.size(), {});
    ctx->pool->ParallelFor(count - sampled, [&](int64_t i) {
      const float* row = logits.row<float>(sampled + i);
      SampleResult& result = results[static_cast<size_t>(order[static_cast<size_t>(sampled + i)])];
      result.digest = LogitsDigest(row, vocab_);
      result.nan = HasNan(row, vocab_);
    });
    for (int64_t i = 0; i < sampled; ++i) {
      const size_t r = static_cast<size_t>(order[static_cast<size_t>(i)]);
      const size_t slot = static_cast<size_t>(rows_[r].slot);
      SampleResult& sample = samples[static_cast<size_t>(i)];
      last_[slot] = std::max(sample.id, 0);
      if (sample.id >= 0) states_[slot].Append(sample.id);
      results[r] = std::move(sample);
    }
    return absl::OkStatus();
  }

  absl::Status Finish(ExecContext*, int) override { return absl::OkStatus(); }

  absl::Status Collect(int ticket, std::vector<SampleResult>* results) override {
    *results = std::move(results_[static_cast<size_t>(ticket)]);
    return absl::OkStatus();
  }

 private:
  int64_t num_slots() const { return static_cast<int64_t>(states_.size()); }

  const int64_t vocab_;
  std::vector<SamplingState> states_;  // of the slots
  std::vector<int32_t> last_;          // sampled last, per slot
  std::vector<LogitRow> rows_;         // of the step that follows
  int ticket_ = 0;
  std::vector<std::vector<SampleResult>> results_;  // per ticket
};

}  // namespace

std::unique_ptr<StepSampler> MakeHostSampler(const BatchLimits& limits) {
  return std::make_unique<HostSampler>(limits);
}

}  // namespace lockstep
