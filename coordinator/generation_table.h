// GenerationTable: which requests can be read, by whom, and for how long.
//
// An id names one answer: while its request runs, and after it has completed, the same body joins
// its log and another body is refused (REQUEST_ID_REUSED); a request that failed or was cancelled
// frees its id for a new answer with a log of its own. Ended requests stay for attach_grace,
// bounded in number and bytes; longer than that only their ids are remembered.
//
// A request that nobody reads is cancelled: at once when its last reader goes away, or after
// attach_grace when it is detachable or came from a journal.
//
// Thread safe. A thread of its own calls Tick, unless a clock is injected.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "coordinator/generation_log.h"
#include "coordinator/serving_backend.h"

namespace lockstep {

struct GenerationTableOptions {
  // How long a request that ended, or that nobody reads though it may go on, is kept.
  absl::Duration attach_grace = absl::Seconds(30);
  // A write that makes no progress for so long, while more than kMaxWaiting events or
  // kMaxWaitingBytes wait behind it, ends its call.
  absl::Duration slow_consumer_timeout = absl::Seconds(30);
  int64_t max_ended = 1024;
  int64_t max_ended_bytes = int64_t{256} << 20;
  // Injected by tests, which then call Tick themselves. Empty: absl::Now.
  std::function<absl::Time()> clock;
};

// A call that reads.
class GenerationReader : public GenerationObserver {
 public:
  // Called now and then, without a lock of the table.
  virtual void OnTick(absl::Time now) = 0;
};

class GenerationTable {
 public:
  // `backend` outlives the table.
  GenerationTable(ServingBackend* backend, const GenerationTableOptions& options);
  ~GenerationTable();

  const GenerationTableOptions& options() const { return options_; }
  absl::Time Now() const;

  struct Joined {
    std::shared_ptr<GenerationLog> log;
    // The request of this id is being cancelled: `reader` was not added. Once the log has ended,
    // Submit starts a new one.
    bool ending = false;
  };
  // Submits the request, or joins the one that has its id. Errors: as ServingBackend::Submit.
  absl::StatusOr<Joined> Submit(const GenerationSpec& spec,
                                std::shared_ptr<GenerationReader> reader);

  // Adds a reader that has the events up to after[output]. Errors: NOT_FOUND REQUEST_NOT_FOUND,
  // OUT_OF_RANGE EVENT_LOG_TRUNCATED or SEQUENCE_NOT_REACHED, INVALID_ARGUMENT LIMIT_EXCEEDED (more
  // offsets than outputs).
  absl::StatusOr<std::shared_ptr<GenerationLog>> Attach(const std::string& request_id,
                                                        const std::vector<uint64_t>& after,
                                                        std::shared_ptr<GenerationReader> reader);

  // The reader reads no more. When it was the last one of a request that has not ended, the request
  // is cancelled with `status` or, where it may go on, after attach_grace. Idempotent.
  void Leave(const GenerationLog& log, const GenerationReader* reader, const absl::Status& status);

  // As ServingBackend::Cancel; from now on Submit does not join the request.
  CancelResult Cancel(const std::string& request_id, const absl::Status& status);

  // A request of a journal that goes on (or has ended); nobody reads it yet.
  void AddRestored(const GenerationSpec& spec, std::shared_ptr<GenerationLog> log);

  // Does what is due. Called by the table's thread.
  void Tick(absl::Time now);

  // A call was ended because its client did not read.
  void CountSlowConsumer();

  struct Stats {
    int64_t requests = 0;  // that can be attached to, ended ones included
    int64_t readers = 0;   // calls that read one of them
    int64_t bytes = 0;     // of their logs
    // Since the start:
    int64_t joins = 0;           // the same request came again
    int64_t attaches = 0;        // by AttachGeneration
    int64_t slow_consumers = 0;  // calls ended with SLOW_CONSUMER
    int64_t abandoned = 0;       // requests cancelled because nobody read them
  };
  Stats stats() const;

 private:
  struct Entry {
    std::shared_ptr<GenerationLog> log;
    uint64_t body_digest = 0;
    bool detachable = false;
    bool ending = false;  // a cancellation is under way
    std::vector<std::shared_ptr<GenerationReader>> readers;
    // Since when nobody reads it and it goes on all the same.
    absl::Time abandoned = absl::InfiniteFuture();
    // When it was found to have ended, and the memory that its log holds since.
    absl::Time ended = absl::InfiniteFuture();
    int64_t ended_bytes = 0;
  };

  // Notes ends; forgets what is too old or too much.
  void Sweep(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& request_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  ServingBackend* const backend_;
  const GenerationTableOptions options_;

  mutable absl::Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // Ids of ended requests whose logs are gone, the oldest first.
  std::deque<std::string> forgotten_order_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> forgotten_ ABSL_GUARDED_BY(mutex_);
  Stats totals_ ABSL_GUARDED_BY(mutex_);  // without what is counted when asked for
  int64_t submitted_since_sweep_ ABSL_GUARDED_BY(mutex_) = 0;

  std::thread thread_;
  std::mutex stop_mu_;
  std::condition_variable stop_changed_;
  bool stop_ = false;  // guarded by stop_mu_
};

}  // namespace lockstep
