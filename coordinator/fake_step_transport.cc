#include "coordinator/fake_step_transport.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/result_digest.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using worker::v1::NewSequence;
using worker::v1::SamplingSpec;
using worker::v1::SequenceEntry;
using worker::v1::SequenceResult;
using worker::v1::StepPlan;
using worker::v1::StepRequest;
using worker::v1::StepResult;

constexpr int64_t kGrid = 64;

uint64_t NextState(uint64_t state, int32_t token) {
  return Fold64(state, static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1);
}

uint64_t DigestOf(uint64_t state) { return Mix64(state ^ 0x5bd1e995u); }

bool Contains(const google::protobuf::RepeatedField<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// -1 when the masks leave nothing.
int32_t SampleId(uint64_t state, const SamplingSpec& sampling, const std::vector<int32_t>& outputs,
                 int32_t vocab_size) {
  uint64_t counts = outputs.size();
  for (const int32_t id : outputs) counts += Mix64(static_cast<uint64_t>(id) + 77);
  uint64_t draw = Fold64(state, sampling.seed());
  draw = Fold64(draw, sampling.output_index());
  draw = Fold64(draw, counts);
  const bool stops_masked = static_cast<int64_t>(outputs.size()) < sampling.min_tokens();
  const auto first = static_cast<int32_t>(draw % static_cast<uint64_t>(vocab_size));
  for (int32_t i = 0; i < vocab_size; ++i) {
    const int32_t id = (first + i) % vocab_size;
    if (sampling.allowed_ids_size() > 0 && !Contains(sampling.allowed_ids(), id)) continue;
    if (Contains(sampling.banned_ids(), id)) continue;
    if (stops_masked && Contains(sampling.stop_ids(), id)) continue;
    return id;
  }
  return -1;
}

template <typename... Args>
absl::Status Violation(const SequenceEntry& entry, const Args&... args) {
  return absl::FailedPreconditionError(absl::StrCat("slot ", entry.slot(), " generation ",
                                                    entry.generation(), " position ",
                                                    entry.position(), ": ", args...));
}

int64_t TokensOf(const SequenceEntry& entry) {
  return entry.sampled_in_step() != 0 ? 1 : entry.token_ids_size();
}

}  // namespace

FakeStepTransport::FakeStepTransport(const FakeStepOptions& options)
    : options_(options),
      slots_(static_cast<size_t>(options.slots)),
      blocks_(static_cast<size_t>(options.kv_blocks), std::vector<uint64_t>(kGrid, 0)),
      snapshots_(static_cast<size_t>(options.snapshots)) {}

FakeStepTransport::Expected FakeStepTransport::Run(const std::vector<int32_t>& prompt,
                                                   const SamplingSpec& sampling, int32_t vocab_size,
                                                   int64_t count) {
  Expected expected;
  uint64_t state = 0;
  for (const int32_t id : prompt) state = NextState(state, id);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = SampleId(state, sampling, expected.ids, vocab_size);
    expected.digests.push_back(DigestOf(state));
    expected.ids.push_back(id);
    state = NextState(state, id);
  }
  return expected;
}

