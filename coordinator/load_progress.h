// LoadProgress: what the ranks report while they load, as one line for people. Thread safe.
#pragma once

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"

namespace lockstep {

class LoadProgress {
 public:
  explicit LoadProgress(int ranks) : ranks_(static_cast<size_t>(ranks)) {}

  // Takes a report. True when a line is due: each 5 s, the first after 5 s.
  bool Update(int rank, const worker::v1::LoadModelProgress& progress, absl::Time now);

  // Of the bytes known so far, in [0, 1]; 0 before anything is known.
  double Fraction() const;
  double FractionOf(int rank) const;
  // "41% of 12.3 GB, 2.10 GB/s, 3.4 s left; rank 1 is at 12%, reading model-00002.safetensors"
  std::string Line() const;

 private:
  mutable absl::Mutex mutex_;
  std::vector<worker::v1::LoadModelProgress> ranks_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace lockstep
