// Journal: accepted requests on disk, so that a coordinator that dies loses none. A request is
// written when it is accepted, each token before any reader sees it, and the end.
//
// The engine's thread only hands over what it makes (through the sinks that Wrap gives) and never
// waits; one thread of the journal's own writes everything that has come together since its last
// write at once, and then passes the events on to the requests' logs. So what a log shows is
// written; whether it also is durable when the host dies, JournalSync says.
//
// When a write fails, new requests are to be refused (Writable) and events are held while the write
// is tried again; after `hold` the requests end with UNAVAILABLE JOURNAL_UNWRITABLE. When writes
// succeed again, so does everything else.
//
// A request that ended with UNAVAILABLE or ABORTED (the server stopped, or its workers could not be
// brought back) is not written as ended: the next coordinator on this journal goes on with it.
//
// Files: the lock, and one segment "N.journal" with all that is needed. It is written anew, without
// what is over, when the journal is opened and when that is more than max_dead_bytes and more than
// what is left.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/variant.h"
#include "coordinator/generation.h"
#include "coordinator/journal/convert.h"
#include "coordinator/journal/storage.h"
#include "proto/journal.pb.h"

namespace lockstep {

// When written records are made durable: before they are shown, within 50 ms, or as the system
// likes. The death of the process alone never loses what was written.
enum class JournalSync { kStep, k50ms, kOff };

struct JournalOptions {
  std::string directory;
  JournalSync sync = JournalSync::k50ms;
  // Ended requests stay for so long, so that they can still be read after a restart.
  absl::Duration keep_ended = absl::Seconds(30);
  int64_t max_dead_bytes = int64_t{64} << 20;
  absl::Duration hold = absl::Seconds(30);
  absl::Duration retry_period = absl::Milliseconds(100);
};

class Journal {
 public:
  // Locks the directory and reads it. FAILED_PRECONDITION when another process has it; DATA_LOSS
  // with file and offset when a record in its middle is broken.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const JournalOptions& options);
  // With storage given; for tests.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const JournalOptions& options,
                                                       std::unique_ptr<JournalStorage> storage);
  ~Journal();

  struct Restored {
    RestoredRequest request;
    std::shared_ptr<GenerationSink> sink;  // for WrapRestored; none when the request has ended
  };
  // Begins to write, for the model of this digest; `lose` is called, by the journal's thread, with
  // every request that is given up because nothing can be written. Gives the requests that were
  // read: those to go on with, and those that ended not long ago. FAILED_PRECONDITION when they are
  // of another model. Once.
  absl::StatusOr<std::vector<Restored>> Begin(
      uint64_t model_digest,
      std::function<void(const std::string& request_id, const absl::Status& status)> lose);

  // What the engine is given in place of `log`. Thread safe.
  std::shared_ptr<GenerationSink> Wrap(const GenerationSpec& spec,
                                       std::shared_ptr<GenerationSink> log);
  // The same for a request that was read and has not ended. Before the engine starts.
  static std::shared_ptr<GenerationSink> WrapRestored(const Restored& restored,
                                                      std::shared_ptr<GenerationSink> log);

  // UNAVAILABLE JOURNAL_UNWRITABLE while writes fail. Thread safe, never waits.
  absl::Status Writable() const;

  // Writes and passes on what was handed over, and ends the thread. Idempotent.
  void Stop();

  // Counters, for tests and metrics.
  struct Stats {
    int64_t bytes = 0;  // of the segment
    int64_t dead_bytes = 0;
    int64_t writes = 0;
    int64_t syncs = 0;
    int64_t rewrites = 0;
    int64_t failed_rewrites = 0;
    int64_t write_errors = 0;
  };
  Stats stats() const;

 private:
  class Sink;
  struct Item {
    std::shared_ptr<Sink> sink;
    // A token (without its ordinal), an event, or the end.
    absl::variant<journal::v1::Token, inference::v1::GenerateEvent, absl::Status> what;
  };
  // A request that the segment has.
  struct Kept {
    std::shared_ptr<Sink> sink;  // until its end
    std::string request_id;
    int64_t bytes = 0;
  };

  Journal(const JournalOptions& options, std::unique_ptr<JournalStorage> storage);
  absl::Status Read();
  void Push(Item item);

  // ---- the thread ----
  void Run();
  // Until when the thread may sleep, if nothing comes.
  absl::Duration LongestWait(absl::Time now) const;
  // The records of a batch. Requests that are new get their ordinals; `fresh` has these.
  std::string Encode(const std::vector<Item>& batch, std::vector<uint64_t>* fresh);
  void EncodeEvent(const std::shared_ptr<Sink>& sink, const inference::v1::GenerateEvent& event,
                   std::string* bytes, std::vector<uint64_t>* fresh);
  // Appends, and tries again for `hold`. False when it was given up.
  bool Write(const std::string& bytes);
  absl::Status TryWrite(const std::string& bytes);
  void Publish(std::vector<Item>* batch);
  // Ends every request with JOURNAL_UNWRITABLE; what is left to be written are these ends.
  void GiveUp(const std::vector<Item>& batch, const std::vector<uint64_t>& fresh);
  void SetWritable(const absl::Status& cause);
  void MaybeSync(absl::Time now);
  // Requests that ended long ago are dead.
  void CountDead(absl::Time now);
  void Bury(uint64_t ordinal);
  void MaybeRewrite();
  // A new segment without the requests that are not in kept_.
  absl::Status Rewrite();
  // The bytes of such a segment; sizes[ordinal] of each request in it.
  absl::StatusOr<std::string> LivingRecords(std::map<uint64_t, int64_t>* sizes);
  // Makes it the segment that is written.
  absl::Status Replace(const std::string& bytes);

  const JournalOptions options_;
  const std::unique_ptr<JournalStorage> storage_;
  std::function<void(const std::string&, const absl::Status&)> lose_;
  std::unique_ptr<RequestCollector> read_;  // between Open and Begin
  uint64_t model_digest_ = 0;

  // Of the thread, and of Begin before it starts.
  uint64_t segment_ = 0;  // the number of the last segment; 0: none
  std::unique_ptr<JournalFile> file_;
  int64_t size_ = 0;       // of its whole records
  bool torn_ = false;      // the file may have more than size_
  bool suspect_ = false;   // a sync failed: only a new segment can be trusted
  bool unsynced_ = false;  // something is written and not durable
  absl::Time last_sync_ = absl::InfinitePast();
  std::map<uint64_t, Kept> kept_;
  std::map<std::string, uint64_t> by_id_;              // the last request of an id in kept_
  std::deque<std::pair<absl::Time, uint64_t>> ended_;  // of kept_, in order
  int64_t dead_bytes_ = 0;
  int64_t rewrite_above_ = 0;  // dead bytes; grows when a rewrite fails
  uint64_t next_ordinal_ = 1;
  std::string carried_;  // records that are to be written with the next batch
  std::thread thread_;

  mutable std::mutex mu_;
  std::condition_variable wake_;
  // Guarded by mu_:
  std::vector<Item> queue_;
  absl::Status writable_;
  Stats stats_;
  bool stop_ = false;
};

}  // namespace lockstep
