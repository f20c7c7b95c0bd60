#include "worker/slot_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/batch/forward_batch.h"

namespace lockstep {
namespace {

using google::protobuf::RepeatedField;
using worker::v1::SequenceEntry;
using worker::v1::StepPlan;

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

template <typename... Args>
absl::Status Contradiction(const Args&... args) {
  return absl::FailedPreconditionError(absl::StrCat(args...));
}

absl::Status CheckIds(absl::string_view what, const RepeatedField<int32_t>& ids,
                      int64_t vocab_size) {
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    return Invalid(what, "[", i, "] is ", ids[i], ", outside the vocabulary of ", vocab_size);
  }
  return absl::OkStatus();
}

std::vector<int32_t> ToVector(const RepeatedField<int32_t>& ids) {
  return std::vector<int32_t>(ids.begin(), ids.end());
}

}  // namespace

bool BatchLimits::operator==(const BatchLimits& o) const {
  return kv_blocks == o.kv_blocks && slots == o.slots && snapshots == o.snapshots &&
         max_tokens == o.max_tokens && max_sequences == o.max_sequences &&
         max_logit_rows == o.max_logit_rows && max_sequence_blocks == o.max_sequence_blocks &&
         vocab_size == o.vocab_size && stateful == o.stateful;
}

// A sequence of n tokens crosses at most n / kGrid + 1 grid points.
int64_t BatchLimits::max_snapshots_taken() const { return max_tokens / kGrid + max_sequences; }

absl::Status BatchLimits::Validate() const {
  const std::pair<const char*, int64_t> positive[] = {
      {"kv_blocks", kv_blocks},           {"slots", slots},
      {"max_batch_tokens", max_tokens},   {"max_batch_sequences", max_sequences},
      {"max_logit_rows", max_logit_rows}, {"max_sequence_blocks", max_sequence_blocks}};
  for (const auto& p : positive) {
    if (p.second <= 0 || p.second > INT32_MAX) {
      return Invalid(p.first, " is ", p.second, ", it must be in [1, ", INT32_MAX, "]");
    }
  }
  if (snapshots < 0 || snapshots > INT32_MAX) {
    return Invalid("snapshots is ", snapshots, ", it must be in [0, ", INT32_MAX, "]");
  }
  return absl::OkStatus();
}

SlotTable::SlotTable(const BatchLimits& limits)
    : limits_(limits),
      slots_(static_cast<size_t>(limits.slots)),
      block_users_(static_cast<size_t>(limits.kv_blocks), 0),
      snapshot_position_(static_cast<size_t>(limits.snapshots), -1),
      snapshot_taken_in_(static_cast<size_t>(limits.snapshots), 0) {}

// The list of blocks stays until the slot begins anew: a slot may be released by the last step that
// it takes part in.
void SlotTable::Release(Slot* slot) {
  if (!slot->active) return;
  for (const int32_t block : slot->blocks) --block_users_[static_cast<size_t>(block)];
  slot->active = false;
}

// Old owners go first: a plan may hand their blocks on.
absl::Status SlotTable::Releases(uint64_t step_id, const StepPlan& plan) {
  for (const SequenceEntry& entry : plan.sequences()) {
    if (entry.slot() < 0 || entry.slot() >= limits_.slots) {
      return Invalid("slot ", entry.slot(), " does not exist; there are ", limits_.slots);
    }
    Slot& slot = at(entry.slot());
    if (slot.named_in_step == step_id) {
      return Invalid("slot ", entry.slot(), " has two entries in step ", step_id);
    }
    slot.named_in_step = step_id;
    if (entry.has_begin() && entry.generation() > slot.generation) Release(&slot);
  }
  for (const int32_t released : plan.released_slots()) {
    if (released < 0 || released >= limits_.slots) {
      return Invalid("released slot ", released, " does not exist; there are ", limits_.slots);
    }
    if (at(released).named_in_step != step_id) Release(&at(released));
  }
  return absl::OkStatus();
}

