// SequenceState: the truth of one output of a request: its token log and the digests of the logged
// positions. Everything that a device holds of a sequence can be rebuilt from it; where the
// sequence is now on the devices (slot, blocks, progress) stands beside it and is dropped by a
// preemption. Not thread safe; belongs to the engine's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "coordinator/output_stream.h"
#include "proto/step.pb.h"

namespace lockstep {

class Tokenizer;
struct SequenceState;

// A request and its outputs.
struct RequestState {
  int64_t arrival = 0;  // order of submission
  GenerationSpec spec;
  std::shared_ptr<GenerationSink> sink;  // released after OnDone
  absl::Time submitted;
  std::vector<uint64_t> chain;  // names of the prompt's prefixes; empty when the cache is not used
  std::vector<std::unique_ptr<SequenceState>> outputs;
  bool scheduled = false;  // some output has been in a step
  bool ended = false;      // OnDone was called
  int32_t outputs_finished = 0;
  // Was in a step that a fault kept from reporting: runs alone until it has got its next tokens.
  bool isolated = false;
  // Since its last token: faults while it ran alone, weighed (engine_recovery.cc), and workers that
  // were killed from outside while it was in a step.
  int32_t guilt = 0;
  int32_t kills = 0;

  int64_t prompt_length() const { return static_cast<int64_t>(spec.prompt_ids.size()); }
  // When it is to be ended as it stands now.
  absl::Time next_deadline() const {
    return scheduled ? spec.deadline : std::min(spec.deadline, spec.queue_deadline);
  }
  // The last grid position that a prefix-cache hit may end at.
  int64_t last_grid_position() const;
};

enum class SequencePhase {
  kWaiting,  // queued, or preempted: nothing on the devices
  kRunning,  // has a slot
  kDone,     // ended; keeps slot and blocks until the last step that names them has reported
};

struct SequenceState {
  SequenceState(RequestState* owner, int32_t index, const Tokenizer* tokenizer);

  RequestState* request;
  int32_t output_index;

  // ---- the log ----
  std::vector<int32_t> output_ids;
  std::vector<uint64_t> digests;  // of the logits that each id was sampled from

  // ---- on the devices ----
  SequencePhase phase = SequencePhase::kWaiting;
  int64_t position = 0;         // rows [0, position) are in issued steps (or came from the cache)
  int64_t planned_outputs = 0;  // ids that issued steps sample, logged ones included
  uint64_t last_step = 0;       // the last issued step that names it
  int32_t steps_in_flight = 0;
  int64_t computed = 0;     // rows that were run at least once: below it a replay
  bool progressed = false;  // has sampled since it was admitted
  bool suspect = false;     // gave a NaN: its blocks and snapshots are not reused
  bool begun = false;       // the first entry of this generation of the slot was issued
  int32_t slot = -1;
  uint64_t generation = 0;
  std::vector<int32_t> blocks;
  int32_t restore_snapshot = -1;  // to start from; pinned until its first step reports

  // ---- what was shown ----
  OutputStream stream;
  uint64_t event_sequence = 0;
  int64_t shown_tokens = 0;
  bool prefilled = false;  // has sampled at least once
  bool admitted = false;   // at least once
  int64_t cached_tokens = 0;
  int32_t preemptions = 0;
  int32_t recoveries = 0;
  absl::Time first_scheduled;
  absl::Time first_token;
  absl::Time last_token;

  // Rows [position, end) can run: their tokens are known, or sampled by last_step.
  int64_t end() const { return request->prompt_length() + planned_outputs; }
  bool fully_planned() const { return planned_outputs >= request->spec.max_tokens; }
  // Token at a position below the prompt's length plus the log's.
  int32_t token(int64_t at) const;
  int64_t logged_length() const {
    return request->prompt_length() + static_cast<int64_t>(output_ids.size());
  }
  // Fold over the digests of the log.
  uint64_t determinism_digest() const;

  // What the first entry of a generation tells the workers.
  worker::v1::NewSequence MakeBegin() const;

  // ---- events; each is given the next sequence number ----
  inference::v1::GenerateEvent AcceptedEvent(uint64_t epoch);
  // The prompt's text first.
  inference::v1::GenerateEvent EchoEvent();
  // Of the token logged last. Has no delta when there is nothing to show (and takes no number).
  inference::v1::GenerateEvent DeltaEvent(const OutputStream::Step& step,
                                          const worker::v1::SequenceResult& result);
  inference::v1::GenerateEvent FinishedEvent(const OutputStream::Step& step, absl::Time now);

 private:
  inference::v1::GenerateEvent NextEvent();
};

// Order of age: priority (higher first), arrival, output.
struct OlderSequence {
  bool operator()(const SequenceState* a, const SequenceState* b) const;
};

}  // namespace lockstep
