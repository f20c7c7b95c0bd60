// Journal: see journal.h.
#include "coordinator/journal/journal.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/journal/record.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

using inference::v1::GenerateEvent;
using journal::v1::Record;

namespace {

constexpr char kSuffix[] = ".journal";
constexpr char kFreshName[] = "fresh.tmp";
constexpr absl::Duration kSyncPeriod = absl::Milliseconds(50);
constexpr absl::Duration kIdleWait = absl::Seconds(1);

std::string SegmentName(uint64_t number) { return absl::StrCat(number, kSuffix); }

// 0: no segment.
uint64_t SegmentNumber(absl::string_view name) {
  uint64_t number = 0;
  if (!absl::ConsumeSuffix(&name, kSuffix) || !absl::SimpleAtoi(name, &number)) return 0;
  return number;
}

absl::Status Unwritable(absl::string_view cause) {
  ErrorDetail detail;
  detail.reason = "JOURNAL_UNWRITABLE";
  detail.retry_after = absl::Seconds(1);
  return MakeError(absl::StatusCode::kUnavailable,
                   absl::StrCat("the request journal cannot be written: ", cause), detail);
}

// The server has ended, or cannot go on: the request has not ended with it.
bool ServerEnded(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status);
}

uint64_t OrdinalOf(const Record& record) {
  return record.has_accept()       ? record.accept().ordinal()
         : record.has_output_end() ? record.output_end().ordinal()
                                   : record.end().ordinal();
}

}  // namespace

// Stands between the engine and a log. Only hands over; the journal's thread does the rest.
class Journal::Sink : public GenerationSink, public std::enable_shared_from_this<Journal::Sink> {
 public:
  Sink(Journal* owner, const GenerationSpec& request)
      : journal(owner), request_id(request.request_id), spec(request) {}

  void OnToken(int32_t output, uint64_t digest, const worker::v1::SequenceResult& result) override {
    journal::v1::Token token;
    token.set_output(output);
    token.set_id(result.sampled_id());
    token.set_digest(digest);
    *token.mutable_logprobs() = result.logprobs();
    journal->Push({shared_from_this(), std::move(token)});
  }
  void OnEvent(GenerateEvent event) override {
    journal->Push({shared_from_this(), std::move(event)});
  }
  void OnDone(const absl::Status& status) override { journal->Push({shared_from_this(), status}); }

  Journal* const journal;
  const std::string request_id;
  GenerationSpec spec;  // until it is written
  const absl::Time submitted = absl::Now();
  std::shared_ptr<GenerationSink> log;
  uint64_t ordinal = 0;  // 0: not written yet
  bool cut = false;      // given up: takes nothing more; guarded by the journal's mutex
};

Journal::Journal(const JournalOptions& options, std::unique_ptr<JournalStorage> storage)
    : options_(options), storage_(std::move(storage)), rewrite_above_(options.max_dead_bytes) {}

Journal::~Journal() { Stop(); }

// ---- opening ----

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const JournalOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<JournalStorage> storage,
                   OpenJournalDirectory(options.directory));
  return Open(options, std::move(storage));
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const JournalOptions& options,
                                                       std::unique_ptr<JournalStorage> storage) {
  std::unique_ptr<Journal> journal(new Journal(options, std::move(storage)));
  RETURN_IF_ERROR(journal->Read());
  return journal;
}

