// GenerationTable: see generation_table.h.
#include "coordinator/generation_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr size_t kRememberedIds = 4096;
constexpr int64_t kSubmitsPerSweep = 64;
constexpr absl::Duration kLongestTick = absl::Milliseconds(500);
constexpr absl::Duration kShortestTick = absl::Milliseconds(5);

absl::Status AttachError(absl::StatusCode code, absl::string_view reason,
                         const std::string& request_id, absl::string_view message,
                         std::vector<std::pair<std::string, std::string>> metadata = {}) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  detail.metadata = std::move(metadata);
  detail.metadata.insert(detail.metadata.begin(), {"request_id", request_id});
  return MakeError(code, message, detail);
}

// OK when a log has the events that a reader says it has.
absl::Status CheckOffsets(const GenerationLog& log, const std::vector<uint64_t>& after) {
  const std::vector<uint64_t> last = log.last_sequence();
  if (after.size() > last.size()) {
    return InvalidField("LIMIT_EXCEEDED", "after_sequence",
                        absl::StrCat("after_sequence has ", after.size(), " values, request ",
                                     log.request_id(), " has ", last.size(), " outputs"));
  }
  for (size_t i = 0; i < after.size(); ++i) {
    if (after[i] <= last[i]) continue;
    return AttachError(
        absl::StatusCode::kOutOfRange, "SEQUENCE_NOT_REACHED", log.request_id(),
        absl::StrCat("after_sequence[", i, "] is ", after[i], ", the last event of output ", i,
                     " is ", last[i], ": attach after that one or an earlier one"),
        {{"output_index", absl::StrCat(i)}, {"last_sequence", absl::StrCat(last[i])}});
  }
  return absl::OkStatus();
}

}  // namespace

GenerationTable::GenerationTable(ServingBackend* backend, const GenerationTableOptions& options)
    : backend_(backend), options_(options) {
  if (!options_.clock) thread_ = std::thread([this]() { Run(); });
}

GenerationTable::~GenerationTable() {
  {
    std::lock_guard<std::mutex> lock(stop_mu_);
    stop_ = true;
  }
  stop_changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

absl::Time GenerationTable::Now() const { return options_.clock ? options_.clock() : absl::Now(); }

absl::StatusOr<GenerationTable::Joined> GenerationTable::Submit(
    const GenerationSpec& spec, std::shared_ptr<GenerationReader> reader) {
  absl::MutexLock lock(&mutex_);
  if (++submitted_since_sweep_ >= kSubmitsPerSweep) Sweep(Now());
  const auto found = entries_.find(spec.request_id);
  if (found != entries_.end()) {
    Entry& entry = found->second;
    const absl::optional<absl::Status> end = entry.log->end();
    if (!end.has_value() && entry.ending) return Joined{entry.log, true};
    if (!end.has_value() || end->ok()) {
      const bool same_body = entry.body_digest == spec.body_digest;
      if (!same_body) return RequestIdReused(spec.request_id, end.has_value(), same_body);
      entry.readers.push_back(std::move(reader));
      entry.abandoned = absl::InfiniteFuture();
      ++totals_.joins;
      return Joined{entry.log, false};
    }
  }
  Entry entry;
  entry.log = std::make_shared<GenerationLog>(spec.request_id, spec.n);
  entry.body_digest = spec.body_digest;
  entry.detachable = spec.detachable;
  entry.readers.push_back(std::move(reader));
  const std::shared_ptr<GenerationLog> log = entry.log;
  // The lock is kept, so that of two equal requests one is submitted and the other joins it.
  RETURN_IF_ERROR(backend_->Submit(spec, log));
  entries_[spec.request_id] = std::move(entry);
  return Joined{log, false};
}

absl::StatusOr<std::shared_ptr<GenerationLog>> GenerationTable::Attach(
    const std::string& request_id, const std::vector<uint64_t>& after,
    std::shared_ptr<GenerationReader> reader) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(request_id);
  if (found == entries_.end()) {
    if (forgotten_.count(request_id) > 0) {
      return AttachError(absl::StatusCode::kOutOfRange, "EVENT_LOG_TRUNCATED", request_id,
                         absl::StrCat("request ", request_id,
                                      " ended and its events are not kept any more: attach within ",
                                      absl::FormatDuration(options_.attach_grace),
                                      " of the end (--attach-grace)"));
    }
    return AttachError(absl::StatusCode::kNotFound, "REQUEST_NOT_FOUND", request_id,
                       absl::StrCat("request ", request_id,
                                    " is not known here: it was never accepted or ended long ago"));
  }
  Entry& entry = found->second;
  RETURN_IF_ERROR(CheckOffsets(*entry.log, after));
  entry.readers.push_back(std::move(reader));
  entry.abandoned = absl::InfiniteFuture();
  ++totals_.attaches;
  return entry.log;
}

