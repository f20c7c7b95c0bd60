#include "coordinator/scheduler.h"

#include <algorithm>

#include "coordinator/prefix_cache.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

class StepScheduler {
 public:
  explicit StepScheduler(const SchedulerInput& input)
      : input_(input),
        available_(input.available_blocks),
        tokens_left_(input.max_tokens),
        logits_left_(input.max_logit_rows),
        running_(input.running.size()) {
    for (size_t i = 0; i < running_.size(); ++i) {
      running_[i].outstanding = OutstandingBlocks(input.running[i]);
    }
  }

  Schedule Run() {
    if (input_.force_preemption) ForcePreemption();
    for (size_t i = 0; i < running_.size(); ++i) {
      if (Remaining(i) == 1) ScheduleRunning(i);
    }
    for (size_t i = 0; i < running_.size(); ++i) {
      if (Remaining(i) > 1) ScheduleRunning(i);
    }
    Admit();
    return std::move(schedule_);
  }

 private:
  struct Running {
    bool preempted = false;
    bool held = false;  // left out of this step
    bool scheduled = false;
    int64_t outstanding = 0;  // blocks that its known rows still need
  };

  int64_t Remaining(size_t i) const {
    const SchedulerSequence& s = input_.running[i];
    return s.end - s.position;
  }
  bool Idle(size_t i) const {
    return input_.running[i].steps_in_flight == 0 && !running_[i].scheduled &&
           !running_[i].preempted;
  }

  void Preempt(size_t i) {
    running_[i].preempted = true;
    running_[i].outstanding = 0;
    available_ += input_.running[i].own_blocks;
    schedule_.preempted.push_back(input_.running[i].id);
  }

  void ForcePreemption() {
    for (size_t i = running_.size(); i-- > 0;) {
      if (!input_.running[i].progressed) continue;
      if (Idle(i)) {
        Preempt(i);
        schedule_.forced = true;
      } else {
        running_[i].held = true;
      }
      return;
    }
  }

  // Blocks that the known rows of sequences older than `i` still need.
  int64_t ReservedBefore(size_t i) const {
    int64_t reserved = 0;
    for (size_t j = 0; j < i; ++j) reserved += running_[j].outstanding;
    return reserved;
  }
  static int64_t OutstandingBlocks(const SchedulerSequence& s) {
    return std::max<int64_t>(0, BlocksFor(s.end) - s.blocks);
  }

  // Preempts sequences younger than `i`, or makes one idle for the next step. False when there is
  // nobody left to preempt now.
  bool MakeRoom(size_t i) {
    for (size_t j = running_.size(); j-- > i + 1;) {
      if (Idle(j)) {
        Preempt(j);
        return true;
      }
    }
    for (size_t j = running_.size(); j-- > i + 1;) {
      if (running_[j].preempted || running_[j].scheduled) continue;
      running_[j].held = true;
      return false;
    }
    if (i + 1 == running_.size() && i > 0 && Idle(i)) Preempt(i);
    return false;
  }

  void ScheduleRunning(size_t i) {
    const SchedulerSequence& s = input_.running[i];
    if (running_[i].preempted || running_[i].held) return;
    int64_t tokens = WantedRows(s);
    if (tokens == 0) return;
    const int64_t wanted_blocks = BlocksFor(s.position + tokens) - s.blocks;
    while (wanted_blocks > 0 && wanted_blocks > available_ - ReservedBefore(i)) {
      if (!MakeRoom(i)) break;
    }
    if (running_[i].preempted) return;
    tokens = FitToBlocks(s, tokens, available_ - ReservedBefore(i));
    if (tokens == 0) return;
    running_[i].scheduled = true;
    running_[i].outstanding -= NewBlocks(s, tokens);
    AddRows(s, tokens);
  }

  // Rows that budget, logit rows and the injected policy allow.
  int64_t WantedRows(const SchedulerSequence& s) const {
    const int64_t remaining = s.end - s.position;
    int64_t limit = std::min(remaining, tokens_left_);
    const int64_t first_logits = std::max(s.position, s.logits_from);
    limit = std::min(limit, first_logits + logits_left_ - s.position);
    if (limit <= 0) return 0;
    if (remaining == 1 || !input_.chunk_policy) return limit;
    const int64_t chunk = input_.chunk_policy(s.position, remaining, limit);
    CHECK(chunk >= 1 && chunk <= limit) << "chunk_policy gave " << chunk << " of " << limit;
    return chunk;
  }

  static int64_t NewBlocks(const SchedulerSequence& s, int64_t tokens) {
    return std::max<int64_t>(0, BlocksFor(s.position + tokens) - s.blocks);
  }
  static int64_t FitToBlocks(const SchedulerSequence& s, int64_t tokens, int64_t blocks) {
    const int64_t end = (s.blocks + std::max<int64_t>(0, blocks)) * kBlockPositions;
    return std::max<int64_t>(0, std::min(tokens, end - s.position));
  }

  void AddRows(const SchedulerSequence& s, int64_t tokens) {
    ScheduledRows rows;
    rows.id = s.id;
    rows.tokens = tokens;
    const int64_t end = s.position + tokens;
    rows.num_logits = std::max<int64_t>(0, end - std::max(s.position, s.logits_from));
    rows.sample = end == s.end;
    tokens_left_ -= tokens;
    logits_left_ -= rows.num_logits;
    available_ -= NewBlocks(s, tokens);
    CHECK_GE(available_, 0);
    schedule_.rows.push_back(rows);
  }

  // Not in a step that preempts: which blocks of a hit would be idle then is known only afterwards.
  void Admit() {
    if (!schedule_.preempted.empty()) return;
    int64_t reserved = ReservedBefore(running_.size());
    int64_t slots = input_.free_slots;
    for (const SchedulerSequence& s : input_.waiting) {
      if (slots == 0) return;
      const int64_t usable = available_ - s.idle_blocks - reserved;
      if (OutstandingBlocks(s) > usable) return;
      const int64_t tokens = WantedRows(s);
      if (tokens == 0) return;
      --slots;
      available_ -= s.idle_blocks;
      reserved += OutstandingBlocks(s) - NewBlocks(s, tokens);
      schedule_.admitted.push_back(s.id);
      AddRows(s, tokens);
    }
  }

  const SchedulerInput& input_;
  int64_t available_;
  int64_t tokens_left_;
  int64_t logits_left_;
  std::vector<Running> running_;
  Schedule schedule_;
};

}  // namespace

Schedule ScheduleStep(const SchedulerInput& input) { return StepScheduler(input).Run(); }

}  // namespace lockstep