absl::Status Journal::Read() {
  read_ = std::make_unique<RequestCollector>();
  ASSIGN_OR_RETURN(const std::vector<std::string> names, storage_->List());
  for (const std::string& name : names) segment_ = std::max(segment_, SegmentNumber(name));
  if (segment_ == 0) return absl::OkStatus();
  const std::string name = SegmentName(segment_);
  ASSIGN_OR_RETURN(const std::string bytes, storage_->Read(name));
  ASSIGN_OR_RETURN(const int64_t torn, ScanSegment(bytes, storage_->PathOf(name),
                                                   [this](const Record& record, int64_t) {
                                                     return read_->Take(record);
                                                   }));
  if (torn > 0) {
    LogWarning("journal: the last ", torn, " bytes of ", storage_->PathOf(name),
               " are an unfinished write and are dropped");
  }
  size_ = static_cast<int64_t>(bytes.size()) - torn;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Journal::Restored>> Journal::Begin(
    uint64_t model_digest,
    std::function<void(const std::string& request_id, const absl::Status& status)> lose) {
  CHECK(read_ != nullptr) << "Journal::Begin was called twice";
  const std::unique_ptr<RequestCollector> read = std::move(read_);
  lose_ = std::move(lose);
  model_digest_ = model_digest;
  next_ordinal_ = read->next_ordinal();
  absl::Time newest = absl::InfinitePast();
  for (const auto& [ordinal, time] : read->end_times()) newest = std::max(newest, time);
  const absl::Time now = absl::Now();
  std::vector<Restored> restored;
  for (auto& [ordinal, request] : read->requests()) {
    const bool ended = request.end.has_value();
    if (ended && (newest - read->end_times().at(ordinal) > options_.keep_ended ||
                  read->model_digest() != model_digest)) {
      continue;
    }
    if (read->model_digest() != model_digest) {
      return absl::FailedPreconditionError(
          absl::StrCat("the journal ", storage_->PathOf(SegmentName(segment_)),
                       " has requests of a model with digest ",
                       absl::Hex(read->model_digest(), absl::kZeroPad16), ", this one's is ",
                       absl::Hex(model_digest, absl::kZeroPad16),
                       ": serve that model, or give another --request-journal"));
    }
    Kept& kept = kept_[ordinal];
    kept.request_id = request.spec.request_id;
    by_id_[kept.request_id] = ordinal;
    if (ended) {
      ended_.emplace_back(now, ordinal);
    } else {
      GenerationSpec name_only;
      name_only.request_id = kept.request_id;
      kept.sink = std::make_shared<Sink>(this, name_only);
      kept.sink->ordinal = ordinal;
    }
    std::shared_ptr<GenerationSink> sink = kept.sink;
    restored.push_back({std::move(request), std::move(sink)});
  }
  RETURN_IF_ERROR(Rewrite());
  thread_ = std::thread([this]() { Run(); });
  return restored;
}

std::shared_ptr<GenerationSink> Journal::Wrap(const GenerationSpec& spec,
                                              std::shared_ptr<GenerationSink> log) {
  auto sink = std::make_shared<Sink>(this, spec);
  sink->log = std::move(log);
  return sink;
}

std::shared_ptr<GenerationSink> Journal::WrapRestored(const Restored& restored,
                                                      std::shared_ptr<GenerationSink> log) {
  CHECK(restored.sink != nullptr) << restored.request.spec.request_id << " has ended";
  static_cast<Sink*>(restored.sink.get())->log = std::move(log);
  return restored.sink;
}

absl::Status Journal::Writable() const {
  std::lock_guard<std::mutex> lock(mu_);
  return writable_;
}

Journal::Stats Journal::stats() const {
  std::lock_guard<std::mutex> lock(mu_);
  return stats_;
}

void Journal::Stop() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Journal::Push(Item item) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (item.sink->cut) return;
    queue_.push_back(std::move(item));
    if (queue_.size() > 1) return;
  }
  wake_.notify_one();
}

// ---- the thread ----

absl::Duration Journal::LongestWait(absl::Time now) const {
  return unsynced_ && options_.sync == JournalSync::k50ms
             ? std::max(absl::Milliseconds(1), last_sync_ + kSyncPeriod - now)
             : kIdleWait;
}

void Journal::Run() {
  for (;;) {
    std::vector<Item> batch;
    bool stop;
    {
      std::unique_lock<std::mutex> lock(mu_);
      if (carried_.empty()) {
        wake_.wait_for(lock, absl::ToChronoNanoseconds(LongestWait(absl::Now())),
                       [this]() { return stop_ || !queue_.empty(); });
      }
      batch.swap(queue_);
      stop = stop_;
    }
    if (!batch.empty() || !carried_.empty()) {
      std::vector<uint64_t> fresh;
      const std::string bytes = carried_ + Encode(batch, &fresh);
      if (bytes.empty() || Write(bytes)) {
        carried_.clear();
        Publish(&batch);
      } else {
        GiveUp(batch, fresh);
      }
    }
    const absl::Time now = absl::Now();
    MaybeSync(now);
    CountDead(now);
    MaybeRewrite();
    std::lock_guard<std::mutex> lock(mu_);
    stats_.bytes = size_;
    stats_.dead_bytes = dead_bytes_;
    if (stop && queue_.empty()) break;
  }
  if (options_.sync != JournalSync::kOff && unsynced_) file_->Sync().IgnoreError();
}

