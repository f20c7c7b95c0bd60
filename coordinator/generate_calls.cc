// The generation calls: see generate_calls.h.
#include "coordinator/generate_calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/rpc_util.h"

namespace lockstep {

using inference::v1::GenerateEvent;
using inference::v1::GenerateResult;

namespace {

// What the trailers of a failed call tell: lockstep-last-sequence (of output 0, 1, ..., comma
// separated), lockstep-prompt-tokens, lockstep-completion-tokens.
void AddTrailers(const std::vector<uint64_t>& last, const GenerationLog::Usage& usage,
                 grpc::CallbackServerContext* context) {
  context->AddTrailingMetadata("lockstep-last-sequence", absl::StrJoin(last, ","));
  context->AddTrailingMetadata("lockstep-prompt-tokens", absl::StrCat(usage.prompt_tokens));
  context->AddTrailingMetadata("lockstep-completion-tokens", absl::StrCat(usage.completion_tokens));
}

absl::Status SlowConsumer(const GenerationLog::Reader::Backlog& backlog, absl::Duration waited) {
  ErrorDetail detail;
  detail.reason = "SLOW_CONSUMER";
  detail.metadata = {{"events_waiting", absl::StrCat(backlog.events)}};
  return MakeError(
      absl::StatusCode::kResourceExhausted,
      absl::StrCat("nothing was read for ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Seconds(1))), " while ",
                   backlog.events, " events (", backlog.bytes,
                   " bytes) waited: read faster, or attach again to a detachable request"),
      detail);
}

// Everything that a log has, as one answer.
GenerateResult WholeAnswer(const std::shared_ptr<GenerationLog>& log) {
  GenerateResult result;
  result.set_request_id(log->request_id());
  for (int32_t i = 0; i < log->num_outputs(); ++i) result.add_outputs()->set_output_index(i);
  GenerationLog::Reader reader(log, {}, {});
  GenerateEvent event;
  absl::Status end;
  while (reader.Next(&event, &end) == GenerationLog::Reader::Outcome::kEvent) {
    inference::v1::Output* output = result.mutable_outputs(event.output_index());
    if (event.has_accepted()) {
      // Every output of a request says the same.
      *result.mutable_accepted() = std::move(*event.mutable_accepted());
    } else if (event.has_delta()) {
      output->mutable_text()->append(event.delta().text());
      output->mutable_token_ids()->MergeFrom(event.delta().token_ids());
      output->mutable_logprobs()->MergeFrom(event.delta().logprobs());
    } else if (event.has_finished()) {
      *output->mutable_finished() = std::move(*event.mutable_finished());
    }
  }
  return result;
}

}  // namespace

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

GenerateStream::GenerateStream(grpc::CallbackServerContext* context, GenerationTable* table)
    : context_(context), table_(table), deadline_(DeadlineOf(*context)) {}

std::shared_ptr<GenerateStream> GenerateStream::Create(grpc::CallbackServerContext* context,
                                                       GenerationTable* table) {
  std::shared_ptr<GenerateStream> stream(new GenerateStream(context, table));
  absl::MutexLock lock(&stream->mutex_);
  stream->self_ = stream;
  return stream;
}

std::shared_ptr<GenerateStream> GenerateStream::Self() {
  absl::MutexLock lock(&mutex_);
  return self_;
}

void GenerateStream::Begin(GenerationSpec spec) {
  spec_ = std::move(spec);
  Join();
}

void GenerateStream::Join() {
  const std::shared_ptr<GenerateStream> self = Self();
  if (self == nullptr) return;  // the call is over
  for (;;) {
    const absl::StatusOr<GenerationTable::Joined> joined = table_->Submit(spec_, self);
    if (!joined.ok()) return Fail(joined.status());
    if (!joined->ending) return Read(joined->log, {});
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      ending_ = joined->log;
    }
    if (!joined->log->WaitForEnd(self)) return;
    absl::MutexLock lock(&mutex_);
    if (ending_ == nullptr) return;  // OnNews joins
    ending_.reset();
  }
}

