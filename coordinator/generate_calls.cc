// The generation calls: see generate_calls.h.
#include "coordinator/generate_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/rpc_util.h"

namespace lockstep {

using inference::v1::Delta;
using inference::v1::GenerateEvent;

void AnswerProgress::Count(GenerateEvent* event) {
  const size_t output = static_cast<size_t>(std::max(event->output_index(), 0));
  if (output >= last_sequence_.size()) last_sequence_.resize(output + 1, 0);
  event->set_sequence(++last_sequence_[output]);
  if (event->has_accepted()) prompt_tokens_ = event->accepted().prompt_tokens();
  if (event->has_delta()) completion_tokens_ += event->delta().token_ids_size();
}

void AnswerProgress::AddTrailers(grpc::CallbackServerContext* context) const {
  context->AddTrailingMetadata("lockstep-last-sequence", absl::StrJoin(last_sequence_, ","));
  context->AddTrailingMetadata("lockstep-prompt-tokens", absl::StrCat(prompt_tokens_));
  context->AddTrailingMetadata("lockstep-completion-tokens", absl::StrCat(completion_tokens_));
}

absl::Status EarlyEnd(absl::Time deadline) {
  ErrorDetail detail;
  if (absl::Now() >= deadline) {
    detail.reason = "DEADLINE";
    return MakeError(absl::StatusCode::kDeadlineExceeded, "the deadline of the call has passed",
                     detail);
  }
  detail.reason = "CLIENT";
  return MakeError(absl::StatusCode::kCancelled, "cancelled: the client ended the call", detail);
}

// ---- GenerateStream ----

GenerateStream::GenerateStream(grpc::CallbackServerContext* context, ServingBackend* backend)
    : context_(context), backend_(backend), deadline_(DeadlineOf(*context)) {}

std::shared_ptr<GenerateStream> GenerateStream::Create(grpc::CallbackServerContext* context,
                                                       ServingBackend* backend) {
  std::shared_ptr<GenerateStream> stream(new GenerateStream(context, backend));
  absl::MutexLock lock(&stream->mutex_);
  stream->self_ = stream;
  return stream;
}

void GenerateStream::Begin(GenerationSpec spec) {
  request_id_ = spec.request_id;
  std::shared_ptr<GenerateStream> self;
  {
    absl::MutexLock lock(&mutex_);
    self = self_;
    submitted_ = true;
  }
  const absl::Status status = backend_->Submit(std::move(spec), self);
  if (!status.ok()) Fail(status);
}

void GenerateStream::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    submitted_ = false;
  }
  OnDone(status);
}

void GenerateStream::OnEvent(GenerateEvent event) {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    Enqueue(std::move(event));
    action = Next();
  }
  Perform(action);
}

void GenerateStream::OnDone(const absl::Status& status) {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    ended_ = true;
    final_status_ = status;
    action = Next();
  }
  Perform(action);
}

void GenerateStream::OnWriteDone(bool ok) {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    // A write fails only when the call is gone; OnCancel tells the engine.
    if (!ok) waiting_.clear();
    action = Next();
  }
  Perform(action);
}

void GenerateStream::OnCancel() {
  const absl::Status status = EarlyEnd(deadline_);
  Action action;
  bool cancel;
  {
    absl::MutexLock lock(&mutex_);
    cancel = submitted_ && !ended_;
    if (!ended_) final_status_ = status;
    ended_ = true;
    waiting_.clear();
    action = Next();
  }
  if (cancel) backend_->Cancel(request_id_, status);
  Perform(action);
}

void GenerateStream::OnDone() {
  std::shared_ptr<GenerateStream> self;
  absl::MutexLock lock(&mutex_);
  self.swap(self_);
  // The mutex is released before `self` is: destruction runs in reverse order of declaration.
}

