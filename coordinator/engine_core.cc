#include "coordinator/engine_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/block_allocator.h"
#include "coordinator/errors.h"
#include "coordinator/restore.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/result_digest.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

using worker::v1::SequenceEntry;
using worker::v1::SequenceResult;
using worker::v1::StepPlan;
using worker::v1::StepRequest;
using worker::v1::StepResult;

namespace {

EngineObserver* NoObserver() {
  static EngineObserver* nobody = new EngineObserver();
  return nobody;
}

}  // namespace

std::map<std::string, int64_t> EngineCore::Counters::ToMap() const {
  return {{"steps", steps},
          {"step_micros_total", step_micros_total},
          {"tokens_generated", tokens_generated},
          {"tokens_prefilled", tokens_prefilled},
          {"tokens_cached", tokens_cached},
          {"tokens_replayed", tokens_replayed},
          {"tokens_discarded", tokens_discarded},
          {"prefill_chunks", prefill_chunks},
          {"preemptions", preemptions},
          {"digests_checked", digests_checked},
          {"digest_mismatches", digest_mismatches},
          {"nan_logits", nan_logits},
          {"requests_started", requests_started},
          {"requests_finished", requests_finished},
          {"requests_failed", requests_failed},
          {"requests_cancelled", requests_cancelled},
          {"recoveries", recoveries},
          {"requests_replayed", requests_replayed},
          {"poison_requests", poison_requests}};
}

EngineCore::EngineCore(const EngineOptions& options, const Tokenizer* tokenizer, Hooks hooks)
    : options_(options),
      tokenizer_(tokenizer),
      hooks_(std::move(hooks)),
      observer_(options.observer != nullptr ? options.observer : NoObserver()),
      cache_(options.kv_blocks, options.prefix_cache ? options.snapshots : 0),
      generations_(static_cast<size_t>(options.slots), 0) {
  CHECK(options.slots > 0 && options.kv_blocks > 0 && options.max_batch_tokens > 0);
  CHECK(options.snapshot_interval > 0 && options.snapshot_interval % kBlockPositions == 0)
      << "snapshot_interval is " << options.snapshot_interval;
  CHECK(options.steps_in_flight == 1 || options.steps_in_flight == 2);
  for (int64_t i = options.slots; i > 0; --i) free_slots_.push_back(static_cast<int32_t>(i - 1));
}

EngineCore::~EngineCore() = default;

absl::Time EngineCore::Now() const { return options_.clock ? options_.clock() : absl::Now(); }

void EngineCore::BeginEpoch(uint64_t term, uint64_t epoch) {
  CHECK(in_flight_.empty());
  term_ = term;
  epoch_ = epoch;
  last_step_ = 0;
  last_digest_ = 0;
}

RequestState* EngineCore::NewRequest(GenerationSpec spec, std::shared_ptr<GenerationSink> sink,
                                     absl::Time submitted) {
  auto owned = std::make_unique<RequestState>();
  RequestState* request = owned.get();
  request->arrival = next_arrival_++;
  request->spec = std::move(spec);
  request->sink = std::move(sink);
  request->submitted = submitted;
  const GenerationSpec& kept = request->spec;
  if (cache_.num_snapshots() > 0 && !kept.cache_bypass) {
    request->chain = PrefixCache::Chain(kept.prompt_ids, kept.cache_salt);
  }
  next_deadline_ = std::min(next_deadline_, request->next_deadline());
  CHECK(by_id_.emplace(kept.request_id, request).second) << kept.request_id;
  requests_.emplace(request->arrival, std::move(owned));
  ++counters_.requests_started;
  observer_->OnStarted(request->prompt_length());
  for (int32_t i = 0; i < kept.n; ++i) {
    request->outputs.push_back(std::make_unique<SequenceState>(request, i, tokenizer_));
  }
  return request;
}

void EngineCore::Add(GenerationSpec spec, std::shared_ptr<GenerationSink> sink,
                     absl::Time submitted) {
  RequestState* request = NewRequest(std::move(spec), std::move(sink), submitted);
  const GenerationSpec& kept = request->spec;
  for (const auto& output : request->outputs) {
    SequenceState* sequence = output.get();
    waiting_.insert(sequence);
    inference::v1::GenerateEvent accepted = sequence->AcceptedEvent(epoch_);
    accepted.mutable_accepted()->set_model(options_.model_name);
    accepted.mutable_accepted()->set_server_version(options_.server_version);
    request->sink->OnEvent(std::move(accepted));
    if (kept.echo && !kept.prompt_text.empty()) request->sink->OnEvent(sequence->EchoEvent());
  }
}

