#include "tools/eval/step_driver.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr int64_t kBlock = 64;  // positions per KV block, as in kernels/batch/forward_batch.h

}  // namespace

worker::v1::StepRequest StepDriver::Number(const worker::v1::StepPlan& plan) {
  worker::v1::StepRequest request;
  request.set_term(epoch_.term);
  request.set_epoch(epoch_.epoch);
  request.set_step_id(++step_id_);
  std::string bytes = plan.SerializeAsString();
  digest_ = Fold64(digest_, HashBytes(bytes));
  request.set_batch_digest(digest_);
  request.set_plan(std::move(bytes));
  return request;
}

absl::StatusOr<worker::v1::StepResult> StepDriver::Run(const worker::v1::StepPlan& plan) {
  RETURN_IF_ERROR(transport_->Send(Number(plan)));
  for (;;) {
    auto result = transport_->Receive(absl::Now() + absl::Minutes(2));
    if (absl::IsCancelled(result.status())) continue;  // a wake-up, not a result
    return result;
  }
}

absl::StatusOr<StepDriver::Rows> StepDriver::RunEntry(worker::v1::SequenceEntry entry) {
  const int64_t end = position_ + entry.token_ids_size();
  entry.set_slot(0);
  entry.set_generation(generation_);
  entry.set_position(position_);
  while (blocks_ * kBlock < end) entry.add_new_blocks(blocks_++);
  entry.set_sample(true);
  entry.set_return_logits(true);
  const int32_t rows = entry.num_logits();
  position_ = end;
  worker::v1::StepPlan plan;
  *plan.add_sequences() = std::move(entry);
  ASSIGN_OR_RETURN(const worker::v1::StepResult result, Run(plan));
  if (result.sequences_size() != 1 || result.sequences(0).digests_size() != rows) {
    return absl::InternalError(absl::StrCat("step ", result.step_id(), " gave ",
                                            result.sequences_size(),
                                            " sequences; asked for 1 with ", rows, " rows"));
  }
  const worker::v1::SequenceResult& sequence = result.sequences(0);
  Rows out;
  out.sampled_id = sequence.sampled_id();
  out.digests.assign(sequence.digests().begin(), sequence.digests().end());
  const size_t row_bytes = sequence.logits().size() / static_cast<size_t>(rows);
  CHECK_EQ(row_bytes * static_cast<size_t>(rows), sequence.logits().size());
  for (int32_t r = 0; r < rows; ++r) {
    std::vector<float> row(row_bytes / sizeof(float));
    std::memcpy(row.data(), sequence.logits().data() + static_cast<size_t>(r) * row_bytes,
                row_bytes);
    out.logits.push_back(std::move(row));
  }
  return out;
}

absl::StatusOr<StepDriver::Rows> StepDriver::Begin(const std::vector<int32_t>& tokens,
                                                   int32_t rows) {
  ++generation_;
  position_ = 0;
  blocks_ = 0;
  worker::v1::SequenceEntry entry;
  worker::v1::NewSequence* begin = entry.mutable_begin();
  begin->set_restore_snapshot(-1);
  begin->mutable_sampling()->set_top_p(1.0f);
  begin->mutable_sampling()->set_repetition_penalty(1.0f);
  begin->mutable_sampling()->set_num_logprobs(-1);
  begin->mutable_prompt_ids()->Add(tokens.begin(), tokens.end());
  entry.mutable_token_ids()->Add(tokens.begin(), tokens.end());
  entry.set_num_logits(rows);
  return RunEntry(std::move(entry));
}

absl::StatusOr<StepDriver::Rows> StepDriver::Continue(const std::vector<int32_t>& tokens,
                                                      int32_t rows) {
  worker::v1::SequenceEntry entry;
  entry.mutable_token_ids()->Add(tokens.begin(), tokens.end());
  entry.set_num_logits(rows);
  return RunEntry(std::move(entry));
}

}  // namespace lockstep