absl::StatusOr<PlannedStep> SlotTable::Admit(uint64_t step_id, const StepPlan& plan) {
  if (plan.sequences_size() > limits_.max_sequences) {
    return Invalid("the plan has ", plan.sequences_size(), " sequences, at most ",
                   limits_.max_sequences, " are configured");
  }
  RETURN_IF_ERROR(Releases(step_id, plan));
  taken_.clear();
  PlannedStep step;
  for (const SequenceEntry& entry : plan.sequences()) {
    ASSIGN_OR_RETURN(PlannedSequence sequence, Entry(step_id, entry));
    step.num_tokens += sequence.num_tokens;
    step.num_logits += sequence.num_logits;
    step.table_columns =
        std::max(step.table_columns, static_cast<int64_t>(at(sequence.slot).blocks.size()));
    step.sequences.push_back(std::move(sequence));
  }
  step.num_snapshots = static_cast<int64_t>(taken_.size());
  if (step.num_tokens > limits_.max_tokens) {
    return Invalid("the plan has ", step.num_tokens, " tokens, at most ", limits_.max_tokens,
                   " are configured");
  }
  if (step.num_logits > limits_.max_logit_rows) {
    return Invalid("the plan has ", step.num_logits, " rows of logits, at most ",
                   limits_.max_logit_rows, " are configured");
  }
  for (const PlannedSequence& sequence : step.sequences) {
    RETURN_IF_ERROR(CheckWrites(sequence, at(sequence.slot)));
  }
  for (const auto& taken : taken_)
    snapshot_position_[static_cast<size_t>(taken.first)] = taken.second;
  for (const int32_t released : plan.released_slots()) {
    // Named for the last time in this very step; a slot that begins here keeps its new owner.
    bool begins = false;
    for (const PlannedSequence& s : step.sequences) begins |= s.slot == released && s.begin;
    if (!begins) Release(&at(released));
  }
  return step;
}

absl::StatusOr<PlannedSequence> SlotTable::Entry(uint64_t step_id, const SequenceEntry& entry) {
  Slot& slot = at(entry.slot());
  if (entry.position() < 0) return Invalid("slot ", entry.slot(), ": position ", entry.position());
  RETURN_IF_ERROR(entry.has_begin() ? Begin(entry, &slot) : Continue(entry, slot));
  RETURN_IF_ERROR(Tokens(step_id, entry, slot));
  RETURN_IF_ERROR(AppendBlocks(entry, entry.new_blocks(), &slot));

  PlannedSequence s;
  s.slot = entry.slot();
  s.generation = entry.generation();
  s.start = entry.position();
  s.feedback = entry.sampled_in_step() != 0;
  s.num_tokens = s.feedback ? 1 : entry.token_ids_size();
  s.begin = entry.has_begin();
  s.restore_snapshot = s.begin ? entry.begin().restore_snapshot() : -1;
  s.num_logits = entry.num_logits();
  s.sample = entry.sample();
  s.return_logits = entry.return_logits();
  const int64_t end = s.start + s.num_tokens;
  if (end > static_cast<int64_t>(slot.blocks.size()) * kGrid) {
    return Contradiction("slot ", s.slot, ": positions up to ", end, " need ",
                         (end + kGrid - 1) / kGrid, " blocks, the slot has ", slot.blocks.size());
  }
  if (s.num_logits < (s.sample ? 1 : 0) || s.num_logits > s.num_tokens) {
    return Invalid("slot ", s.slot, ": num_logits ", s.num_logits, " with ", s.num_tokens,
                   " tokens", s.sample ? " and a sample" : "");
  }
  RETURN_IF_ERROR(Snapshots(step_id, entry, end));
  slot.position = end;
  return s;
}

