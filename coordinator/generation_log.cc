// GenerationLog: see generation_log.h.
#include "coordinator/generation_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"
#include "kernels/base/check.h"

namespace lockstep {

using inference::v1::Delta;
using inference::v1::GenerateEvent;

namespace {

void Tell(const std::vector<std::weak_ptr<GenerationObserver>>& observers) {
  for (const auto& weak : observers) {
    if (const std::shared_ptr<GenerationObserver> observer = weak.lock()) observer->OnNews();
  }
}

}  // namespace

// ---- one output ----

uint32_t GenerationLog::Output::LogprobsAt(uint64_t sequence) const {
  if (sequence == 0 || logprob_ends.empty()) return 0;
  // Events before the first with log-probabilities have no entry: they have none.
  const size_t missing = events.size() - logprob_ends.size();
  return sequence <= missing ? 0 : logprob_ends[sequence - 1 - missing];
}

void GenerationLog::Output::AppendDelta(const Delta& delta, EventEnds* ends) {
  if (!text_differs && delta.text() != delta.raw_bytes()) {
    text = raw;
    text_differs = true;
  }
  ids.insert(ids.end(), delta.token_ids().begin(), delta.token_ids().end());
  raw += delta.raw_bytes();
  if (text_differs) text += delta.text();
  logprobs.insert(logprobs.end(), delta.logprobs().begin(), delta.logprobs().end());
  ends->ids = static_cast<uint32_t>(ids.size());
  ends->raw = static_cast<uint32_t>(raw.size());
  ends->text = static_cast<uint32_t>(text_differs ? text.size() : raw.size());
  ends->token_offset = static_cast<uint32_t>(delta.token_offset());
}

int64_t GenerationLog::Output::bytes() const {
  size_t total = sizeof(Output) + events.capacity() * sizeof(EventEnds) +
                 ids.capacity() * sizeof(int32_t) + raw.capacity() + text.capacity() +
                 logprob_ends.capacity() * sizeof(uint32_t);
  for (const auto& token : logprobs) {
    total +=
        sizeof(token) + static_cast<size_t>(token.top_size()) * sizeof(inference::v1::TokenLogprob);
  }
  return static_cast<int64_t>(total);
}

// ---- the log ----

GenerationLog::GenerationLog(std::string request_id, int32_t outputs)
    : request_id_(std::move(request_id)),
      num_outputs_(outputs),
      outputs_(static_cast<size_t>(outputs)) {}

void GenerationLog::OnEvent(GenerateEvent event) {
  std::vector<std::weak_ptr<GenerationObserver>> told;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) return;
    CHECK(event.output_index() >= 0 && event.output_index() < num_outputs_);
    Output& output = outputs_[static_cast<size_t>(event.output_index())];
    CHECK_EQ(event.sequence(), output.last_sequence() + 1) << request_id_;
    CHECK(output.finished == nullptr) << "an event after Finished of " << request_id_;
    CHECK_EQ(event.has_accepted(), event.sequence() == 1) << request_id_;
    EventEnds ends = output.EndsAt(output.last_sequence());
    if (event.has_accepted() && accepted_ == nullptr) {
      accepted_ = std::make_unique<inference::v1::Accepted>(std::move(*event.mutable_accepted()));
    } else if (event.has_delta()) {
      output.AppendDelta(event.delta(), &ends);
    } else if (event.has_finished()) {
      output.finished =
          std::make_unique<inference::v1::Finished>(std::move(*event.mutable_finished()));
    }
    output.events.push_back(ends);
    if (!output.logprobs.empty()) {
      output.logprob_ends.push_back(static_cast<uint32_t>(output.logprobs.size()));
    }
    for (Waiter& waiter : waiters_) told.push_back(std::move(waiter.observer));
    waiters_.clear();
  }
  Tell(told);
}

void GenerationLog::OnDone(const absl::Status& status) {
  std::vector<std::weak_ptr<GenerationObserver>> told;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) return;
    end_ = status;
    told.swap(end_waiters_);
    for (Waiter& waiter : waiters_) told.push_back(std::move(waiter.observer));
    waiters_.clear();
    for (Output& output : outputs_) {
      output.events.shrink_to_fit();
      output.ids.shrink_to_fit();
      output.raw.shrink_to_fit();
      output.text.shrink_to_fit();
    }
  }
  Tell(told);
}

absl::optional<absl::Status> GenerationLog::end() const {
  absl::MutexLock lock(&mutex_);
  return end_;
}

std::vector<uint64_t> GenerationLog::last_sequence() const {
  absl::MutexLock lock(&mutex_);
  std::vector<uint64_t> last;
  for (const Output& output : outputs_) last.push_back(output.last_sequence());
  return last;
}

int64_t GenerationLog::bytes() const {
  absl::MutexLock lock(&mutex_);
  int64_t total = static_cast<int64_t>(sizeof(GenerationLog));
  for (const Output& output : outputs_) total += output.bytes();
  return total;
}

GenerationLog::Usage GenerationLog::UsageAt(const std::vector<uint64_t>& last) const {
  absl::MutexLock lock(&mutex_);
  Usage usage;
  if (accepted_ != nullptr) usage.prompt_tokens = accepted_->prompt_tokens();
  for (size_t i = 0; i < outputs_.size() && i < last.size(); ++i) {
    usage.completion_tokens += outputs_[i].EndsAt(last[i]).ids;
  }
  return usage;
}

