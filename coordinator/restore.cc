// Events from the tokens of a journal: see restore.h.
#include "coordinator/restore.h"

#include <memory>
#include <utility>

#include "kernels/base/check.h"

namespace lockstep {

using inference::v1::GenerateEvent;

bool ReplayOutput(const RestoredRequest& restored, absl::Time now, SequenceState* s,
                  GenerationSink* shown, GenerationSink* sink) {
  const GenerationSpec& spec = s->request->spec;
  const RestoredRequest::Output& log = restored.outputs[static_cast<size_t>(s->output_index)];
  CHECK(log.digests.size() == log.ids.size() && log.logprobs.size() == log.ids.size());
  GenerateEvent accepted = s->AcceptedEvent(restored.accepted.epoch());
  *accepted.mutable_accepted() = restored.accepted;
  shown->OnEvent(std::move(accepted));
  if (spec.echo && !spec.prompt_text.empty()) shown->OnEvent(s->EchoEvent());
  if (log.ids.empty()) return false;

  // Where it was in its life is not known: its times count from here.
  s->admitted = s->prefilled = true;
  s->first_scheduled = s->first_token = now;
  for (size_t i = 0; i < log.ids.size(); ++i) {
    s->output_ids.push_back(log.ids[i]);
    s->digests.push_back(log.digests[i]);
    worker::v1::SequenceResult result;
    for (const worker::v1::Logprob& logprob : log.logprobs[i]) *result.add_logprobs() = logprob;
    const OutputStream::Step step = s->stream.Push(log.ids[i]);
    GenerateEvent delta = s->DeltaEvent(step, result);
    if (delta.has_delta()) shown->OnEvent(std::move(delta));
    if (!step.finished) continue;
    GenerateEvent finished = s->FinishedEvent(step, now);
    if (log.finished.has_value()) *finished.mutable_finished() = *log.finished;
    (log.finished.has_value() ? shown : sink)->OnEvent(std::move(finished));
    return true;
  }
  // All but the last were rows of a step: to run them again is a replay.
  s->computed = s->logged_length() - 1;
  return false;
}

void ReplayEnded(const RestoredRequest& restored, const Tokenizer* tokenizer,
                 GenerationSink* shown) {
  CHECK(restored.end.has_value());
  RequestState request;
  request.spec = restored.spec;
  request.submitted = restored.submitted;
  for (int32_t i = 0; i < restored.spec.n; ++i) {
    SequenceState output(&request, i, tokenizer);
    ReplayOutput(restored, restored.submitted, &output, shown, shown);
  }
  shown->OnDone(*restored.end);
}

}  // namespace lockstep