std::string Journal::Encode(const std::vector<Item>& batch, std::vector<uint64_t>* fresh) {
  std::string bytes;
  Record tokens;  // of all requests together, as far as nothing else comes between
  const auto flush = [&tokens, &bytes]() {
    if (tokens.tokens().tokens().empty()) return;
    AppendFrame(tokens, &bytes);
    tokens.Clear();
  };
  for (const Item& item : batch) {
    if (const auto* token = absl::get_if<journal::v1::Token>(&item.what)) {
      journal::v1::Token* record = tokens.mutable_tokens()->add_tokens();
      *record = *token;
      record->set_ordinal(item.sink->ordinal);
      kept_.at(item.sink->ordinal).bytes += static_cast<int64_t>(record->ByteSizeLong());
    } else if (const auto* event = absl::get_if<GenerateEvent>(&item.what)) {
      if (event->has_delta()) continue;
      flush();
      EncodeEvent(item.sink, *event, &bytes, fresh);
    } else {
      flush();
      const absl::Status& status = absl::get<absl::Status>(item.what);
      if (item.sink->ordinal == 0 || ServerEnded(status)) continue;
      Record record;
      *record.mutable_end() = ToEnd(item.sink->ordinal, status, absl::Now());
      kept_.at(item.sink->ordinal).bytes += AppendFrame(record, &bytes);
    }
  }
  flush();
  return bytes;
}

void Journal::EncodeEvent(const std::shared_ptr<Sink>& sink, const GenerateEvent& event,
                          std::string* bytes, std::vector<uint64_t>* fresh) {
  Record record;
  if (event.has_accepted() && sink->ordinal == 0) {
    sink->ordinal = next_ordinal_++;
    fresh->push_back(sink->ordinal);
    *record.mutable_accept() =
        ToAccept(sink->ordinal, sink->spec, event.accepted(), sink->submitted);
    Kept& kept = kept_[sink->ordinal];
    kept.sink = sink;
    kept.request_id = sink->request_id;
    kept.bytes = AppendFrame(record, bytes);
    // The request that had the id before is over, whatever the journal says of it.
    const auto [place, first] = by_id_.emplace(kept.request_id, sink->ordinal);
    if (!first) {
      Bury(place->second);
      by_id_[kept.request_id] = sink->ordinal;
    }
  } else if (event.has_finished()) {
    record.mutable_output_end()->set_ordinal(sink->ordinal);
    record.mutable_output_end()->set_output(event.output_index());
    *record.mutable_output_end()->mutable_finished() = event.finished();
    kept_.at(sink->ordinal).bytes += AppendFrame(record, bytes);
  }
}

absl::Status Journal::TryWrite(const std::string& bytes) {
  if (suspect_) RETURN_IF_ERROR(Rewrite());
  if (torn_) {
    RETURN_IF_ERROR(file_->Truncate(size_));
    torn_ = false;
  }
  torn_ = true;
  RETURN_IF_ERROR(file_->Append(bytes));
  if (options_.sync == JournalSync::kStep) {
    // What a failed sync leaves behind is not known: the file is not used again.
    suspect_ = true;
    RETURN_IF_ERROR(file_->Sync());
    suspect_ = false;
    std::lock_guard<std::mutex> lock(mu_);
    ++stats_.syncs;
  }
  torn_ = false;
  size_ += static_cast<int64_t>(bytes.size());
  unsynced_ = options_.sync != JournalSync::kStep;
  return absl::OkStatus();
}

