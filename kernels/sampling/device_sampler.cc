#include "kernels/sampling/device_sampler.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/op_check.h"
#include "kernels/sampling/gumbel_noise.h"

namespace lockstep {

#if !defined(KERNELS_WITH_CUDA)
// Never called: Create refuses.
LaunchStatus LaunchSample(const SampleProblem&, void*) { return LaunchStatus::kOk; }
LaunchStatus LaunchResetSlot(const SamplerState&, int32_t, const SamplerSlot&, const SamplerLists&,
                             void*) {
  return LaunchStatus::kOk;
}
LaunchStatus LaunchResolveFeedback(const SamplerState&, int32_t*, const int32_t*, const int32_t*,
                                   int64_t, int64_t, int64_t, void*) {
  return LaunchStatus::kOk;
}
#endif

namespace {

#if defined(KERNELS_WITH_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

template <typename T>
absl::Status AllocateArray(int64_t count, std::vector<DeviceBuffer>* buffers, T** out) {
  ASSIGN_OR_RETURN(
      DeviceBuffer buffer,
      DeviceBuffer::Allocate(DeviceType::kCuda, count * static_cast<int64_t>(sizeof(T))));
  *out = static_cast<T*>(buffer.data());
  buffers->push_back(std::move(buffer));
  return absl::OkStatus();
}

// What of `params` the kernels act on for a sequence that has generated `num_output` ids.
SamplerSlot SlotOf(const SamplingParams& p, int64_t num_output) {
  SamplerSlot slot = {};
  slot.temperature = p.temperature;
  slot.top_p = p.top_p;
  slot.min_p = p.min_p;
  slot.presence_penalty = p.presence_penalty;
  slot.frequency_penalty = p.frequency_penalty;
  slot.repetition_penalty = p.repetition_penalty;
  slot.top_k = p.top_k;
  slot.min_tokens = p.min_tokens;
  slot.num_logprobs = p.num_logprobs;
  slot.num_bias = static_cast<int32_t>(p.logit_bias.size());
  if (p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f || p.repetition_penalty != 1.0f) {
    slot.flags |= kSlotPenalties;
  }
  if (!p.logit_bias.empty() || !p.allowed_ids.empty() || !p.banned_ids.empty() ||
      (num_output < p.min_tokens && !p.stop_ids.empty())) {
    slot.flags |= kSlotMasks;
  }
  return slot;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceSampler>> DeviceSampler::Create(
    const DeviceSamplerLimits& limits) {
  if (limits.slots < 1 || limits.max_rows < 1 || limits.max_rows > 65535 ||
      limits.staging_bytes < 1 || limits.vocab_size < 1 || limits.vocab_size > kSamplerMaxVocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("device sampler: ", limits.slots, " slots, ", limits.max_rows, " rows, ",
                     limits.staging_bytes, " staging bytes, a vocabulary of ", limits.vocab_size,
                     "; at least 1 of each, at most 65535 rows and a vocabulary of ",
                     kSamplerMaxVocab, " are possible"));
  }
  if (!kHasCuda) {
    return absl::FailedPreconditionError(
        "device sampler: this build has no cuda; build with --config=cuda or use Sample");
  }
  std::unique_ptr<DeviceSampler> sampler(new DeviceSampler(limits));
  RETURN_IF_ERROR(sampler->Allocate());
  return sampler;
}

absl::Status DeviceSampler::Allocate() {
  const int64_t slots = limits_.slots, vocab = limits_.vocab_size, rows = limits_.max_rows;
  state_.vocab = static_cast<int32_t>(vocab);
  state_.mask_words = static_cast<int32_t>((vocab + 31) / 32);
  RETURN_IF_ERROR(AllocateArray(slots, &buffers_, &state_.slots));
  RETURN_IF_ERROR(AllocateArray(slots, &buffers_, &state_.num_output));
  RETURN_IF_ERROR(AllocateArray(slots, &buffers_, &state_.last_sampled));
  RETURN_IF_ERROR(AllocateArray(slots * vocab, &buffers_, &state_.uses));
  RETURN_IF_ERROR(AllocateArray(slots * state_.mask_words * 4, &buffers_, &state_.masks));
  RETURN_IF_ERROR(AllocateArray(slots * kSamplerMaxBias, &buffers_, &state_.bias_ids));
  RETURN_IF_ERROR(AllocateArray(slots * kSamplerMaxBias, &buffers_, &state_.bias_values));
  RETURN_IF_ERROR(AllocateArray(rows, &buffers_, &results_));
  RETURN_IF_ERROR(AllocateArray(rows * kSamplerMaxTop, &buffers_, &top_));
  for (int half : {0, 1}) {
    ASSIGN_OR_RETURN(
        host_results_[half],
        PinnedBuffer::Allocate(DeviceType::kCuda, rows * static_cast<int64_t>(sizeof(SampledRow))));
    ASSIGN_OR_RETURN(
        host_top_[half],
        PinnedBuffer::Allocate(DeviceType::kCuda,
                               rows * kSamplerMaxTop * static_cast<int64_t>(sizeof(TopLogprob))));
    ASSIGN_OR_RETURN(PinnedBuffer block,
                     PinnedBuffer::Allocate(DeviceType::kCuda, limits_.staging_bytes));
    staging_[half].blocks.push_back(std::move(block));
  }
  request_keys_.assign(static_cast<size_t>(slots), 0);
  return absl::OkStatus();
}

int64_t DeviceSampler::bytes() const {
  int64_t sum = 0;
  for (const DeviceBuffer& buffer : buffers_) sum += buffer.bytes();
  return sum;
}

int64_t DeviceSampler::staging_blocks() const {
  return static_cast<int64_t>(staging_[0].blocks.size() + staging_[1].blocks.size());
}

void DeviceSampler::BeginStep() {
  step_half_ = 1 - step_half_;
  staging_[step_half_].block = 0;
  staging_[step_half_].used = 0;
}

absl::StatusOr<void*> DeviceSampler::Stage(int64_t bytes) {
  Staging& staging = staging_[step_half_];
  while (staging.used + bytes > staging.blocks[staging.block].bytes()) {
    if (staging.block + 1 == staging.blocks.size()) {
      const int64_t size = std::max(bytes, limits_.staging_bytes);
      ASSIGN_OR_RETURN(PinnedBuffer block, PinnedBuffer::Allocate(DeviceType::kCuda, size));
      staging.blocks.push_back(std::move(block));
      LogInfo("device sampler: ", size, " more bytes of staging memory, ", staging_blocks(),
              " blocks");
    }
    ++staging.block;
    staging.used = 0;
  }
  uint8_t* data = static_cast<uint8_t*>(staging.blocks[staging.block].data()) + staging.used;
  staging.used += (bytes + 63) / 64 * 64;
  return static_cast<void*>(data);
}

absl::Status DeviceSampler::Reset(ExecContext* ctx, int32_t slot, const SamplingParams& params,
                                  const std::vector<int32_t>& prompt,
                                  const std::vector<int32_t>& output) {
  CHECK(slot >= 0 && slot < limits_.slots) << "slot " << slot << " of " << limits_.slots << " ";
  if (params.logit_bias.size() > static_cast<size_t>(kSamplerMaxBias) ||
      params.num_logprobs > kSamplerMaxTop) {
    return absl::InvalidArgumentError(absl::StrCat(
        "device sampler: ", params.logit_bias.size(), " logit biases and ", params.num_logprobs,
        " logprobs, at most ", kSamplerMaxBias, " and ", kSamplerMaxTop, " are possible"));
  }
  const int64_t num_output = static_cast<int64_t>(output.size());
  const SamplerSlot device_params = SlotOf(params, num_output);
  const bool penalties = (device_params.flags & kSlotPenalties) != 0;
  for (const std::vector<int32_t>* log : {&prompt, &output}) {
    for (int32_t id : *log) {
      CHECK(id >= 0 && id < limits_.vocab_size) << "id " << id << " of " << limits_.vocab_size;
    }
  }
  std::vector<std::pair<int32_t, float>> bias = params.logit_bias;
  std::stable_sort(bias.begin(), bias.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const std::vector<int32_t> none;
  const std::vector<int32_t>& stop = num_output < params.min_tokens ? params.stop_ids : none;

  SamplerLists lists;
  lists.num_prompt = static_cast<int32_t>(prompt.size());
  lists.num_output = static_cast<int32_t>(output.size());
  lists.num_allowed = static_cast<int32_t>(params.allowed_ids.size());
  lists.num_banned = static_cast<int32_t>(params.banned_ids.size());
  lists.num_stop = static_cast<int32_t>(stop.size());
  lists.num_bias = static_cast<int32_t>(bias.size());
  size_t count = params.allowed_ids.size() + params.banned_ids.size() + stop.size() + bias.size();
  if (penalties) count += prompt.size() + output.size();
  const int64_t bytes = static_cast<int64_t>((count + bias.size()) * 4);
  ASSIGN_OR_RETURN(void* const staged, Stage(bytes));
  int32_t* ids = static_cast<int32_t*>(staged);
  lists.ids = ids;
  for (const std::vector<int32_t>* list : {penalties ? &prompt : &none, penalties ? &output : &none,
                                           &params.allowed_ids, &params.banned_ids, &stop}) {
    ids = std::copy(list->begin(), list->end(), ids);
  }
  for (const auto& entry : bias) *ids++ = entry.first;
  float* values = reinterpret_cast<float*>(ids);
  lists.bias_values = values;
  for (const auto& entry : bias) *values++ = entry.second;

  request_keys_[static_cast<size_t>(slot)] = RequestNoiseKey(params.seed, params.output_index);
  ctx->counters->Add(Traffic::kPlanToDevice, bytes);
  return ToStatus("device sampler",
                  LaunchResetSlot(state_, slot, device_params, lists, ctx->stream));
}

SampleRow DeviceSampler::Row(int32_t row, int32_t slot, int64_t position) const {
  CHECK(row >= 0 && slot < limits_.slots) << "row " << row << ", slot " << slot << " ";
  const uint64_t key =
      slot < 0 ? 0 : RowNoiseKey(request_keys_[static_cast<size_t>(slot)], position);
  return {row, slot < 0 ? -1 : slot, key};
}

absl::Status DeviceSampler::Launch(ExecContext* ctx, ConstTensorView logits, ConstTensorView rows) {
  constexpr char kOp[] = "device sampler";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("logits", logits, 3).Rank("rows", rows, 2).status());
  RETURN_IF_ERROR(OpCheck(*ctx, kOp)
                      .Tensor("logits", logits, {DType::kF32}, logits.shape)
                      .Tensor("rows", rows, {DType::kI64}, {rows.shape[0], 2})
                      .That(logits.shape[0] * logits.shape[2] >= limits_.vocab_size,
                            absl::StrCat("logits is ", logits.ToString(), " for a vocabulary of ",
                                         limits_.vocab_size))
                      .That(rows.shape[0] <= limits_.max_rows && rows.contiguous(),
                            absl::StrCat("rows is ", rows.ToString(), ", at most ",
                                         limits_.max_rows, " contiguous rows are possible"))
                      .status());
  const int64_t n = rows.shape[0];
  const int64_t chunks = (limits_.vocab_size + kSamplerChunk - 1) / kSamplerChunk;
  const int64_t parts = SamplerParts(chunks, std::max<int64_t>(n, 1));
  Workspace::Scope scope(ctx->workspace);
  const auto take = [&](int64_t bytes) {
    return ctx->workspace->Take(DType::kU8, {std::max<int64_t>(bytes, 1)}).data;
  };
  SampleProblem p;
  p.state = state_;
  p.scratch.scans = take(n * parts * kSamplerScanBytes);
  p.scratch.bests = take(n * parts * kSamplerBestBytes);
  p.scratch.leaf_sums = static_cast<float*>(take(n * chunks * 16 * 4));
  p.scratch.tops = static_cast<uint64_t*>(take(n * chunks * kSamplerMaxTop * 8));
  p.scratch.weights = static_cast<uint64_t*>(take(n * kSamplerBins * 8));
  p.scratch.counts = static_cast<uint32_t*>(take(n * kSamplerBins * 4));
  p.scratch.list = static_cast<uint64_t*>(take(n * kSamplerList * 8));
  p.scratch.list_size = static_cast<uint32_t*>(take(n * 4));
  p.logits = static_cast<const float*>(logits.data);
  p.piece_stride = logits.row_stride;
  p.local = static_cast<uint32_t>(logits.shape[2]);
  p.rows = static_cast<const SampleRow*>(rows.data);
  p.num_rows = n;
  p.parts = static_cast<int32_t>(parts);
  p.results = results_;
  p.top = top_;
  CountLaunch(ctx);
  return ctx->dry_run() ? absl::OkStatus() : ToStatus(kOp, LaunchSample(p, ctx->stream));
}

absl::Status DeviceSampler::CopyResults(ExecContext* ctx, int64_t num_rows, bool with_top,
                                        int half) {
  CHECK(num_rows >= 0 && num_rows <= limits_.max_rows && (half == 0 || half == 1));
  const int64_t bytes = num_rows * static_cast<int64_t>(sizeof(SampledRow));
  ctx->counters->Add(Traffic::kResultsToHost, bytes);
  RETURN_IF_ERROR(CopyAsync(DeviceType::kCuda, host_results_[static_cast<size_t>(half)].data(),
                            results_, bytes, ctx->stream));
  if (!with_top) return absl::OkStatus();
  const int64_t top_bytes = num_rows * kSamplerMaxTop * static_cast<int64_t>(sizeof(TopLogprob));
  ctx->counters->Add(Traffic::kLogitsToHost, top_bytes);
  return CopyAsync(DeviceType::kCuda, host_top_[static_cast<size_t>(half)].data(), top_, top_bytes,
                   ctx->stream);
}

SampleResult DeviceSampler::Result(int half, int64_t i) const {
  CHECK(i >= 0 && i < limits_.max_rows && (half == 0 || half == 1));
  const SampledRow& row =
      static_cast<const SampledRow*>(host_results_[static_cast<size_t>(half)].data())[i];
  const TopLogprob* top =
      static_cast<const TopLogprob*>(host_top_[static_cast<size_t>(half)].data()) +
      i * kSamplerMaxTop;
  SampleResult result;
  result.id = row.id;
  result.nan = (row.flags & kRowNan) != 0;
  result.all_masked = (row.flags & kRowAllMasked) != 0;
  result.digest = row.digest;
  result.logprob = row.logprob;
  for (int32_t k = 0; k < row.num_top; ++k) {
    result.top_logprobs.emplace_back(top[k].id, top[k].logprob);
  }
  return result;
}

absl::Status DeviceSampler::ResolveFeedback(ExecContext* ctx, TensorView tokens,
                                            ConstTensorView row_offsets, ConstTensorView slots) {
  constexpr char kOp[] = "resolve_feedback";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("tokens", tokens, 1).Rank("slots", slots, 1).status());
  const int64_t num_sequences = slots.shape[0];
  RETURN_IF_ERROR(OpCheck(*ctx, kOp)
                      .Tensor("tokens", tokens, {DType::kI32}, tokens.shape)
                      .Tensor("slots", slots, {DType::kI32}, slots.shape)
                      .Tensor("row_offsets", row_offsets, {DType::kI32}, {num_sequences + 1})
                      .status());
  CountLaunch(ctx);
  if (ctx->dry_run()) return absl::OkStatus();
  return ToStatus(kOp,
                  LaunchResolveFeedback(state_, static_cast<int32_t*>(tokens.data),
                                        static_cast<const int32_t*>(row_offsets.data),
                                        static_cast<const int32_t*>(slots.data), tokens.shape[0],
                                        num_sequences, limits_.slots, ctx->stream));
}

ConstTensorView DeviceSampler::last_sampled() const {
  return ConstTensorView(state_.last_sampled, DType::kI32, {limits_.slots}, DeviceType::kCuda);
}

}  // namespace lockstep