void EngineCore::Restore(const RestoredRequest& restored, GenerationSink* shown,
                         std::shared_ptr<GenerationSink> sink) {
  RequestState* request = NewRequest(restored.spec, std::move(sink), restored.submitted);
  for (const auto& output : request->outputs) {
    SequenceState* s = output.get();
    s->planned_outputs = static_cast<int64_t>(restored.outputs[s->output_index].ids.size());
    if (ReplayOutput(restored, Now(), s, shown, request->sink.get())) {
      s->phase = SequencePhase::kDone;
      ++request->outputs_finished;
    } else {
      waiting_.insert(s);
      if (s->prefilled) {
        ++s->recoveries;
        replaying_.insert(s);  // before anything new is admitted
      }
    }
    if (s->prefilled && !request->scheduled) {
      // It has left the queue before.
      request->scheduled = true;
      ++num_scheduled_;
      hooks_.on_scheduled(*request);
    }
  }
  if (request->outputs_finished == request->spec.n) {
    EndRequest(request, absl::OkStatus(), RequestEnd::kFinished);
    Reap();
  }
}

// ---- planning ----

bool EngineCore::WaitsForSibling(const SequenceState& sequence) const {
  const RequestState& request = *sequence.request;
  if (sequence.output_index == 0 || !CacheUsable(request)) return false;
  if (request.last_grid_position() == 0) return false;
  const SequenceState& first = *request.outputs.front();
  return !first.prefilled && first.phase != SequencePhase::kDone;
}

SchedulerSequence EngineCore::RunningView(const SequenceState& s) const {
  SchedulerSequence view;
  view.position = s.position;
  view.end = s.fully_planned() ? s.position : s.end();
  view.logits_from = LogitsFrom(s);
  view.blocks = static_cast<int64_t>(s.blocks.size());
  for (const int32_t block : s.blocks) {
    view.own_blocks += cache_.blocks().holders(block) == 1 ? 1 : 0;
  }
  view.steps_in_flight = s.steps_in_flight;
  view.progressed = s.progressed;
  return view;
}

PrefixCache::Hit EngineCore::LookupHit(const SequenceState& s) const {
  const RequestState& request = *s.request;
  if (!CacheUsable(request)) return PrefixCache::Hit();
  return cache_.Lookup(request.chain, request.spec.prompt_ids, request.last_grid_position());
}

SchedulerSequence EngineCore::WaitingView(const SequenceState& s) const {
  const PrefixCache::Hit hit = LookupHit(s);
  SchedulerSequence view;
  view.position = hit.position;
  view.end = s.end();
  view.logits_from = LogitsFrom(s);
  view.blocks = static_cast<int64_t>(hit.blocks.size());
  view.idle_blocks = hit.idle_blocks;
  return view;
}

SchedulerInput EngineCore::MakeSchedulerInput(std::vector<SequenceState*>* sequences) const {
  SchedulerInput input;
  const RequestState* alone = Alone();
  const bool replays_first = !replaying_.empty() && ReplayDebt() > options_.max_batch_tokens;
  for (SequenceState* s : running_) {
    input.running.push_back(RunningView(*s));
    if (alone != nullptr && s->request != alone) {
      input.running.back().end = input.running.back().position;
    }
    input.running.back().id = static_cast<int64_t>(sequences->size());
    sequences->push_back(s);
  }
  input.free_slots = static_cast<int64_t>(free_slots_.size());
  for (SequenceState* s : waiting_) {
    if (static_cast<int64_t>(input.waiting.size()) >= input.free_slots) break;
    if (WaitsForSibling(*s)) continue;
    if (alone != nullptr && s->request != alone) continue;
    if (replays_first && !s->request->scheduled) continue;
    input.waiting.push_back(WaitingView(*s));
    input.waiting.back().id = static_cast<int64_t>(sequences->size());
    sequences->push_back(s);
  }
  input.available_blocks = cache_.available();
  input.max_tokens = options_.max_batch_tokens;
  input.max_logit_rows = std::max(options_.max_logit_rows, options_.slots);
  input.chunk_policy = options_.chunk_policy;
  input.force_preemption =
      options_.preempt_every > 0 && steps_since_forced_ >= options_.preempt_every;
  return input;
}

