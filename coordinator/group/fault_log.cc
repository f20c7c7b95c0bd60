#include "coordinator/group/fault_log.h"

namespace lockstep {

void FaultLog::Update(const FaultRecord& record) {
  absl::MutexLock lock(&mutex_);
  const bool known = !records_.empty() && records_.back().epoch_before == record.epoch_before &&
                     records_.back().detected == record.detected;
  if (known) {
    records_.back() = record;
    return;
  }
  records_.push_back(record);
  if (records_.size() > kKept) records_.pop_front();
}

std::vector<FaultRecord> FaultLog::records() const {
  absl::MutexLock lock(&mutex_);
  return std::vector<FaultRecord>(records_.begin(), records_.end());
}

}  // namespace lockstep
