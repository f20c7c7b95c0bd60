// The scheduler: from what is queued and running, and what is left of blocks, slots and budget, the
// next step. A pure function: no clock, no I/O, no state.
//
// 1. Sequences with one row to run (decoding) come first, then chunks of prompts fill the token
// budget,
//    then waiting sequences are admitted. Each of these in the order of age: priority, then
//    arrival.
// 2. Nothing is scheduled without blocks for every row it writes.
// 3. When blocks run out the youngest sequence without a step in flight is preempted, never the
// oldest.
//    When the youngest has a step in flight it is left out of this step, so that it can be
//    preempted in the next one.
// 4. A sequence is admitted only when blocks for all its known tokens are there, beyond those that
// the
//    prompts being prefilled still need; nobody behind it in the queue passes it. Nobody is
//    admitted in a step that preempts.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

struct SchedulerSequence {
  int64_t id = 0;
  int64_t position =
      0;            // of the first row to run; of a waiting one: where its prefix-cache hit ends
  int64_t end = 0;  // rows [position, end) can run; the last of them is sampled
  int64_t logits_from = 0;  // rows at or after this position give logits
  int64_t blocks = 0;       // in its table; of a waiting one: of its hit
  int64_t own_blocks = 0;   // of these: available again when it is preempted
  int64_t idle_blocks = 0;  // waiting: blocks of its hit that count as available now
  int32_t steps_in_flight = 0;
  bool progressed = false;  // has sampled since it was admitted
};

struct SchedulerInput {
  std::vector<SchedulerSequence> running;  // oldest first; those with nothing left to run have
                                           // position == end
  std::vector<SchedulerSequence> waiting;  // first to be admitted first
  int64_t available_blocks = 0;
  int64_t free_slots = 0;
  int64_t max_tokens = 0;      // budget of the step
  int64_t max_logit_rows = 0;  // of the step
  // As EngineOptions::chunk_policy.
  std::function<int64_t(int64_t position, int64_t remaining, int64_t budget)> chunk_policy;
  // Also preempt the youngest sequence that has progressed, the only one included.
  bool force_preemption = false;
};

struct ScheduledRows {
  int64_t id = 0;
  int64_t tokens = 0;
  int64_t num_logits = 0;
  bool sample = false;
};

struct Schedule {
  std::vector<int64_t> preempted;
  std::vector<int64_t> admitted;    // each has rows
  std::vector<ScheduledRows> rows;  // order of the batch
  bool forced = false;              // the forced preemption took place
};

Schedule ScheduleStep(const SchedulerInput& input);

}  // namespace lockstep