void EngineCore::Preempt(SequenceState* s) {
  CHECK(s->phase == SequencePhase::kRunning && s->steps_in_flight == 0);
  running_.erase(s);
  ReleasePlace(s);
  s->phase = SequencePhase::kWaiting;
  s->planned_outputs = static_cast<int64_t>(s->output_ids.size());
  s->progressed = false;
  ++s->preemptions;
  ++counters_.preemptions;
  waiting_.insert(s);
}

void EngineCore::Admit(SequenceState* s) {
  CHECK(s->phase == SequencePhase::kWaiting && !free_slots_.empty());
  waiting_.erase(s);
  running_.insert(s);
  s->phase = SequencePhase::kRunning;
  s->slot = free_slots_.back();
  free_slots_.pop_back();
  // The new owner's first entry tells the workers that the old one is gone.
  released_slots_.erase(std::remove(released_slots_.begin(), released_slots_.end(), s->slot),
                        released_slots_.end());
  s->generation = ++generations_[static_cast<size_t>(s->slot)];
  s->begun = false;
  const PrefixCache::Hit hit = LookupHit(*s);
  cache_.Acquire(hit);
  s->position = hit.position;
  s->blocks = hit.blocks;
  s->restore_snapshot = hit.snapshot;
  counters_.tokens_cached += hit.position;
  if (!s->admitted) {
    s->admitted = true;
    s->cached_tokens = hit.position;
    s->first_scheduled = Now();
  }
  if (!s->request->scheduled) {
    s->request->scheduled = true;
    ++num_scheduled_;
    hooks_.on_scheduled(*s->request);
    observer_->OnScheduled(s->request->prompt_length(), Now() - s->request->submitted);
  }
}

void EngineCore::AddSnapshots(const SequenceState& s, EntryInFlight* entry,
                              SequenceEntry* message) {
  const RequestState& request = *s.request;
  if (!CacheUsable(request)) return;
  const int64_t last = request.last_grid_position();
  const int64_t end = std::min(entry->position + entry->tokens, last);
  int64_t at = (entry->position / kBlockPositions + 1) * kBlockPositions;
  for (; at <= end; at += kBlockPositions) {
    if (at != last && at % options_.snapshot_interval != 0) continue;
    const uint64_t name = request.chain[static_cast<size_t>(at / kBlockPositions - 1)];
    if (cache_.HasSnapshot(name)) continue;
    const int32_t snapshot = cache_.BeginSnapshot();
    if (snapshot < 0) return;
    entry->snapshots.push_back({snapshot, name});
    worker::v1::Snapshot* taken = message->add_snapshots();
    taken->set_position(at);
    taken->set_snapshot_slot(snapshot);
  }
}

EngineCore::EntryInFlight EngineCore::AddEntry(SequenceState* s, const ScheduledRows& rows,
                                               StepPlan* plan) {
  EntryInFlight entry{
      s, s->slot, s->generation, s->position, rows.tokens, rows.num_logits, rows.sample, -1, {}};
  SequenceEntry* message = plan->add_sequences();
  message->set_slot(s->slot);
  message->set_generation(s->generation);
  message->set_position(s->position);
  message->set_num_logits(static_cast<int32_t>(rows.num_logits));
  message->set_sample(rows.sample);
  if (!s->begun) {
    *message->mutable_begin() = s->MakeBegin();
    s->begun = true;
    entry.restore_snapshot = s->restore_snapshot;
    s->restore_snapshot = -1;
  }
  const int64_t end = s->position + rows.tokens;
  if (s->position >= s->logged_length()) {
    CHECK_EQ(rows.tokens, 1);
    CHECK_GT(s->steps_in_flight, 0);
    message->set_sampled_in_step(s->last_step);
  } else {
    for (int64_t at = s->position; at < end; ++at) message->add_token_ids(s->token(at));
  }
  while (static_cast<int64_t>(s->blocks.size()) < BlocksFor(end)) {
    s->blocks.push_back(cache_.AllocateBlock());
    message->add_new_blocks(s->blocks.back());
  }
  AddSnapshots(*s, &entry, message);

  const int64_t replayed = std::max<int64_t>(0, std::min(end, s->computed) - s->position);
  const int64_t prompt = s->request->prompt_length();
  const int64_t fresh_from = std::max(s->position, s->computed);
  counters_.tokens_replayed += replayed;
  counters_.tokens_prefilled += std::max<int64_t>(0, std::min(end, prompt) - fresh_from);
  if (s->position < prompt) ++counters_.prefill_chunks;
  s->computed = std::max(s->computed, end);

  s->position = end;
  s->last_step = last_step_ + 1;
  ++s->steps_in_flight;
  if (rows.sample) ++s->planned_outputs;
  return entry;
}