bool Journal::Write(const std::string& bytes) {
  const absl::Time started = absl::Now();
  for (;;) {
    const absl::Status status = TryWrite(bytes);
    SetWritable(status);
    if (status.ok()) return true;
    if (absl::Now() - started >= options_.hold) return false;
    std::unique_lock<std::mutex> lock(mu_);
    const auto stopped = [this]() { return stop_; };
    if (wake_.wait_for(lock, absl::ToChronoNanoseconds(options_.retry_period), stopped)) {
      return false;
    }
  }
}

void Journal::SetWritable(const absl::Status& cause) {
  std::lock_guard<std::mutex> lock(mu_);
  ++(cause.ok() ? stats_.writes : stats_.write_errors);
  if (writable_.ok() == cause.ok()) return;
  writable_ = cause.ok() ? absl::OkStatus() : Unwritable(cause.message());
  if (cause.ok()) {
    LogInfo("journal: it can be written again");
  } else {
    LogError("journal: ", cause.ToString(),
             "; new requests are refused, and running ones wait for ",
             absl::FormatDuration(options_.hold));
  }
}

void Journal::Publish(std::vector<Item>* batch) {
  for (Item& item : *batch) {
    if (auto* event = absl::get_if<GenerateEvent>(&item.what)) {
      if (event->has_accepted()) item.sink->spec = GenerationSpec();
      item.sink->log->OnEvent(std::move(*event));
    } else if (const auto* status = absl::get_if<absl::Status>(&item.what)) {
      const auto kept = kept_.find(item.sink->ordinal);
      if (kept != kept_.end()) {
        kept->second.sink.reset();
        // The next coordinator goes on with it.
        if (!ServerEnded(*status)) ended_.emplace_back(absl::Now(), kept->first);
      }
      item.sink->log->OnDone(*status);
    }
  }
}

void Journal::GiveUp(const std::vector<Item>& batch, const std::vector<uint64_t>& fresh) {
  const absl::Status status = Writable();
  std::set<std::shared_ptr<Sink>> sinks;
  for (const uint64_t ordinal : fresh) {
    by_id_.erase(kept_.at(ordinal).request_id);
    kept_.erase(ordinal);
  }
  for (auto& [ordinal, kept] : kept_) {
    if (kept.sink == nullptr) continue;
    sinks.insert(std::move(kept.sink));
    Record record;
    *record.mutable_end() = ToEnd(ordinal, status, absl::Now());
    kept.bytes += AppendFrame(record, &carried_);
    ended_.emplace_back(absl::Now(), ordinal);
  }
  for (const Item& item : batch) sinks.insert(item.sink);
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const Item& item : queue_) sinks.insert(item.sink);
    queue_.clear();
    for (const auto& sink : sinks) sink->cut = true;
  }
  if (!sinks.empty()) LogError("journal: ", sinks.size(), " requests end with JOURNAL_UNWRITABLE");
  for (const auto& sink : sinks) {
    sink->log->OnDone(status);
    lose_(sink->request_id, status);
  }
  if (carried_.empty()) {
    // Shows when it can be written again.
    Record nothing;
    nothing.mutable_tokens();
    AppendFrame(nothing, &carried_);
  }
}

void Journal::MaybeSync(absl::Time now) {
  if (!unsynced_ || options_.sync != JournalSync::k50ms || now - last_sync_ < kSyncPeriod) return;
  last_sync_ = now;
  unsynced_ = false;
  const absl::Status status = file_->Sync();
  if (status.ok()) {
    std::lock_guard<std::mutex> lock(mu_);
    ++stats_.syncs;
    return;
  }
  SetWritable(status);
  suspect_ = true;
  Record nothing;
  nothing.mutable_tokens();
  AppendFrame(nothing, &carried_);
}

// ---- what is over ----

void Journal::Bury(uint64_t ordinal) {
  const auto kept = kept_.find(ordinal);
  if (kept == kept_.end()) return;
  dead_bytes_ += kept->second.bytes;
  const auto latest = by_id_.find(kept->second.request_id);
  if (latest != by_id_.end() && latest->second == ordinal) by_id_.erase(latest);
  kept_.erase(kept);
}

void Journal::CountDead(absl::Time now) {
  while (!ended_.empty() && now - ended_.front().first >= options_.keep_ended) {
    Bury(ended_.front().second);
    ended_.pop_front();
  }
}