void GenerationTable::Leave(const GenerationLog& log, const GenerationReader* reader,
                            const absl::Status& status) {
  std::shared_ptr<GenerationReader> left;  // released without the lock
  {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(log.request_id());
    if (found == entries_.end() || found->second.log.get() != &log) return;
    Entry& entry = found->second;
    const auto place =
        std::find_if(entry.readers.begin(), entry.readers.end(),
                     [reader](const auto& candidate) { return candidate.get() == reader; });
    if (place == entry.readers.end()) return;
    left = std::move(*place);
    entry.readers.erase(place);
    if (!entry.readers.empty() || log.end().has_value() || entry.ending) return;
    if (entry.detachable) {
      entry.abandoned = Now();
      return;
    }
    entry.ending = true;
  }
  backend_->Cancel(log.request_id(), status);
}

CancelResult GenerationTable::Cancel(const std::string& request_id, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(request_id);
    if (found != entries_.end()) {
      // An id may be known to nobody but the table, when its request ended before a restart.
      if (found->second.log->end().has_value()) return CancelResult::kAlreadyFinished;
      found->second.ending = true;
    }
  }
  return backend_->Cancel(request_id, status);
}

void GenerationTable::AddRestored(const GenerationSpec& spec, std::shared_ptr<GenerationLog> log) {
  Entry entry;
  entry.log = std::move(log);
  entry.body_digest = spec.body_digest;
  entry.detachable = spec.detachable;
  absl::MutexLock lock(&mutex_);
  entry.abandoned = Now();
  entries_[spec.request_id] = std::move(entry);
}

void GenerationTable::Forget(const std::string& request_id) {
  entries_.erase(request_id);
  if (!forgotten_.insert(request_id).second) return;
  forgotten_order_.push_back(request_id);
  if (forgotten_order_.size() > kRememberedIds) {
    forgotten_.erase(forgotten_order_.front());
    forgotten_order_.pop_front();
  }
}

void GenerationTable::Sweep(absl::Time now) {
  submitted_since_sweep_ = 0;
  std::vector<std::pair<absl::Time, std::string>> ended;
  int64_t bytes = 0;
  for (auto& [id, entry] : entries_) {
    if (!entry.log->end().has_value()) continue;
    if (entry.ended == absl::InfiniteFuture()) {
      entry.ended = now;
      entry.ended_bytes = entry.log->bytes();
    }
    ended.emplace_back(entry.ended, id);
    bytes += entry.ended_bytes;
  }
  std::sort(ended.begin(), ended.end());
  int64_t count = static_cast<int64_t>(ended.size());
  for (const auto& [when, id] : ended) {
    const bool too_much = count > options_.max_ended || bytes > options_.max_ended_bytes;
    if (now - when < options_.attach_grace && !too_much) break;
    if (!too_much && !entries_.at(id).readers.empty()) continue;
    bytes -= entries_.at(id).ended_bytes;
    --count;
    Forget(id);
  }
}

void GenerationTable::Tick(absl::Time now) {
  std::vector<std::string> abandoned;
  std::vector<std::shared_ptr<GenerationReader>> readers;
  {
    absl::MutexLock lock(&mutex_);
    Sweep(now);
    for (auto& [id, entry] : entries_) {
      readers.insert(readers.end(), entry.readers.begin(), entry.readers.end());
      if (entry.log->end().has_value() || entry.ending ||
          now - entry.abandoned < options_.attach_grace) {
        continue;
      }
      entry.ending = true;
      ++totals_.abandoned;
      abandoned.push_back(id);
    }
  }
  for (const std::string& id : abandoned) {
    ErrorDetail detail;
    detail.reason = "ABANDONED";
    backend_->Cancel(id, MakeError(absl::StatusCode::kCancelled,
                                   absl::StrCat("cancelled: nobody has read request ", id, " for ",
                                                absl::FormatDuration(options_.attach_grace),
                                                " (--attach-grace)"),
                                   detail));
  }
  for (const auto& reader : readers) reader->OnTick(now);
}

void GenerationTable::CountSlowConsumer() {
  absl::MutexLock lock(&mutex_);
  ++totals_.slow_consumers;
}

GenerationTable::Stats GenerationTable::stats() const {
  absl::MutexLock lock(&mutex_);
  Stats stats = totals_;
  stats.requests = static_cast<int64_t>(entries_.size());
  for (const auto& [id, entry] : entries_) {
    stats.readers += static_cast<int64_t>(entry.readers.size());
    stats.bytes += entry.log->bytes();
  }
  return stats;
}

void GenerationTable::Run() {
  const absl::Duration shortest = std::min(options_.attach_grace, options_.slow_consumer_timeout);
  const absl::Duration period = std::min(kLongestTick, std::max(kShortestTick, shortest / 8));
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(stop_mu_);
      const auto stopped = [this]() { return stop_; };
      if (stop_changed_.wait_for(lock, absl::ToChronoNanoseconds(period), stopped)) return;
    }
    Tick(Now());
  }
}

}  // namespace lockstep