StepRequest EngineCore::Seal(const StepPlan& plan, StepInFlight step) {
  StepRequest request;
  request.set_term(term_);
  request.set_epoch(epoch_);
  request.set_step_id(++last_step_);
  CHECK(plan.SerializeToString(request.mutable_plan()));
  last_digest_ = Fold64(last_digest_, HashBytes(request.plan()));
  request.set_batch_digest(last_digest_);
  step.step_id = last_step_;
  step.batch_digest = last_digest_;
  in_flight_.push_back(std::move(step));
  ++counters_.steps;
  ++steps_since_forced_;
  return request;
}

absl::optional<StepRequest> EngineCore::PlanStep() {
  const RequestState* alone = Alone();
  if (alone != nullptr && OthersInFlight(alone)) return absl::nullopt;
  // A plan that only preempts changes what can be planned: once more, then.
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::vector<SequenceState*> sequences;
    const Schedule schedule = ScheduleStep(MakeSchedulerInput(&sequences));
    const auto sequence = [&](int64_t id) { return sequences[static_cast<size_t>(id)]; };
    if (schedule.forced) steps_since_forced_ = 0;
    for (const int64_t id : schedule.preempted) Preempt(sequence(id));
    // Hits are acquired before any block is allocated, so that none of them is given up.
    for (const int64_t id : schedule.admitted) Admit(sequence(id));
    if (schedule.rows.empty()) {
      if (schedule.preempted.empty() && !MakeRoomFor(alone)) break;
      continue;
    }
    StepPlan plan;
    StepInFlight step;
    for (const ScheduledRows& rows : schedule.rows) {
      step.entries.push_back(AddEntry(sequence(rows.id), rows, &plan));
    }
    for (const int32_t slot : released_slots_) plan.add_released_slots(slot);
    released_slots_.clear();
    return Seal(plan, std::move(step));
  }
  return absl::nullopt;
}

// ---- results ----

absl::Status EngineCore::ApplyResult(const StepResult& result) {
  if (in_flight_.empty()) {
    return absl::InternalError(
        absl::StrCat("a result for step ", result.step_id(), " came, but no step is in flight"));
  }
  const StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  counters_.step_micros_total += result.step_micros();
  observer_->OnStep(absl::Microseconds(result.step_micros()));
  const bool expected = result.epoch() == epoch_ && result.step_id() == step.step_id &&
                        result.batch_digest() == step.batch_digest &&
                        result.sequences_size() == static_cast<int>(step.entries.size());
  absl::Status status;
  if (!expected) {
    status = absl::InternalError(absl::StrCat(
        "the result is not the one of step ", step.step_id, " of epoch ", epoch_, " with ",
        step.entries.size(), " sequences: it names step ", result.step_id(), " of epoch ",
        result.epoch(), ", has ", result.sequences_size(), " sequences and ",
        result.batch_digest() == step.batch_digest ? "the same" : "another", " batch digest"));
  }
  if (status.ok() && !CarriesWhatWasAgreed(step, result)) {
    status = absl::InternalError(
        absl::StrCat("the results of step ", step.step_id, " of epoch ", epoch_,
                     " are not the ones that the ranks agreed on: they do not give the digest ",
                     absl::Hex(result.result_digest(), absl::kZeroPad16)));
  }
  for (size_t i = 0; i < step.entries.size(); ++i) {
    if (status.ok()) status = ApplyEntry(step.entries[i], result.sequences(static_cast<int>(i)));
    if (!status.ok()) Abandon(step.entries[i]);
  }
  Reap();
  return status;
}

bool EngineCore::CarriesWhatWasAgreed(const StepInFlight& step, const StepResult& result) {
  ResultDigest digest;
  for (size_t i = 0; i < step.entries.size(); ++i) {
    const SequenceResult& sequence = result.sequences(static_cast<int>(i));
    for (const uint64_t logits : sequence.digests()) digest.AddLogits(logits);
    if (step.entries[i].sample) digest.AddSampled(sequence.sampled_id());
  }
  return digest.value() == result.result_digest();
}