void GenerateStream::Attach(const inference::v1::AttachGenerationRequest& request) {
  if (request.request_id().empty()) {
    return Fail(InvalidField("REQUEST_ID_INVALID", "request_id", "request_id is empty"));
  }
  std::vector<uint64_t> after(request.after_sequence().begin(), request.after_sequence().end());
  absl::StatusOr<std::shared_ptr<GenerationLog>> log =
      table_->Attach(request.request_id(), after, Self());
  if (!log.ok()) return Fail(log.status());
  Read(*std::move(log), std::move(after));
}

void GenerateStream::Read(std::shared_ptr<GenerationLog> log, std::vector<uint64_t> after) {
  Action action;
  absl::Status ended_early;
  {
    absl::MutexLock lock(&mutex_);
    log_ = log;
    reader_ = std::make_unique<GenerationLog::Reader>(log, std::move(after), self_);
    ended_early = failure_;
    action = Next();
  }
  // OnCancel came first, and had no log to leave.
  if (!ended_early.ok()) table_->Leave(*log, this, ended_early);
  Perform(action);
}

void GenerateStream::Fail(const absl::Status& status) {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = status;
    action = Next();
  }
  Perform(action);
}

void GenerateStream::Advance() {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    action = Next();
  }
  Perform(action);
}

void GenerateStream::OnNews() {
  bool join = false;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_ != nullptr && ending_->end().has_value()) {
      ending_.reset();
      join = failure_.ok();
    }
  }
  if (join) {
    Join();
  } else {
    Advance();
  }
}

void GenerateStream::OnTick(absl::Time now) {
  std::shared_ptr<GenerationLog> log;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (!writing_ || finished_ || !failure_.ok()) return;
    const absl::Duration waited = now - write_started_;
    if (waited < table_->options().slow_consumer_timeout) return;
    const GenerationLog::Reader::Backlog backlog = reader_->backlog();
    if (backlog.events <= kMaxWaiting && backlog.bytes <= kMaxWaitingBytes) return;
    status = failure_ = final_status_ = SlowConsumer(backlog, waited);
    log = log_;
    // The write goes on until the client reads or goes away; the status is sent behind it.
    finished_ = true;
  }
  table_->CountSlowConsumer();
  table_->Leave(*log, this, status);
  Perform(Action::kFinish);
}

void GenerateStream::OnWriteDone(bool ok) {
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    // A write fails only when the call is gone; OnCancel tells why.
    action = ok || !failure_.ok() ? Next() : Action::kNone;
  }
  Perform(action);
}

void GenerateStream::OnCancel() {
  const absl::Status status = EarlyEnd(deadline_);
  std::shared_ptr<GenerationLog> log;
  Action action;
  {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = status;
    log = log_;
    action = Next();
  }
  if (log != nullptr) table_->Leave(*log, this, status);
  Perform(action);
}

void GenerateStream::OnDone() {
  std::shared_ptr<GenerateStream> self;
  absl::MutexLock lock(&mutex_);
  self.swap(self_);
  // The mutex is released before `self` is: destruction runs in reverse order of declaration.
}

GenerateStream::Action GenerateStream::Next() {
  if (writing_ || finished_) return Action::kNone;
  if (!failure_.ok()) {
    final_status_ = failure_;
    finished_ = true;
    return Action::kFinish;
  }
  if (reader_ == nullptr) return Action::kNone;
  GenerateEvent event;
  switch (reader_->Next(&event, &final_status_)) {
    case GenerationLog::Reader::Outcome::kNothing:
      return Action::kNone;
    case GenerationLog::Reader::Outcome::kEnd:
      finished_ = true;
      return Action::kFinish;
    case GenerationLog::Reader::Outcome::kEvent:
      break;
  }
  current_ = WriteMessage(event);
  writing_ = true;
  write_started_ = table_->Now();
  return Action::kWrite;
}