absl::Status SlotTable::Begin(const SequenceEntry& entry, Slot* slot) {
  if (entry.generation() <= slot->generation) {
    return Contradiction("slot ", entry.slot(), ": a new sequence has generation ",
                         entry.generation(), ", the slot has seen ", slot->generation);
  }
  const auto& begin = entry.begin();
  const int32_t restore = begin.restore_snapshot();
  if (entry.position() % kGrid != 0 || begin.blocks_size() != entry.position() / kGrid) {
    return Invalid("slot ", entry.slot(), ": a sequence cannot begin at position ",
                   entry.position(), " with ", begin.blocks_size(), " blocks; blocks hold ", kGrid,
                   " positions each");
  }
  if (restore < -1 || restore >= limits_.snapshots) {
    return Invalid("slot ", entry.slot(), ": restore_snapshot ", restore,
                   " does not exist; there are ", limits_.snapshots, ", and -1 is none");
  }
  if (entry.position() == 0 && restore != -1) {
    return Invalid("slot ", entry.slot(), ": restore_snapshot ", restore,
                   " at position 0; a sequence starts from zero there (-1)");
  }
  if (entry.position() > 0 && restore == -1 && limits_.stateful) {
    return Invalid("slot ", entry.slot(), ": a sequence of this model cannot begin at position ",
                   entry.position(), " without a snapshot");
  }
  if (restore >= 0 && snapshot_position_[static_cast<size_t>(restore)] != entry.position()) {
    return Contradiction("slot ", entry.slot(), ": snapshot ", restore, " holds position ",
                         snapshot_position_[static_cast<size_t>(restore)], ", not ",
                         entry.position());
  }
  RETURN_IF_ERROR(CheckIds("prompt_ids", begin.prompt_ids(), limits_.vocab_size));
  RETURN_IF_ERROR(CheckIds("output_ids", begin.output_ids(), limits_.vocab_size));
  SamplingParams params;
  if (begin.has_sampling()) {
    ASSIGN_OR_RETURN(params, ParseSampling(begin.sampling(), limits_.vocab_size));
  }
  slot->active = true;
  slot->blocks.clear();
  slot->generation = entry.generation();
  slot->sampled_in_step = 0;
  slot->params = std::move(params);
  return AppendBlocks(entry, begin.blocks(), slot);
}

absl::Status SlotTable::Continue(const SequenceEntry& entry, const Slot& slot) const {
  if (!slot.active) {
    return Contradiction("slot ", entry.slot(), ": generation ", entry.generation(),
                         " continues, but the slot is free");
  }
  if (entry.generation() != slot.generation) {
    return Contradiction("slot ", entry.slot(), ": generation ", entry.generation(),
                         " continues, but the slot belongs to generation ", slot.generation);
  }
  if (entry.position() != slot.position) {
    return Contradiction("slot ", entry.slot(), ": position ", entry.position(),
                         ", but the next one is ", slot.position);
  }
  return absl::OkStatus();
}

absl::Status SlotTable::Tokens(uint64_t step_id, const SequenceEntry& entry,
                               const Slot& slot) const {
  const uint64_t source = entry.sampled_in_step();
  if ((source != 0) == (entry.token_ids_size() > 0)) {
    return Invalid("slot ", entry.slot(), ": needs either token_ids or sampled_in_step, has ",
                   entry.token_ids_size(), " ids and step ", source);
  }
  if (source != 0 && (source >= step_id || source != slot.sampled_in_step)) {
    return Contradiction("slot ", entry.slot(), ": takes the token of step ", source,
                         ", but it was sampled last in step ", slot.sampled_in_step);
  }
  return CheckIds(absl::StrCat("slot ", entry.slot(), ": token_ids"), entry.token_ids(),
                  limits_.vocab_size);
}

absl::Status SlotTable::AppendBlocks(const SequenceEntry& entry,
                                     const RepeatedField<int32_t>& blocks, Slot* slot) {
  for (const int32_t block : blocks) {
    if (block < 0 || block >= limits_.kv_blocks) {
      return Invalid("slot ", entry.slot(), ": block ", block, " does not exist; there are ",
                     limits_.kv_blocks);
    }
    if (static_cast<int64_t>(slot->blocks.size()) == limits_.max_sequence_blocks) {
      return Invalid("slot ", entry.slot(), ": more than ", limits_.max_sequence_blocks, " blocks");
    }
    slot->blocks.push_back(block);
    ++block_users_[static_cast<size_t>(block)];
  }
  return absl::OkStatus();
}

// Sequences may read the same blocks, but a block that is written belongs to one alone.
absl::Status SlotTable::CheckWrites(const PlannedSequence& sequence, const Slot& slot) const {
  const int64_t end = sequence.start + sequence.num_tokens;
  for (int64_t i = sequence.start / kGrid; i * kGrid < end; ++i) {
    const int32_t block = slot.blocks[static_cast<size_t>(i)];
    const int32_t users = block_users_[static_cast<size_t>(block)];
    if (users == 1) continue;
    return Contradiction("slot ", sequence.slot, ": writes block ", block, " (positions from ",
                         i * kGrid, "), which ", users, " places of the block tables hold");
  }
  return absl::OkStatus();
}

