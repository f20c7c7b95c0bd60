// FakeServingBackend: for tests of the services. Holds every submitted request; the test drives its
// sink, or `auto_tokens` makes the fake answer at once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "coordinator/errors.h"
#include "coordinator/serving_backend.h"

namespace lockstep {

class FakeServingBackend : public ServingBackend {
 public:
  struct Entry {
    GenerationSpec spec;
    std::shared_ptr<GenerationSink> sink;
    bool done = false;
    absl::Status cancelled_with;
  };

  // ---- for the test ----
  void SetModel(absl::StatusOr<std::shared_ptr<const ServedModel>> model) {
    std::lock_guard<std::mutex> lock(mu_);
    model_ = std::move(model);
  }
  void SetSubmitError(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mu_);
    submit_error_ = status;
  }
  // >= 0: Submit answers by itself with that many tokens "t0 ", "t1 ", ...
  void SetAutoTokens(int tokens) {
    std::lock_guard<std::mutex> lock(mu_);
    auto_tokens_ = tokens;
  }
  // Cancelled requests end when the test says so, with EndCancelled.
  void HoldCancels() {
    std::lock_guard<std::mutex> lock(mu_);
    hold_cancels_ = true;
  }
  static void EndCancelled(const std::shared_ptr<Entry>& entry) {
    entry->sink->OnDone(entry->cancelled_with);
  }
  size_t requests() const {
    std::lock_guard<std::mutex> lock(mu_);
    return entries_.size();
  }
  // Waits until `count` requests were submitted; returns the last of them.
  std::shared_ptr<Entry> WaitForRequest(size_t count) {
    std::unique_lock<std::mutex> lock(mu_);
    const auto arrived = [this, count]() { return entries_.size() >= count; };
    if (!changed_.wait_for(lock, kPatience, arrived)) return nullptr;
    return entries_[count - 1];
  }
  // Waits until the request was cancelled.
  bool WaitForCancel(const std::shared_ptr<Entry>& entry) {
    std::unique_lock<std::mutex> lock(mu_);
    return changed_.wait_for(lock, kPatience, [&entry]() { return !entry->cancelled_with.ok(); });
  }
  absl::Status CancelledWith(const std::shared_ptr<Entry>& entry) {
    std::lock_guard<std::mutex> lock(mu_);
    return entry->cancelled_with;
  }

  // Events as the engine makes them.
  static void SendAccepted(const Entry& entry) {
    inference::v1::GenerateEvent event;
    event.set_request_id(entry.spec.request_id);
    event.set_sequence(1);
    *event.mutable_accepted()->mutable_effective_sampling() = entry.spec.effective_sampling;
    event.mutable_accepted()->set_prompt_tokens(static_cast<int64_t>(entry.spec.prompt_ids.size()));
    entry.sink->OnEvent(std::move(event));
  }
  static void SendToken(const Entry& entry, int index) {
    inference::v1::GenerateEvent event;
    event.set_request_id(entry.spec.request_id);
    event.set_sequence(static_cast<uint64_t>(index) + 2);
    event.mutable_delta()->add_token_ids(index);
    event.mutable_delta()->set_text(absl::StrCat("t", index, " "));
    event.mutable_delta()->set_token_offset(index);
    entry.sink->OnEvent(std::move(event));
  }
  static void SendFinished(const Entry& entry, int tokens) {
    inference::v1::GenerateEvent event;
    event.set_request_id(entry.spec.request_id);
    event.set_sequence(static_cast<uint64_t>(tokens) + 2);
    event.mutable_finished()->set_reason(inference::v1::MAX_TOKENS);
    event.mutable_finished()->mutable_usage()->set_completion_tokens(tokens);
    event.mutable_finished()->set_determinism_digest(42);
    entry.sink->OnEvent(std::move(event));
  }

  // ---- ServingBackend ----
  absl::StatusOr<std::shared_ptr<const ServedModel>> Model() const override {
    std::lock_guard<std::mutex> lock(mu_);
    return model_;
  }
  absl::Status Ready() const override {
    std::lock_guard<std::mutex> lock(mu_);
    return model_.status();
  }
  absl::Status Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink) override {
    auto entry = std::make_shared<Entry>();
    int tokens;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!submit_error_.ok()) return submit_error_;
      entry->spec = std::move(spec);
      entry->sink = std::move(sink);
      entry->done = auto_tokens_ >= 0;
      entries_.push_back(entry);
      tokens = auto_tokens_;
      changed_.notify_all();
    }
    if (tokens < 0) return absl::OkStatus();
    SendAccepted(*entry);
    for (int i = 0; i < tokens; ++i) SendToken(*entry, i);
    SendFinished(*entry, tokens);
    entry->sink->OnDone(absl::OkStatus());
    return absl::OkStatus();
  }
  CancelResult Cancel(const std::string& request_id, const absl::Status& status) override {
    std::shared_ptr<Entry> found;
    {
      std::lock_guard<std::mutex> lock(mu_);
      for (const auto& entry : entries_) {
        if (entry->spec.request_id == request_id) found = entry;
      }
      if (found == nullptr) return CancelResult::kNotFound;
      if (found->done) return CancelResult::kAlreadyFinished;
      found->done = true;
      found->cancelled_with = status;
      changed_.notify_all();
      if (hold_cancels_) return CancelResult::kCancelled;
    }
    found->sink->OnDone(status);
    return CancelResult::kCancelled;
  }
  inference::v1::ServerStatus Status() const override {
    inference::v1::ServerStatus status;
    status.set_state(Model().ok() ? "READY" : "LOADING");
    status.set_version("fake");
    return status;
  }

 private:
  static constexpr std::chrono::seconds kPatience{20};

  mutable std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  absl::StatusOr<std::shared_ptr<const ServedModel>> model_ =
      absl::UnavailableError("no model was set");
  absl::Status submit_error_;
  int auto_tokens_ = -1;
  bool hold_cancels_ = false;
  std::vector<std::shared_ptr<Entry>> entries_;
};

}  // namespace lockstep