absl::Status EngineCore::ApplyEntry(const EntryInFlight& entry, const SequenceResult& result) {
  SequenceState* s = entry.sequence;
  if (result.slot() != entry.slot || result.generation() != entry.generation ||
      result.digests_size() != entry.num_logits) {
    return absl::InternalError(absl::StrCat(
        "a result for slot ", entry.slot, " generation ", entry.generation, " with ",
        entry.num_logits, " digests was expected, found slot ", result.slot(), " generation ",
        result.generation(), " with ", result.digests_size(), " digests"));
  }
  if (result.nan()) s->suspect = true;
  if (s->suspect) cache_.ForgetBlocks(s->blocks);
  PublishToCache(entry);
  if (s->phase == SequencePhase::kDone) {
    if (entry.sample) ++counters_.tokens_discarded;
  } else if (result.nan()) {
    ++counters_.nan_logits;
    ErrorDetail detail;
    detail.reason = "NUMERIC_NAN";
    EndRequest(s->request,
               MakeError(absl::StatusCode::kInternal,
                         absl::StrCat("the logits of output ", s->output_index, " near position ",
                                      entry.position + entry.tokens - 1, " hold a NaN"),
                         detail),
               RequestEnd::kFailed);
  } else {
    CheckReplayedDigests(entry, result);
    if (entry.sample && s->phase != SequencePhase::kDone) Log(entry, result);
  }
  Unpin(entry);
  return absl::OkStatus();
}

void EngineCore::PublishToCache(const EntryInFlight& entry) {
  const SequenceState& s = *entry.sequence;
  const RequestState& request = *s.request;
  if (!s.suspect && CacheUsable(request)) {
    const int64_t end = std::min(entry.position + entry.tokens,
                                 static_cast<int64_t>(request.chain.size()) * kBlockPositions);
    for (int64_t i = entry.position / kBlockPositions; (i + 1) * kBlockPositions <= end; ++i) {
      cache_.Register(request.chain, request.spec.prompt_ids, i, s.blocks[static_cast<size_t>(i)]);
    }
  }
  for (const SnapshotInFlight& taken : entry.snapshots) {
    if (s.suspect) {
      cache_.AbandonSnapshot(taken.snapshot);
    } else {
      cache_.CommitSnapshot(taken.snapshot, taken.name);
    }
  }
}

void EngineCore::CheckReplayedDigests(const EntryInFlight& entry, const SequenceResult& result) {
  SequenceState* s = entry.sequence;
  const int64_t logged = static_cast<int64_t>(s->digests.size());
  const int64_t first = entry.position + entry.tokens - entry.num_logits - LogitsFrom(*s);
  for (int64_t i = 0; i < entry.num_logits && first + i < logged; ++i) {
    ++counters_.digests_checked;
    const uint64_t found = result.digests(static_cast<int>(i));
    const uint64_t wanted = s->digests[static_cast<size_t>(first + i)];
    if (found == wanted) continue;
    ++counters_.digest_mismatches;
    s->suspect = true;
    cache_.ForgetBlocks(s->blocks);
    ErrorDetail detail;
    detail.reason = "DIGEST_MISMATCH";
    EndRequest(
        s->request,
        MakeError(absl::StatusCode::kInternal,
                  absl::StrCat("replay of output ", s->output_index, " gave the digest ",
                               absl::Hex(found, absl::kZeroPad16), " for generated token ",
                               first + i, ", the log has ", absl::Hex(wanted, absl::kZeroPad16)),
                  detail),
        RequestEnd::kFailed);
    return;
  }
}

void EngineCore::Log(const EntryInFlight& entry, const SequenceResult& result) {
  SequenceState* s = entry.sequence;
  RequestState* request = s->request;
  if (result.sampled_id() < 0) {
    ErrorDetail detail;
    detail.reason = "CONSTRAINT_UNSATISFIABLE";
    detail.field = "sampling";
    EndRequest(request,
               MakeError(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("output ", s->output_index,
                                      " has no id left to choose at token ", s->output_ids.size(),
                                      ": allowed_token_ids, banned_token_ids, logit_bias and "
                                      "min_tokens exclude all of them"),
                         detail),
               RequestEnd::kFailed);
    return;
  }
  // The log first: nothing is shown that it does not hold.
  s->output_ids.push_back(result.sampled_id());
  s->digests.push_back(result.digests(static_cast<int>(entry.num_logits - 1)));
  request->sink->OnToken(s->output_index, s->digests.back(), result);
  s->progressed = true;
  OnProgress(s);
  ++counters_.tokens_generated;
  const absl::Time now = Now();
  if (!s->prefilled) {
    s->prefilled = true;
    s->first_token = now;
    observer_->OnFirstToken(now - request->submitted);
  } else {
    observer_->OnNextToken(now - s->last_token);
  }
  s->last_token = now;
  const OutputStream::Step step = s->stream.Push(result.sampled_id());
  inference::v1::GenerateEvent event = s->DeltaEvent(step, result);
  if (event.has_delta()) request->sink->OnEvent(std::move(event));
  if (step.finished) FinishOutput(s, step);
}

