#include "coordinator/sequence_state.h"

#include <tuple>

#include "coordinator/prefix_cache.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"

namespace lockstep {
namespace {

namespace pb = inference::v1;

OutputStreamOptions StreamOptions(const GenerationSpec& spec) {
  OutputStreamOptions options;
  options.stop_strings = spec.stop_strings;
  options.stop_token_ids = spec.stop_token_ids;
  options.eos_token_ids = spec.eos_token_ids;
  options.include_stop_in_output = spec.include_stop_in_output;
  options.min_tokens = spec.min_tokens;
  options.max_tokens = spec.max_tokens;
  options.max_tokens_is_context = spec.max_tokens_is_context;
  return options;
}

void AddLogprobs(const worker::v1::SequenceResult& result, pb::Delta* delta) {
  if (result.logprobs_size() == 0) return;
  pb::TokenLogprobs* all = delta->add_logprobs();
  all->set_token_id(result.logprobs(0).id());
  all->set_logprob(result.logprobs(0).logprob());
  for (int i = 1; i < result.logprobs_size(); ++i) {
    pb::TokenLogprob* top = all->add_top();
    top->set_token_id(result.logprobs(i).id());
    top->set_logprob(result.logprobs(i).logprob());
  }
}

}  // namespace

int64_t RequestState::last_grid_position() const {
  return (prompt_length() - 1) / kBlockPositions * kBlockPositions;
}

SequenceState::SequenceState(RequestState* owner, int32_t index, const Tokenizer* tokenizer)
    : request(owner), output_index(index), stream(tokenizer, StreamOptions(owner->spec)) {}

int32_t SequenceState::token(int64_t at) const {
  CHECK(at >= 0 && at < logged_length()) << "token " << at << " of " << logged_length();
  const int64_t prompt = request->prompt_length();
  return at < prompt ? request->spec.prompt_ids[static_cast<size_t>(at)]
                     : output_ids[static_cast<size_t>(at - prompt)];
}

uint64_t SequenceState::determinism_digest() const {
  uint64_t fold = 0;
  for (const uint64_t digest : digests) fold = Fold64(fold, digest);
  return fold;
}

worker::v1::NewSequence SequenceState::MakeBegin() const {
  worker::v1::NewSequence begin;
  *begin.mutable_sampling() = request->spec.sampling;
  begin.mutable_sampling()->set_output_index(static_cast<uint32_t>(output_index));
  const auto& prompt = request->spec.prompt_ids;
  begin.mutable_prompt_ids()->Add(prompt.begin(), prompt.end());
  begin.mutable_output_ids()->Add(output_ids.begin(), output_ids.end());
  begin.set_restore_snapshot(restore_snapshot);
  begin.mutable_blocks()->Add(blocks.begin(), blocks.end());
  return begin;
}

pb::GenerateEvent SequenceState::NextEvent() {
  pb::GenerateEvent event;
  event.set_request_id(request->spec.request_id);
  event.set_sequence(++event_sequence);
  event.set_output_index(output_index);
  return event;
}

pb::GenerateEvent SequenceState::AcceptedEvent(uint64_t epoch) {
  pb::GenerateEvent event = NextEvent();
  pb::Accepted* accepted = event.mutable_accepted();
  *accepted->mutable_effective_sampling() = request->spec.effective_sampling;
  accepted->set_prompt_tokens(request->prompt_length());
  accepted->set_epoch(epoch);
  return event;
}

pb::GenerateEvent SequenceState::EchoEvent() {
  pb::GenerateEvent event = NextEvent();
  event.mutable_delta()->set_text(request->spec.prompt_text);
  event.mutable_delta()->set_raw_bytes(request->spec.prompt_text);
  return event;
}

pb::GenerateEvent SequenceState::DeltaEvent(const OutputStream::Step& step,
                                            const worker::v1::SequenceResult& result) {
  pb::Delta delta;
  delta.set_token_offset(shown_tokens);
  if (request->spec.detokenize) {
    delta.set_text(step.text);
    delta.set_raw_bytes(step.raw_bytes);
  }
  if (step.token_visible) {
    ++shown_tokens;
    if (request->spec.return_token_ids) delta.add_token_ids(output_ids.back());
    AddLogprobs(result, &delta);
  }
  if (delta.token_ids_size() == 0 && delta.logprobs_size() == 0 && delta.raw_bytes().empty()) {
    return pb::GenerateEvent();
  }
  pb::GenerateEvent event = NextEvent();
  *event.mutable_delta() = std::move(delta);
  return event;
}

pb::GenerateEvent SequenceState::FinishedEvent(const OutputStream::Step& step, absl::Time now) {
  pb::GenerateEvent event = NextEvent();
  pb::Finished* finished = event.mutable_finished();
  finished->set_reason(step.reason);
  if (step.reason == pb::STOP_TEXT) finished->set_stop_text(step.stop_text);
  if (step.reason == pb::STOP_TOKEN || step.reason == pb::EOS) {
    finished->set_stop_token_id(step.stop_token_id);
  }
  pb::Usage* usage = finished->mutable_usage();
  usage->set_prompt_tokens(request->prompt_length());
  usage->set_cached_prompt_tokens(cached_tokens);
  usage->set_completion_tokens(static_cast<int64_t>(output_ids.size()));
  pb::Timings* timings = finished->mutable_timings();
  timings->set_queued_seconds(absl::ToDoubleSeconds(first_scheduled - request->submitted));
  timings->set_prefill_seconds(absl::ToDoubleSeconds(first_token - first_scheduled));
  timings->set_decode_seconds(absl::ToDoubleSeconds(now - first_token));
  finished->set_determinism_digest(determinism_digest());
  finished->set_preemptions(preemptions);
  finished->set_recoveries(recoveries);
  return event;
}

bool OlderSequence::operator()(const SequenceState* a, const SequenceState* b) const {
  return std::make_tuple(-a->request->spec.priority, a->request->arrival, a->output_index) <
         std::make_tuple(-b->request->spec.priority, b->request->arrival, b->output_index);
}

}  // namespace lockstep
