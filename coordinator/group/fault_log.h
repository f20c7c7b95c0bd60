// FaultLog: the last faults of a server, oldest first. Thread safe.
#pragma once

#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "coordinator/group/fault.h"

namespace lockstep {

class FaultLog {
 public:
  static constexpr size_t kKept = 256;

  // A new fault, or more about the last one: the same epoch and time of detection.
  void Update(const FaultRecord& record);
  std::vector<FaultRecord> records() const;

 private:
  mutable absl::Mutex mutex_;
  std::deque<FaultRecord> records_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lockstep