void EngineCore::FinishOutput(SequenceState* s, const OutputStream::Step& step) {
  RequestState* request = s->request;
  request->sink->OnEvent(s->FinishedEvent(step, Now()));
  Retire(s);
  if (++request->outputs_finished == request->spec.n) {
    EndRequest(request, absl::OkStatus(), RequestEnd::kFinished);
  }
}

void EngineCore::Unpin(const EntryInFlight& entry) {
  SequenceState* s = entry.sequence;
  if (entry.restore_snapshot >= 0) cache_.UnpinSnapshot(entry.restore_snapshot);
  CHECK_GT(s->steps_in_flight, 0);
  if (--s->steps_in_flight == 0 && s->phase == SequencePhase::kDone) ReleasePlace(s);
}

void EngineCore::Abandon(const EntryInFlight& entry) {
  for (const SnapshotInFlight& taken : entry.snapshots) cache_.AbandonSnapshot(taken.snapshot);
  Unpin(entry);
}

void EngineCore::DropStepsInFlight() {
  CHECK(by_id_.empty()) << by_id_.size() << " requests are active";
  while (!in_flight_.empty()) {
    const StepInFlight step = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (const EntryInFlight& entry : step.entries) Abandon(entry);
  }
  Reap();
}

// ---- ends ----

void EngineCore::Retire(SequenceState* s) {
  if (s->phase == SequencePhase::kDone) return;
  const bool running = s->phase == SequencePhase::kRunning;
  (running ? running_ : waiting_).erase(s);
  replaying_.erase(s);
  s->phase = SequencePhase::kDone;
  if (running && s->steps_in_flight == 0) ReleasePlace(s);
}

void EngineCore::ReleasePlace(SequenceState* s) {
  CHECK_EQ(s->steps_in_flight, 0);
  if (s->slot < 0) return;
  if (s->restore_snapshot >= 0) cache_.UnpinSnapshot(s->restore_snapshot);
  s->restore_snapshot = -1;
  cache_.ReleaseBlocks(s->blocks);
  s->blocks.clear();
  free_slots_.push_back(s->slot);
  released_slots_.push_back(s->slot);
  s->slot = -1;
  s->position = 0;
}

void EngineCore::EndRequest(RequestState* request, const absl::Status& status, RequestEnd how) {
  CHECK(!request->ended);
  request->ended = true;
  for (const auto& output : request->outputs) Retire(output.get());
  by_id_.erase(request->spec.request_id);
  if (request->scheduled) --num_scheduled_;
  if (request->isolated) --num_isolated_;
  request->isolated = false;
  ended_.push_back(request);
  switch (how) {
    case RequestEnd::kFinished:
      ++counters_.requests_finished;
      break;
    case RequestEnd::kFailed:
      ++counters_.requests_failed;
      break;
    case RequestEnd::kCancelled:
      ++counters_.requests_cancelled;
      break;
  }
  observer_->OnEnd(how, how == RequestEnd::kFinished ? "OK" : ReasonOrCode(status),
                   request->prompt_length(), request->scheduled, Now() - request->submitted);
  hooks_.on_end(*request);
  request->sink->OnDone(status);
  request->sink.reset();
}

void EngineCore::Reap() {
  const auto finished = [](RequestState* request) {
    return std::all_of(request->outputs.begin(), request->outputs.end(),
                       [](const auto& output) { return output->steps_in_flight == 0; });
  };
  for (size_t i = 0; i < ended_.size();) {
    if (!finished(ended_[i])) {
      ++i;
      continue;
    }
    requests_.erase(ended_[i]->arrival);
    ended_[i] = ended_.back();
    ended_.pop_back();
  }
}