absl::Status SlotTable::Snapshots(uint64_t step_id, const SequenceEntry& entry, int64_t end) {
  int64_t previous = entry.position();
  for (const auto& snapshot : entry.snapshots()) {
    const int64_t position = snapshot.position();
    const int32_t target = snapshot.snapshot_slot();
    if (position % kGrid != 0 || position <= previous || position > end) {
      return Invalid("slot ", entry.slot(), ": snapshot at position ", position,
                     "; it must be an ascending multiple of ", kGrid, " in (", entry.position(),
                     ", ", end, "]");
    }
    previous = position;
    if (target < 0 || target >= limits_.snapshots) {
      return Invalid("slot ", entry.slot(), ": snapshot slot ", target,
                     " does not exist; there are ", limits_.snapshots);
    }
    if (snapshot_taken_in_[static_cast<size_t>(target)] == step_id) {
      return Invalid("slot ", entry.slot(), ": snapshot slot ", target, " is used twice in step ",
                     step_id);
    }
    snapshot_taken_in_[static_cast<size_t>(target)] = step_id;
    taken_.emplace_back(target, position);
  }
  return absl::OkStatus();
}

absl::StatusOr<SamplingParams> ParseSampling(const worker::v1::SamplingSpec& spec,
                                             int64_t vocab_size) {
  const auto in_range = [](float x, float low, float high) {
    return std::isfinite(x) && x >= low && x <= high;
  };
  if (!in_range(spec.temperature(), 0.0f, 1e6f)) {
    return Invalid("temperature is ", spec.temperature(), ", it must be in [0, 1e6]");
  }
  if (spec.top_k() < 0) return Invalid("top_k is ", spec.top_k(), ", it must not be negative");
  if (!in_range(spec.top_p(), 0.0f, 1.0f) || spec.top_p() == 0.0f) {
    return Invalid("top_p is ", spec.top_p(), ", it must be in (0, 1]");
  }
  if (!in_range(spec.min_p(), 0.0f, 1.0f)) {
    return Invalid("min_p is ", spec.min_p(), ", it must be in [0, 1]");
  }
  if (!std::isfinite(spec.presence_penalty()) || !std::isfinite(spec.frequency_penalty())) {
    return Invalid("presence and frequency penalty must be finite");
  }
  if (!std::isfinite(spec.repetition_penalty()) || spec.repetition_penalty() <= 0.0f) {
    return Invalid("repetition_penalty is ", spec.repetition_penalty(), ", it must be positive");
  }
  if (spec.bias_ids_size() != spec.bias_values_size()) {
    return Invalid(spec.bias_ids_size(), " bias_ids with ", spec.bias_values_size(),
                   " bias_values");
  }
  RETURN_IF_ERROR(CheckIds("bias_ids", spec.bias_ids(), vocab_size));
  RETURN_IF_ERROR(CheckIds("allowed_ids", spec.allowed_ids(), vocab_size));
  RETURN_IF_ERROR(CheckIds("banned_ids", spec.banned_ids(), vocab_size));
  RETURN_IF_ERROR(CheckIds("stop_ids", spec.stop_ids(), vocab_size));
  SamplingParams p;
  p.temperature = spec.temperature();
  p.top_k = spec.top_k();
  p.top_p = spec.top_p();
  p.min_p = spec.min_p();
  p.presence_penalty = spec.presence_penalty();
  p.frequency_penalty = spec.frequency_penalty();
  p.repetition_penalty = spec.repetition_penalty();
  p.seed = spec.seed();
  p.output_index = spec.output_index();
  for (int i = 0; i < spec.bias_ids_size(); ++i) {
    p.logit_bias.emplace_back(spec.bias_ids(i), spec.bias_values(i));
  }
  p.allowed_ids = ToVector(spec.allowed_ids());
  p.banned_ids = ToVector(spec.banned_ids());
  p.stop_ids = ToVector(spec.stop_ids());
  p.min_tokens = spec.min_tokens();
  p.num_logprobs = spec.num_logprobs();
  return p;
}

}  // namespace lockstep