absl::Status FakeStepTransport::Send(const StepRequest& request) {
  std::lock_guard<std::mutex> lock(mu_);
  RETURN_IF_ERROR(error_);
  const auto fail = fail_send_.find(request.step_id());
  if (fail != fail_send_.end()) return error_ = fail->second;
  Pending pending;
  absl::Status status = Check(request, &pending.plan);
  if (!status.ok()) {
    error_ = absl::Status(status.code(),
                          absl::StrCat("step ", request.step_id(), ": ", status.message()));
    return error_;
  }
  pending.result.set_epoch(request.epoch());
  pending.result.set_step_id(request.step_id());
  pending.result.set_batch_digest(request.batch_digest());
  // A plan is a pure function of what was sent before: it runs now, and its result waits.
  for (const SequenceEntry& entry : pending.plan.sequences()) {
    Slot* slot = &slots_[static_cast<size_t>(entry.slot())];
    status = RunEntry(request.step_id(), entry, slot, pending.result.add_sequences());
    if (!status.ok()) return error_ = status;
  }
  if (options_.change) options_.change(pending.plan, &pending.result);
  ResultDigest digest;
  for (int i = 0; i < pending.result.sequences_size(); ++i) {
    const SequenceResult& sequence = pending.result.sequences(i);
    for (const uint64_t logits : sequence.digests()) digest.AddLogits(logits);
    if (pending.plan.sequences(i).sample()) digest.AddSampled(sequence.sampled_id());
  }
  pending.result.set_result_digest(digest.value());
  if (options_.change_agreed) options_.change_agreed(&pending.result);
  if (record_) plans_.push_back(pending.plan);
  pending_.push_back(std::move(pending));
  most_in_flight_ = std::max(most_in_flight_, static_cast<int64_t>(pending_.size()));
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status FakeStepTransport::Check(const StepRequest& request, StepPlan* plan) {
  if (request.term() != options_.term || request.epoch() != options_.epoch) {
    return absl::FailedPreconditionError("wrong term or epoch");
  }
  if (request.step_id() != last_step_ + 1) {
    return absl::FailedPreconditionError(absl::StrCat("step ", last_step_ + 1, " was expected"));
  }
  last_digest_ = Fold64(last_digest_, HashBytes(request.plan()));
  if (request.batch_digest() != last_digest_) {
    return absl::FailedPreconditionError("wrong batch digest");
  }
  last_step_ = request.step_id();
  if (pending_.size() >= 2) return absl::FailedPreconditionError("three steps are unanswered");
  if (!plan->ParseFromString(request.plan())) return absl::FailedPreconditionError("broken plan");
  for (const int32_t released : plan->released_slots()) {
    for (const Pending& pending : pending_) {
      for (const SequenceEntry& entry : pending.plan.sequences()) {
        if (entry.slot() == released) return Violation(entry, "released while in flight");
      }
    }
    slots_[static_cast<size_t>(released)].live = false;
  }

  int64_t tokens = 0, logits = 0;
  std::set<int32_t> named;
  for (const SequenceEntry& entry : plan->sequences()) {
    if (entry.slot() < 0 || entry.slot() >= options_.slots) return Violation(entry, "no such slot");
    if (!named.insert(entry.slot()).second) return Violation(entry, "the slot has two entries");
    if (Contains(plan->released_slots(), entry.slot())) return Violation(entry, "was released");
    Slot* slot = &slots_[static_cast<size_t>(entry.slot())];
    RETURN_IF_ERROR(CheckNotInFlight(entry));
    if (entry.has_begin()) RETURN_IF_ERROR(Begin(entry, slot));
    for (const int32_t block : entry.new_blocks()) slot->table.push_back(block);
    RETURN_IF_ERROR(CheckEntry(entry, *slot));
    tokens += TokensOf(entry);
    logits += entry.num_logits();
  }
  if (tokens == 0 || tokens > options_.max_batch_tokens || logits > options_.max_logit_rows) {
    return absl::FailedPreconditionError(
        absl::StrCat(tokens, " tokens and ", logits, " logit rows; the limits are ",
                     options_.max_batch_tokens, " and ", options_.max_logit_rows));
  }
  return CheckWriters(*plan);
}

// Nothing that a step in flight names gets a new owner.
absl::Status FakeStepTransport::CheckNotInFlight(const SequenceEntry& entry) const {
  for (const Pending& pending : pending_) {
    for (const SequenceEntry& other : pending.plan.sequences()) {
      const bool same = other.slot() == entry.slot() && other.generation() == entry.generation();
      if (!same && other.slot() == entry.slot()) {
        return Violation(entry, "the slot is in flight with generation ", other.generation());
      }
      if (!same) {
        const Slot& holder = slots_[static_cast<size_t>(other.slot())];
        for (const int32_t block : entry.new_blocks()) {
          if (std::count(holder.table.begin(), holder.table.end(), block) > 0) {
            return Violation(entry, "block ", block, " is in flight for slot ", other.slot());
          }
        }
      }
      for (const auto& taken : entry.snapshots()) {
        bool in_use =
            other.has_begin() && other.begin().restore_snapshot() == taken.snapshot_slot();
        for (const auto& written : other.snapshots()) {
          in_use = in_use || written.snapshot_slot() == taken.snapshot_slot();
        }
        if (in_use) return Violation(entry, "snapshot ", taken.snapshot_slot(), " is in flight");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FakeStepTransport::Begin(const SequenceEntry& entry, Slot* slot) {
  if (entry.generation() <= slot->generation) return Violation(entry, "the generation is not new");
  const NewSequence& begin = entry.begin();
  *slot = Slot();
  slot->live = true;
  slot->generation = entry.generation();
  slot->sampling = begin.sampling();
  slot->outputs.assign(begin.output_ids().begin(), begin.output_ids().end());
  slot->table.assign(begin.blocks().begin(), begin.blocks().end());
  if (begin.prompt_ids().empty()) return Violation(entry, "no prompt");
  if (begin.restore_snapshot() < 0) {
    return entry.position() == 0 ? absl::OkStatus() : Violation(entry, "starts from nothing");
  }
  if (begin.restore_snapshot() >= options_.snapshots) return Violation(entry, "no such snapshot");
  const SavedState& saved = snapshots_[static_cast<size_t>(begin.restore_snapshot())];
  if (!saved.written || saved.position != entry.position() || entry.position() % kGrid != 0 ||
      static_cast<int64_t>(slot->table.size()) * kGrid != entry.position()) {
    return Violation(entry, "snapshot ", begin.restore_snapshot(), " is of position ",
                     saved.position, ", the table has ", slot->table.size(), " blocks");
  }
  uint64_t state = 0;
  for (int64_t at = 0; at < entry.position(); ++at) {
    const int32_t id = begin.prompt_ids(static_cast<int>(at));
    state = NextState(state, id);
    slot->history.push_back(state);
  }
  if (state != saved.state) return Violation(entry, "the snapshot is of another prefix");
  return absl::OkStatus();
}

absl::Status FakeStepTransport::CheckEntry(const SequenceEntry& entry, const Slot& slot) const {
  const int64_t tokens = TokensOf(entry);
  if (!slot.live) return Violation(entry, "the slot has no sequence");
  if (slot.generation != entry.generation()) {
    return Violation(entry, "the slot has generation ", slot.generation);
  }
  if (static_cast<int64_t>(slot.history.size()) != entry.position()) {
    return Violation(entry, "position ", slot.history.size(), " was expected");
  }
  if (tokens == 0 || (entry.sampled_in_step() != 0 && entry.token_ids_size() > 0)) {
    return Violation(entry, "no or two sources of tokens");
  }
  if (entry.sampled_in_step() != 0 && entry.sampled_in_step() != slot.sampled_in) {
    return Violation(entry, "step ", entry.sampled_in_step(), " sampled nothing for it");
  }
  const int64_t end = entry.position() + tokens;
  if (static_cast<int64_t>(slot.table.size()) != (end + kGrid - 1) / kGrid) {
    return Violation(entry, slot.table.size(), " blocks for ", end, " positions");
  }
  for (const int32_t block : slot.table) {
    if (block < 0 || block >= options_.kv_blocks) return Violation(entry, "no block ", block);
  }
  if (entry.num_logits() > tokens || (entry.sample() && entry.num_logits() < 1)) {
    return Violation(entry, entry.num_logits(), " logit rows of ", tokens);
  }
  for (const auto& taken : entry.snapshots()) {
    if (taken.position() % kGrid != 0 || taken.position() <= entry.position() ||
        taken.position() > end || taken.snapshot_slot() < 0 ||
        taken.snapshot_slot() >= options_.snapshots) {
      return Violation(entry, "snapshot ", taken.snapshot_slot(), " at ", taken.position());
    }
  }
  return CheckReads(entry, slot);
}

absl::Status FakeStepTransport::CheckReads(const SequenceEntry& entry, const Slot& slot) const {
  for (int64_t at = 0; at < entry.position(); ++at) {
    const int32_t block = slot.table[static_cast<size_t>(at / kGrid)];
    const uint64_t found = blocks_[static_cast<size_t>(block)][static_cast<size_t>(at % kGrid)];
    if (found != slot.history[static_cast<size_t>(at)]) {
      return Violation(entry, "block ", block, " does not hold its position ", at);
    }
  }
  return absl::OkStatus();
}

// A block that a sequence writes is in no other live table.
absl::Status FakeStepTransport::CheckWriters(const StepPlan& plan) const {
  std::map<int32_t, int> owners;
  for (const Slot& slot : slots_) {
    if (!slot.live) continue;
    for (const int32_t block : slot.table) ++owners[block];
  }
  for (const SequenceEntry& entry : plan.sequences()) {
    const Slot& slot = slots_[static_cast<size_t>(entry.slot())];
    for (int64_t i = entry.position() / kGrid; i < static_cast<int64_t>(slot.table.size()); ++i) {
      const int32_t block = slot.table[static_cast<size_t>(i)];
      if (owners[block] != 1) {
        return Violation(entry, "writes block ", block, ", which is in ", owners[block], " tables");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FakeStepTransport::RunEntry(uint64_t step, const SequenceEntry& entry, Slot* slot,
                                         SequenceResult* result) {
  result->set_slot(entry.slot());
  result->set_generation(entry.generation());
  result->set_sampled_id(-1);
  const int64_t tokens = TokensOf(entry);
  uint64_t state = slot->history.empty() ? 0 : slot->history.back();
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t at = entry.position() + i;
    const int32_t id =
        entry.sampled_in_step() != 0 ? slot->outputs.back() : entry.token_ids(static_cast<int>(i));
    state = NextState(state, id);
    slot->history.push_back(state);
    const int32_t block = slot->table[static_cast<size_t>(at / kGrid)];
    blocks_[static_cast<size_t>(block)][static_cast<size_t>(at % kGrid)] = state;
    if (i >= tokens - entry.num_logits()) result->add_digests(DigestOf(state));
  }
  for (const auto& taken : entry.snapshots()) {
    SavedState& saved = snapshots_[static_cast<size_t>(taken.snapshot_slot())];
    saved.written = true;
    saved.position = taken.position();
    saved.state = slot->history[static_cast<size_t>(taken.position() - 1)];
  }
  if (!entry.sample()) return absl::OkStatus();
  const int32_t id = SampleId(state, slot->sampling, slot->outputs, options_.vocab_size);
  result->set_sampled_id(id);
  if (slot->sampling.num_logprobs() >= 0) {
    for (int32_t i = 0; i <= slot->sampling.num_logprobs(); ++i) {
      worker::v1::Logprob* logprob = result->add_logprobs();
      logprob->set_id(i == 0 ? id : i);
      logprob->set_logprob(-0.5f * static_cast<float>(i + 1));
    }
  }
  slot->outputs.push_back(id);
  slot->sampled_in = step;
  return absl::OkStatus();
}

absl::StatusOr<StepResult> FakeStepTransport::Receive(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mu_);
  const auto ready = [this] {
    return woken_ || !error_.ok() || (!pending_.empty() && (!paused_ || allowed_ > 0));
  };
  const bool in_time = changed_.wait_until(lock, absl::ToChronoTime(deadline), ready);
  if (woken_) {
    woken_ = false;
    return absl::CancelledError("woken");
  }
  RETURN_IF_ERROR(error_);
  if (!in_time) return absl::DeadlineExceededError("no result yet");
  if (paused_) --allowed_;
  if (delay_ > absl::ZeroDuration()) {
    const absl::Duration delay = delay_;
    lock.unlock();
    std::this_thread::sleep_for(absl::ToChronoMicroseconds(delay));
    lock.lock();
  }
  StepResult result = std::move(pending_.front().result);
  pending_.pop_front();
  const auto fail = fail_receive_.find(result.step_id());
  if (fail != fail_receive_.end()) return error_ = fail->second;
  ++received_;
  changed_.notify_all();
  return result;
}

void FakeStepTransport::Wake() {
  std::lock_guard<std::mutex> lock(mu_);
  woken_ = true;
  changed_.notify_all();
}

void FakeStepTransport::Pause() {
  std::lock_guard<std::mutex> lock(mu_);
  paused_ = true;
  allowed_ = 0;
}
void FakeStepTransport::Allow(int64_t steps) {
  std::lock_guard<std::mutex> lock(mu_);
  allowed_ += steps;
  changed_.notify_all();
}
void FakeStepTransport::Resume() {
  std::lock_guard<std::mutex> lock(mu_);
  paused_ = false;
  changed_.notify_all();
}
void FakeStepTransport::SetDelay(absl::Duration delay) {
  std::lock_guard<std::mutex> lock(mu_);
  delay_ = delay;
}
void FakeStepTransport::FailSend(uint64_t step, const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mu_);
  fail_send_[step] = status;
}
void FakeStepTransport::FailReceive(uint64_t step, const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mu_);
  fail_receive_[step] = status;
}
absl::Status FakeStepTransport::error() const {
  std::lock_guard<std::mutex> lock(mu_);
  return error_;
}
int64_t FakeStepTransport::steps_sent() const {
  std::lock_guard<std::mutex> lock(mu_);
  return static_cast<int64_t>(last_step_);
}
int64_t FakeStepTransport::steps_received() const {
  std::lock_guard<std::mutex> lock(mu_);
  return received_;
}
int64_t FakeStepTransport::most_in_flight() const {
  std::lock_guard<std::mutex> lock(mu_);
  return most_in_flight_;
}
void FakeStepTransport::RecordPlans() {
  std::lock_guard<std::mutex> lock(mu_);
  record_ = true;
}
std::vector<StepPlan> FakeStepTransport::plans() const {
  std::lock_guard<std::mutex> lock(mu_);
  return plans_;
}

}  // namespace lockstep