bool EngineCore::End(const std::string& request_id, const absl::Status& status, RequestEnd how) {
  const auto found = by_id_.find(request_id);
  if (found == by_id_.end()) return false;
  EndRequest(found->second, status, how);
  Reap();
  return true;
}

void EngineCore::EndAll(const absl::Status& status) {
  while (!by_id_.empty()) EndRequest(by_id_.begin()->second, status, RequestEnd::kFailed);
  Reap();
}

void EngineCore::EndLate(RequestState* request, absl::Time now) {
  const std::string waited = absl::FormatDuration(now - request->submitted);
  ErrorDetail detail;
  if (request->spec.deadline <= now) {
    int64_t tokens = 0;
    for (const auto& s : request->outputs) tokens += static_cast<int64_t>(s->output_ids.size());
    detail.reason = "DEADLINE_EXCEEDED";
    detail.metadata = {{"completion_tokens", absl::StrCat(tokens)}};
    EndRequest(request,
               MakeError(absl::StatusCode::kDeadlineExceeded,
                         absl::StrCat("the deadline passed after ", waited, ", when ", tokens,
                                      " tokens had been generated"),
                         detail),
               RequestEnd::kFailed);
    return;
  }
  detail.reason = "DEADLINE_UNMEETABLE";
  detail.retry_after = absl::Seconds(1);
  EndRequest(request,
             MakeError(absl::StatusCode::kResourceExhausted,
                       absl::StrCat("the request waited ", waited,
                                    " in the queue, which is its queue timeout; ", running_.size(),
                                    " sequences are running: retry later"),
                       detail),
             RequestEnd::kFailed);
}

void EngineCore::ExpireDeadlines(absl::Time now) {
  if (now < next_deadline_) return;
  std::vector<RequestState*> late;
  next_deadline_ = absl::InfiniteFuture();
  for (const auto& item : by_id_) {
    const absl::Time deadline = item.second->next_deadline();
    if (deadline <= now) {
      late.push_back(item.second);
    } else {
      next_deadline_ = std::min(next_deadline_, deadline);
    }
  }
  for (RequestState* request : late) EndLate(request, now);
  Reap();
}

std::vector<RequestInfo> EngineCore::ListRequests() const {
  std::vector<RequestInfo> list;
  for (const auto& item : requests_) {
    const RequestState& request = *item.second;
    if (request.ended) continue;
    RequestInfo info;
    info.request_id = request.spec.request_id;
    info.scheduled = request.scheduled;
    info.age = Now() - request.submitted;
    info.prompt_tokens = request.prompt_length();
    info.cached_tokens = request.outputs[0]->cached_tokens;
    info.outputs = request.spec.n;
    info.priority = request.spec.priority;
    info.deadline = request.spec.deadline;
    for (const auto& s : request.outputs) {
      info.generated_tokens += static_cast<int64_t>(s->output_ids.size());
      info.preemptions += s->preemptions;
    }
    list.push_back(std::move(info));
  }
  return list;
}

int64_t EngineCore::ResetPrefixCache() {
  const int64_t before = cache_.blocks().num_idle();
  cache_.ForgetAll();
  return before - cache_.blocks().num_idle();
}

int64_t EngineCore::PinnedWithoutOwner() const {
  std::vector<const std::vector<int32_t>*> tables;
  for (const auto& item : requests_) {
    for (const auto& s : item.second->outputs) {
      if (!s->blocks.empty()) tables.push_back(&s->blocks);
    }
  }
  return BlocksWithoutOwner(cache_.blocks(), tables);
}

EngineCore::State EngineCore::state() const {
  State state;
  state.counters = counters_;
  EngineStats& gauges = state.gauges;
  gauges.requests_running = num_scheduled_;
  gauges.requests_queued = active_requests() - num_scheduled_;
  const BlockAllocator& blocks = cache_.blocks();
  gauges.kv_blocks_total = blocks.num_blocks();
  gauges.kv_blocks_free = blocks.num_free();
  gauges.kv_blocks_cached = blocks.num_idle();
  gauges.kv_blocks_active = blocks.num_held();
  gauges.kv_blocks_pinned_without_owner = PinnedWithoutOwner();
  gauges.slots_total = options_.slots;
  gauges.slots_free = static_cast<int64_t>(free_slots_.size());
  gauges.snapshots_total = cache_.num_snapshots();
  gauges.snapshots_used = cache_.snapshots_used();
  return state;
}

}  // namespace lockstep
