// Engine: the step loop. Owns every decision and the truth of every sequence; the workers own
// bytes. One thread (Run) does all the work; the other methods are thread safe and only post to it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/engine_observer.h"
#include "coordinator/generation.h"
#include "coordinator/step_transport.h"

namespace lockstep {

class Tokenizer;

// A request that has not ended, for operators: no prompt, no text.
struct RequestInfo {
  std::string request_id;
  bool scheduled = false;  // else it waits for its first step
  absl::Duration age;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;     // of output 0
  int64_t generated_tokens = 0;  // of all outputs
  int32_t outputs = 1;
  int32_t priority = 0;
  int32_t preemptions = 0;  // of all outputs
  absl::Time deadline = absl::InfiniteFuture();
};

// Limits and policies; filled from flags.
struct EngineOptions {
  int64_t max_context = 0;         // prompt plus output, as enforced
  int64_t kv_blocks = 0;           // of kGrid positions
  int64_t slots = 16;              // sequences with state on the device: the largest batch
  int64_t snapshots = 64;          // of recurrent state, for the prefix cache; 0: no prefix cache
  int64_t max_batch_tokens = 512;  // token budget of a step
  // Rows of a step that give logits, as the workers were configured; `slots` when it is less. A
  // replay asks for the logits of every generated position, so more makes it faster.
  int64_t max_logit_rows = 0;
  int64_t snapshot_interval = 1024;  // a multiple of 64
  int64_t max_queued_requests = 1024;
  int64_t max_queued_tokens = 1 << 22;
  int32_t steps_in_flight = 2;  // 1 or 2
  bool prefix_cache = true;
  std::string model_name;              // told to clients in Accepted
  std::string server_version;          // likewise
  EngineObserver* observer = nullptr;  // outlives the engine; nullptr: nobody
  // Injected by tests: tokens of the next chunk of a prompt, given (position, remaining, budget);
  // any value in [1, min(remaining, budget)]. Empty: as many as the budget allows.
  std::function<int64_t(int64_t position, int64_t remaining, int64_t budget)> chunk_policy;
  // Injected by tests: also preempt the youngest sequence that has sampled since it was admitted,
  // every this many steps (even the only one); 0: only when blocks run out.
  int64_t preempt_every = 0;
  // Injected by tests: what deadlines and timings are measured with. Empty: absl::Now.
  std::function<absl::Time()> clock;
};

struct EngineStats {
  int64_t requests_running = 0, requests_queued = 0;
  int64_t kv_blocks_total = 0, kv_blocks_free = 0, kv_blocks_cached = 0, kv_blocks_active = 0;
  // Of the active ones: held, but by no sequence. Not 0 is a leak.
  int64_t kv_blocks_pinned_without_owner = 0;
  int64_t slots_total = 0, slots_free = 0;
  int64_t snapshots_total = 0, snapshots_used = 0;
  // "steps", "step_micros_total" (rank 0, of steps that have answered), "tokens_generated",
  // "tokens_prefilled", "tokens_cached", "tokens_replayed", "preemptions", "requests_started",
  // "requests_finished", "requests_failed", "requests_cancelled", "digest_mismatches",
  // "nan_logits", "tokens_discarded", "digests_checked". At every moment requests_started =
  // finished + failed + cancelled + running + queued.
  std::map<std::string, int64_t> counters;
};

class Engine {
 public:
  enum class CancelOutcome { kCancelled, kAlreadyFinished, kNotFound };

  // `tokenizer` may be nullptr (token ids only). `transport` outlives the engine.
  Engine(const EngineOptions& options, StepTransport* transport, const Tokenizer* tokenizer);
  ~Engine();

  // Starts the thread. The transport must be ready to take steps of `term` and `epoch`.
  void Start(uint64_t term, uint64_t epoch);
  // For simulations, in place of Start: no thread is started, and the caller runs one turn after
  // the other, each of which waits in the transport at most once.
  void StartWithoutThread(uint64_t term, uint64_t epoch);
  void RunOnce();

  // Before Start: takes a request that a journal kept and that has not ended. Events that were
  // shown before go to `shown`, before it returns. A request that this engine cannot hold ends at
  // once: FAILED_PRECONDITION KV_CAPACITY_IMPOSSIBLE.
  void Restore(const RestoredRequest& restored, GenerationSink* shown,
               std::shared_ptr<GenerationSink> sink);

  // Queues a request. Errors (details as in errors.h): ALREADY_EXISTS REQUEST_ID_REUSED (the id of
  // a request that runs or has completed; a failed or cancelled one frees its id),
  // INVALID_ARGUMENT KV_CAPACITY_IMPOSSIBLE, RESOURCE_EXHAUSTED QUEUE_FULL or
  // DEADLINE_UNMEETABLE, UNAVAILABLE DRAINING or ENGINE_FAILED. After OK the sink gets Accepted
  // first. The sink is released after OnDone.
  absl::Status Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink);

  // Ends a request with `status`. Idempotent. A finished request is remembered for a while.
  CancelOutcome Cancel(const std::string& request_id, const absl::Status& status);

  // Refuses new requests; running ones go on. Undo with Undrain.
  void Drain();
  void Undrain();
  bool draining() const;
  // True when nothing is queued or running and no step is in flight.
  bool idle() const;

  // OK while steps can run, else why not (the transport failed, say). Never waits for the step
  // loop.
  absl::Status Ready() const;

  // Not OK once no step will ever run again: why.
  absl::Status Failure() const;

  EngineStats stats() const;

  // When the step loop came round last: later than a few seconds ago unless it hangs. InfinitePast
  // before Start.
  absl::Time LastTick() const;

  // Questions to the engine's thread, asked between two steps; oldest request first. UNAVAILABLE
  // ENGINE_BUSY when it does not come round in time.
  absl::StatusOr<std::vector<RequestInfo>> ListRequests();
  // Forgets every cached prefix; what sequences hold stays theirs. The number of idle blocks that
  // became free.
  absl::StatusOr<int64_t> ResetPrefixCache();

  // Ends everything that runs with `status` and joins the thread.
  void Stop(const absl::Status& status);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