bool GenerationLog::WaitForEnd(std::weak_ptr<GenerationObserver> observer) {
  absl::MutexLock lock(&mutex_);
  if (end_.has_value()) return true;
  end_waiters_.push_back(std::move(observer));
  return false;
}

int64_t GenerationLog::Unread(const std::vector<uint64_t>& last) const {
  uint64_t unread = 0;
  for (size_t i = 0; i < outputs_.size(); ++i) unread += outputs_[i].last_sequence() - last[i];
  return static_cast<int64_t>(unread);
}

uint64_t GenerationLog::MergeEnd(const Output& output, uint64_t first) const {
  const EventEnds from = output.EndsAt(first - 1);
  uint64_t last = first;
  while (last < output.last_sequence() && output.IsDelta(last + 1)) {
    const EventEnds ends = output.EndsAt(last);
    if (ends.ids - from.ids >= Reader::kMergedTokens || ends.raw - from.raw >= Reader::kMergedBytes)
      break;
    ++last;
  }
  return last;
}

GenerateEvent GenerationLog::MakeEvent(size_t index, uint64_t first, uint64_t last) const {
  const Output& output = outputs_[index];
  GenerateEvent event;
  event.set_request_id(request_id_);
  event.set_output_index(static_cast<int32_t>(index));
  event.set_sequence(last);
  if (last > first) event.set_first_sequence(first);
  if (first == 1) {
    *event.mutable_accepted() = *accepted_;
  } else if (!output.IsDelta(first)) {
    *event.mutable_finished() = *output.finished;
  } else {
    const EventEnds from = output.EndsAt(first - 1);
    const EventEnds to = output.EndsAt(last);
    Delta* delta = event.mutable_delta();
    delta->set_token_offset(output.EndsAt(first).token_offset);
    delta->mutable_token_ids()->Add(output.ids.begin() + from.ids, output.ids.begin() + to.ids);
    delta->set_raw_bytes(output.raw.substr(from.raw, to.raw - from.raw));
    delta->set_text(
        (output.text_differs ? output.text : output.raw).substr(from.text, to.text - from.text));
    for (uint32_t i = output.LogprobsAt(first - 1); i < output.LogprobsAt(last); ++i) {
      *delta->add_logprobs() = output.logprobs[i];
    }
  }
  return event;
}

// ---- a reader ----

GenerationLog::Reader::Reader(std::shared_ptr<GenerationLog> log, std::vector<uint64_t> after,
                              std::weak_ptr<GenerationObserver> observer)
    : log_(std::move(log)), observer_(std::move(observer)), last_(std::move(after)) {
  const std::vector<uint64_t> there = log_->last_sequence();
  CHECK(last_.size() <= there.size());
  last_.resize(there.size(), 0);
  for (size_t i = 0; i < there.size(); ++i) CHECK(last_[i] <= there[i]);
}

GenerationLog::Reader::~Reader() {
  absl::MutexLock lock(&log_->mutex_);
  auto& waiters = log_->waiters_;
  waiters.erase(std::remove_if(waiters.begin(), waiters.end(),
                               [this](const Waiter& waiter) { return waiter.reader == this; }),
                waiters.end());
}

GenerationLog::Reader::Outcome GenerationLog::Reader::Next(GenerateEvent* event,
                                                           absl::Status* end) {
  absl::MutexLock lock(&log_->mutex_);
  for (size_t i = 0; i < last_.size(); ++i) {
    const size_t index = (turn_ + i) % last_.size();
    const Output& output = log_->outputs_[index];
    const uint64_t first = last_[index] + 1;
    if (first > output.last_sequence()) continue;
    const bool merge = output.IsDelta(first) && log_->Unread(last_) > kMaxBehind;
    const uint64_t last = merge ? log_->MergeEnd(output, first) : first;
    *event = log_->MakeEvent(index, first, last);
    last_[index] = last;
    turn_ = (index + 1) % last_.size();
    return Outcome::kEvent;
  }
  if (log_->end_.has_value()) {
    *end = *log_->end_;
    return Outcome::kEnd;
  }
  auto& waiters = log_->waiters_;
  const bool waits = std::any_of(waiters.begin(), waiters.end(),
                                 [this](const Waiter& waiter) { return waiter.reader == this; });
  if (!waits) waiters.push_back({this, observer_});
  return Outcome::kNothing;
}

GenerationLog::Reader::Backlog GenerationLog::Reader::backlog() const {
  absl::MutexLock lock(&log_->mutex_);
  Backlog backlog;
  backlog.events = log_->Unread(last_);
  for (size_t i = 0; i < last_.size(); ++i) {
    const Output& output = log_->outputs_[i];
    const EventEnds from = output.EndsAt(last_[i]);
    const EventEnds to = output.EndsAt(output.last_sequence());
    backlog.bytes += to.raw - from.raw;
    backlog.bytes += static_cast<int64_t>(to.ids - from.ids) * 4;
  }
  return backlog;
}

}  // namespace lockstep
