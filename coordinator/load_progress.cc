// LoadProgress: see load_progress.h.
#include "coordinator/load_progress.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace lockstep {
namespace {

using worker::v1::LoadModelProgress;

constexpr absl::Duration kLinePeriod = absl::Seconds(5);

double FractionFrom(double done, double total) {
  return total > 0 ? std::min(1.0, std::max(0.0, done / total)) : 0.0;
}

double FractionIn(const LoadModelProgress& progress) {
  return FractionFrom(static_cast<double>(progress.bytes_done()),
                      static_cast<double>(progress.bytes_total()));
}

}  // namespace

bool LoadProgress::Update(int rank, const LoadModelProgress& progress, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  if (rank < 0 || static_cast<size_t>(rank) >= ranks_.size()) return false;
  LoadModelProgress& mine = ranks_[static_cast<size_t>(rank)];
  if (progress.bytes_total() == 0 && mine.bytes_total() > 0) {
    // A last message may carry the result alone.
    mine.set_bytes_done(mine.bytes_total());
  } else {
    mine = progress;
  }
  if (next_line_ == absl::InfinitePast()) next_line_ = now + kLinePeriod;
  if (now < next_line_) return false;
  next_line_ = now + kLinePeriod;
  return true;
}

double LoadProgress::Fraction() const {
  absl::MutexLock lock(&mutex_);
  double done = 0, total = 0;
  for (const LoadModelProgress& progress : ranks_) {
    done += static_cast<double>(progress.bytes_done());
    total += static_cast<double>(progress.bytes_total());
  }
  return FractionFrom(done, total);
}

double LoadProgress::FractionOf(int rank) const {
  absl::MutexLock lock(&mutex_);
  return FractionIn(ranks_[static_cast<size_t>(rank)]);
}

std::string LoadProgress::Line() const {
  absl::MutexLock lock(&mutex_);
  double done = 0, total = 0, rate = 0, eta = 0;
  size_t slowest = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    done += static_cast<double>(ranks_[rank].bytes_done());
    total += static_cast<double>(ranks_[rank].bytes_total());
    rate += ranks_[rank].gb_per_second();
    eta = std::max(eta, ranks_[rank].eta_seconds());
    if (FractionIn(ranks_[rank]) < FractionIn(ranks_[slowest])) slowest = rank;
  }
  if (total == 0) return "waiting for the workers";
  std::string line = absl::StrFormat("%.0f%% of %.3f GB, %.2f GB/s, %.1f s left",
                                     100 * FractionFrom(done, total), total / 1e9, rate, eta);
  const LoadModelProgress& last = ranks_[slowest];
  if (FractionIn(last) < 1) {
    absl::StrAppendFormat(&line, "; rank %d is at %.0f%%%s%s", slowest, 100 * FractionIn(last),
                          last.current().empty() ? "" : ", reading ", last.current());
  }
  return line;
}

}  // namespace lockstep