void GenerateStream::Enqueue(GenerateEvent event) {
  if (waiting_.size() >= kMaxWaiting && event.has_delta()) {
    const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(), [&](const GenerateEvent& e) {
      return e.output_index() == event.output_index();
    });
    if (last != waiting_.rend() && last->has_delta()) {
      Delta* merged = last->mutable_delta();
      const Delta& more = event.delta();
      merged->mutable_token_ids()->MergeFrom(more.token_ids());
      merged->mutable_logprobs()->MergeFrom(more.logprobs());
      merged->mutable_text()->append(more.text());
      merged->mutable_raw_bytes()->append(more.raw_bytes());
      return;
    }
  }
  waiting_.push_back(std::move(event));
}

GenerateStream::Action GenerateStream::Next() {
  if (writing_ || finished_) return Action::kNone;
  if (!waiting_.empty()) {
    GenerateEvent event = std::move(waiting_.front());
    waiting_.pop_front();
    progress_.Count(&event);
    current_ = WriteMessage(event);
    writing_ = true;
    return Action::kWrite;
  }
  if (!ended_) return Action::kNone;
  finished_ = true;
  return Action::kFinish;
}

void GenerateStream::Perform(Action action) {
  if (action == Action::kWrite) {
    StartWrite(&current_);
  } else if (action == Action::kFinish) {
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      status = ToGrpcStatus(final_status_);
      if (!status.ok()) progress_.AddTrailers(context_);
    }
    Finish(std::move(status));
  }
}

// ---- GenerateOnce ----

GenerateOnce::GenerateOnce(grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
                           ServingBackend* backend)
    : context_(context), response_(response), backend_(backend), deadline_(DeadlineOf(*context)) {}

std::shared_ptr<GenerateOnce> GenerateOnce::Create(grpc::CallbackServerContext* context,
                                                   grpc::ByteBuffer* response,
                                                   ServingBackend* backend) {
  std::shared_ptr<GenerateOnce> call(new GenerateOnce(context, response, backend));
  absl::MutexLock lock(&call->mutex_);
  call->self_ = call;
  return call;
}

void GenerateOnce::Begin(GenerationSpec spec) {
  request_id_ = spec.request_id;
  std::shared_ptr<GenerateOnce> self;
  {
    absl::MutexLock lock(&mutex_);
    self = self_;
    submitted_ = true;
    for (int32_t i = 0; i < spec.n; ++i) result_.add_outputs()->set_output_index(i);
  }
  const absl::Status status = backend_->Submit(std::move(spec), self);
  if (!status.ok()) Fail(status);
}

void GenerateOnce::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    submitted_ = false;
  }
  End(status);
}

void GenerateOnce::OnEvent(GenerateEvent event) {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  progress_.Count(&event);
  result_.set_request_id(event.request_id());
  if (event.has_accepted()) {
    // Every output of a request says the same.
    *result_.mutable_accepted() = std::move(*event.mutable_accepted());
    return;
  }
  if (event.output_index() < 0 || event.output_index() >= result_.outputs_size()) return;
  inference::v1::Output* output = result_.mutable_outputs(event.output_index());
  if (event.has_delta()) {
    output->mutable_text()->append(event.delta().text());
    output->mutable_token_ids()->MergeFrom(event.delta().token_ids());
    output->mutable_logprobs()->MergeFrom(event.delta().logprobs());
  } else if (event.has_finished()) {
    *output->mutable_finished() = std::move(*event.mutable_finished());
  }
}

void GenerateOnce::OnDone(const absl::Status& status) { End(status); }

void GenerateOnce::End(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    if (status.ok()) {
      *response_ = WriteMessage(result_);
    } else {
      progress_.AddTrailers(context_);
    }
  }
  Finish(ToGrpcStatus(status));
}

void GenerateOnce::OnCancel() {
  const absl::Status status = EarlyEnd(deadline_);
  bool cancel;
  {
    absl::MutexLock lock(&mutex_);
    cancel = submitted_ && !finished_;
  }
  if (cancel) backend_->Cancel(request_id_, status);
  End(status);
}

void GenerateOnce::OnDone() {
  std::shared_ptr<GenerateOnce> self;
  absl::MutexLock lock(&mutex_);
  self.swap(self_);
  // The mutex is released before `self` is: destruction runs in reverse order of declaration.
}

}  // namespace lockstep
