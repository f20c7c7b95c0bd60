// GenerationLog: what one request has answered so far. The engine (or whatever stands between it
// and the log) appends; any number of readers follow, each at its own pace. The events of an output
// are numbered 1, 2, 3, ...: Accepted, the echo if asked for, deltas, Finished.
//
// Compact: per event 16 bytes beside its token ids and text; log-probabilities only when there are
// any. It grows with the answer alone, which max_tokens bounds, and never with a reader that is
// slow.
//
// Thread safe. Appending never waits for a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "coordinator/generation.h"
#include "proto/inference.pb.h"

namespace lockstep {

// Told when there is something new. Called by the appending thread, without a lock of the log; must
// not block.
class GenerationObserver {
 public:
  virtual ~GenerationObserver() = default;
  virtual void OnNews() = 0;
};

class GenerationLog final : public GenerationSink {
 public:
  GenerationLog(std::string request_id, int32_t outputs);

  // GenerationSink. CHECKs that an event is the next of its output.
  void OnEvent(inference::v1::GenerateEvent event) override;
  void OnDone(const absl::Status& status) override;

  const std::string& request_id() const { return request_id_; }
  int32_t num_outputs() const { return num_outputs_; }
  // How the request ended; nothing while it runs.
  absl::optional<absl::Status> end() const;
  // The number of the last event of each output.
  std::vector<uint64_t> last_sequence() const;
  // Memory that it holds, about.
  int64_t bytes() const;

  struct Usage {
    int64_t prompt_tokens = 0;
    int64_t completion_tokens = 0;  // ids in the events up to `last`
  };
  // Of a reader that has the events up to last[output].
  Usage UsageAt(const std::vector<uint64_t>& last) const;

  // True when the request has ended; else `observer` is told once, when it does.
  bool WaitForEnd(std::weak_ptr<GenerationObserver> observer);

  // A place in the log. Not thread safe itself.
  class Reader {
   public:
    // More unread events than this, and consecutive deltas of an output are given as one, of at
    // most kMergedTokens ids and kMergedBytes of text (and one event's more).
    static constexpr int64_t kMaxBehind = 256;
    static constexpr int64_t kMergedTokens = 4096;
    static constexpr int64_t kMergedBytes = 64 << 10;

    // Begins after event after[output] of each output (missing: 0), none of them beyond
    // last_sequence(). `observer` is told of news after each Next that gave kNothing.
    Reader(std::shared_ptr<GenerationLog> log, std::vector<uint64_t> after,
           std::weak_ptr<GenerationObserver> observer);
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    enum class Outcome {
      kEvent,    // *event is the next one; outputs take turns
      kNothing,  // all is read, and more will come
      kEnd,      // all is read; *end is how the request ended
    };
    Outcome Next(inference::v1::GenerateEvent* event, absl::Status* end);

    // The last event read, of each output.
    const std::vector<uint64_t>& last() const { return last_; }
    struct Backlog {
      int64_t events = 0;
      int64_t bytes = 0;  // of text and ids
    };
    // What waits to be read.
    Backlog backlog() const;

   private:
    const std::shared_ptr<GenerationLog> log_;
    const std::weak_ptr<GenerationObserver> observer_;
    std::vector<uint64_t> last_;
    size_t turn_ = 0;
  };

 private:
  // Ends of an event's parts in the arrays of its output.
  struct EventEnds {
    uint32_t ids = 0;
    uint32_t raw = 0;
    uint32_t text = 0;
    uint32_t token_offset = 0;  // as the event says
  };
  struct Output {
    std::vector<EventEnds> events;
    std::vector<int32_t> ids;
    std::string raw;
    // Empty as long as all text equals the raw bytes.
    std::string text;
    bool text_differs = false;
    // Of each token: its own, then the best; and per event where its entries end. Empty when none
    // were asked for.
    std::vector<inference::v1::TokenLogprobs> logprobs;
    std::vector<uint32_t> logprob_ends;
    std::unique_ptr<inference::v1::Finished> finished;

    uint64_t last_sequence() const { return events.size(); }
    bool IsDelta(uint64_t sequence) const {
      return sequence > 1 && !(finished != nullptr && sequence == events.size());
    }
    EventEnds EndsAt(uint64_t sequence) const {
      return sequence == 0 ? EventEnds() : events[sequence - 1];
    }
    uint32_t LogprobsAt(uint64_t sequence) const;
    void AppendDelta(const inference::v1::Delta& delta, EventEnds* ends);
    int64_t bytes() const;
  };
  struct Waiter {
    const Reader* reader;
    std::weak_ptr<GenerationObserver> observer;
  };

  // Event `first` of an output, or deltas [first, last] as one.
  inference::v1::GenerateEvent MakeEvent(size_t output, uint64_t first, uint64_t last) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The last delta that may be given together with `first`.
  uint64_t MergeEnd(const Output& output, uint64_t first) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Unread(const std::vector<uint64_t>& last) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string request_id_;
  const int32_t num_outputs_;

  mutable absl::Mutex mutex_;
  std::vector<Output> outputs_ ABSL_GUARDED_BY(mutex_);
  // Every output of a request says the same.
  std::unique_ptr<inference::v1::Accepted> accepted_ ABSL_GUARDED_BY(mutex_);
  absl::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::vector<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<GenerationObserver>> end_waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lockstep