void Journal::MaybeRewrite() {
  if (dead_bytes_ <= rewrite_above_ || dead_bytes_ <= size_ - dead_bytes_ || torn_ || suspect_) {
    return;
  }
  const absl::Status status = Rewrite();
  if (status.ok()) return;
  // The segment that there is goes on.
  rewrite_above_ = 2 * dead_bytes_;
  {
    std::lock_guard<std::mutex> lock(mu_);
    ++stats_.failed_rewrites;
  }
  LogWarning("journal: what is over could not be dropped: ", status.ToString());
}

absl::StatusOr<std::string> Journal::LivingRecords(std::map<uint64_t, int64_t>* sizes) {
  std::string bytes = kSegmentMagic;
  Record header;
  header.mutable_header()->set_model_digest(model_digest_);
  header.mutable_header()->set_next_ordinal(next_ordinal_);
  AppendFrame(header, &bytes);
  if (segment_ > 0) {
    const std::string name = SegmentName(segment_);
    ASSIGN_OR_RETURN(const std::string old, storage_->Read(name));
    const auto copy = [this, &bytes, sizes](const Record& record, int64_t /*frame_bytes*/) {
      if (record.has_header()) return absl::OkStatus();
      if (!record.has_tokens()) {
        const uint64_t ordinal = OrdinalOf(record);
        if (kept_.count(ordinal) > 0) (*sizes)[ordinal] += AppendFrame(record, &bytes);
        return absl::OkStatus();
      }
      Record tokens;
      for (const journal::v1::Token& token : record.tokens().tokens()) {
        if (kept_.count(token.ordinal()) == 0) continue;
        *tokens.mutable_tokens()->add_tokens() = token;
        (*sizes)[token.ordinal()] += static_cast<int64_t>(token.ByteSizeLong());
      }
      if (tokens.has_tokens()) AppendFrame(tokens, &bytes);
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(ScanSegment(absl::string_view(old).substr(0, static_cast<size_t>(size_)),
                                storage_->PathOf(name), copy)
                        .status());
  }
  return bytes;
}

absl::Status Journal::Replace(const std::string& bytes) {
  ASSIGN_OR_RETURN(std::unique_ptr<JournalFile> file, storage_->Create(kFreshName));
  RETURN_IF_ERROR(file->Append(bytes));
  if (options_.sync != JournalSync::kOff) RETURN_IF_ERROR(file->Sync());
  RETURN_IF_ERROR(storage_->Rename(kFreshName, SegmentName(segment_ + 1)));
  file_ = std::move(file);
  ++segment_;
  return absl::OkStatus();
}

absl::Status Journal::Rewrite() {
  std::map<uint64_t, int64_t> sizes;
  ASSIGN_OR_RETURN(const std::string bytes, LivingRecords(&sizes));
  const absl::Status replaced = Replace(bytes);
  if (!replaced.ok()) {
    // It may take the room that records need.
    storage_->Remove(kFreshName).IgnoreError();
    // It may have got its name all the same; then it must go before anything is added to the old
    // one, or nothing may be.
    const absl::Status removed = storage_->Remove(SegmentName(segment_ + 1));
    suspect_ = suspect_ || !(removed.ok() || absl::IsNotFound(removed));
    return replaced;
  }
  size_ = static_cast<int64_t>(bytes.size());
  torn_ = suspect_ = unsynced_ = false;
  for (const auto& [ordinal, kept_bytes] : sizes) kept_.at(ordinal).bytes = kept_bytes;
  dead_bytes_ = 0;
  rewrite_above_ = options_.max_dead_bytes;
  // The new segment has everything: the old ones are only in the way.
  const auto names = storage_->List();
  if (names.ok()) {
    for (const std::string& name : *names) {
      const uint64_t number = SegmentNumber(name);
      if (number > 0 && number < segment_) storage_->Remove(name).IgnoreError();
    }
  }
  std::lock_guard<std::mutex> lock(mu_);
  ++stats_.rewrites;
  return absl::OkStatus();
}

}  // namespace lockstep