void GenerateStream::Perform(Action action) {
  if (action == Action::kWrite) {
    StartWrite(&current_);
  } else if (action == Action::kFinish) {
    absl::Status status;
    std::shared_ptr<GenerationLog> log;
    {
      absl::MutexLock lock(&mutex_);
      status = final_status_;
      log = log_;
      if (!status.ok()) {
        const auto last = reader_ == nullptr ? std::vector<uint64_t>(1, 0) : reader_->last();
        AddTrailers(last, log == nullptr ? GenerationLog::Usage() : log->UsageAt(last), context_);
      }
    }
    if (log != nullptr) table_->Leave(*log, this, status);
    Finish(ToGrpcStatus(status));
  }
}

// ---- GenerateOnce ----

GenerateOnce::GenerateOnce(grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
                           GenerationTable* table)
    : context_(context), response_(response), table_(table), deadline_(DeadlineOf(*context)) {}

std::shared_ptr<GenerateOnce> GenerateOnce::Create(grpc::CallbackServerContext* context,
                                                   grpc::ByteBuffer* response,
                                                   GenerationTable* table) {
  std::shared_ptr<GenerateOnce> call(new GenerateOnce(context, response, table));
  absl::MutexLock lock(&call->mutex_);
  call->self_ = call;
  return call;
}

std::shared_ptr<GenerateOnce> GenerateOnce::Self() {
  absl::MutexLock lock(&mutex_);
  return self_;
}

void GenerateOnce::Begin(GenerationSpec spec) {
  spec_ = std::move(spec);
  Join();
}

void GenerateOnce::Join() {
  const std::shared_ptr<GenerateOnce> self = Self();
  if (self == nullptr) return;  // the call is over
  for (;;) {
    const absl::StatusOr<GenerationTable::Joined> joined = table_->Submit(spec_, self);
    if (!joined.ok()) return Fail(joined.status());
    bool finished;
    {
      absl::MutexLock lock(&mutex_);
      finished = finished_;
      if (joined->ending) {
        if (finished) return;
        ending_ = joined->log;
      } else {
        log_ = joined->log;
      }
    }
    // OnCancel came first, and had no log to leave.
    if (finished) return table_->Leave(*joined->log, this, EarlyEnd(deadline_));
    if (!joined->log->WaitForEnd(self)) return;
    if (!joined->ending) return OnNews();
    absl::MutexLock lock(&mutex_);
    if (ending_ == nullptr) return;  // OnNews joins
    ending_.reset();
  }
}

void GenerateOnce::Fail(const absl::Status& status) { End(status); }

void GenerateOnce::OnNews() {
  std::shared_ptr<GenerationLog> log;
  bool join = false;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (ending_ != nullptr) {
      join = true;
      ending_.reset();
    }
    log = log_;
  }
  if (join) {
    Join();
  } else if (log != nullptr && log->end().has_value()) {
    End(*log->end());
  }
}

void GenerateOnce::OnTick(absl::Time /*now*/) {}

void GenerateOnce::End(const absl::Status& status) {
  std::shared_ptr<GenerationLog> log;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    log = log_;
    if (!status.ok()) {
      const auto last = log == nullptr ? std::vector<uint64_t>(1, 0) : log->last_sequence();
      AddTrailers(last, log == nullptr ? GenerationLog::Usage() : log->UsageAt(last), context_);
    } else {
      *response_ = WriteMessage(WholeAnswer(log));
    }
  }
  if (log != nullptr) table_->Leave(*log, this, status);
  Finish(ToGrpcStatus(status));
}

void GenerateOnce::OnCancel() { End(EarlyEnd(deadline_)); }

void GenerateOnce::OnDone() {
  std::shared_ptr<GenerateOnce> self;
  absl::MutexLock lock(&mutex_);
  self.swap(self_);
  // The mutex is released before `self` is: destruction runs in reverse order of declaration.
}

}  // namespace lockstep
