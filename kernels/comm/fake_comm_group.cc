#include "kernels/comm/fake_comm_group.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/collective_checks.h"
#include "kernels/comm/tree_sum.h"

namespace lockstep {
namespace {

// What a rank brings to a collective.
struct Ticket {
  const char* kind = "";
  uint64_t step = 0;
  uint64_t operation = 0;
  uint64_t digest = 0;
  int64_t bytes = 0;
  const void* data = nullptr;

  bool Matches(const Ticket& o) const {
    return kind == o.kind && step == o.step && operation == o.operation && digest == o.digest &&
           bytes == o.bytes;
  }
  std::string ToString() const {
    return absl::StrCat(kind, " of ", bytes, " bytes, step ", step, ", operation ", operation,
                        ", digest ", absl::Hex(digest));
  }
};

// Where the ranks meet. Each collective has two meetings: all data is there, all data was read.
class Hub {
 public:
  Hub(int size, absl::Duration timeout) : timeout_(timeout), tickets_(size), arrivals_(size, 0) {}

  absl::Status Meet(int rank, const Ticket* ticket) {
    std::unique_lock<std::mutex> lock(mu_);
    if (!error_.ok()) return error_;
    if (ticket != nullptr) tickets_[rank] = *ticket;
    const uint64_t round = ++arrivals_[rank];
    cv_.notify_all();
    const auto all_here = [&] {
      for (uint64_t a : arrivals_) {
        if (a < round) return false;
      }
      return true;
    };
    const bool in_time = cv_.wait_for(lock, absl::ToChronoNanoseconds(timeout_),
                                      [&] { return !error_.ok() || all_here(); });
    if (all_here()) {
      return ticket != nullptr ? CompareLocked(rank) : absl::OkStatus();
    }
    if (!in_time) FailLocked(absl::DeadlineExceededError(SilentLocked(round)));
    return error_;
  }

  const void* data(int rank) const { return tickets_[rank].data; }

  void Fail(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mu_);
    FailLocked(status);
  }
  absl::Status error() {
    std::lock_guard<std::mutex> lock(mu_);
    return error_;
  }

 private:
  absl::Status CompareLocked(int rank) {
    for (size_t r = 0; r < tickets_.size(); ++r) {
      if (tickets_[r].Matches(tickets_[rank])) continue;
      FailLocked(absl::FailedPreconditionError(
          absl::StrCat("ranks disagree: rank ", rank, " is at ", tickets_[rank].ToString(),
                       "; rank ", r, " is at ", tickets_[r].ToString())));
    }
    return error_;
  }
  std::string SilentLocked(uint64_t round) const {
    for (size_t r = 0; r < arrivals_.size(); ++r) {
      if (arrivals_[r] < round) {
        return absl::StrCat("rank ", r, " did not answer within ", absl::FormatDuration(timeout_));
      }
    }
    return "";
  }
  void FailLocked(const absl::Status& status) {
    if (error_.ok()) error_ = status;
    cv_.notify_all();
  }

  const absl::Duration timeout_;
  std::mutex mu_;
  std::condition_variable cv_;
  std::vector<Ticket> tickets_;     // written before, read after a meeting
  std::vector<uint64_t> arrivals_;  // guarded by mu_
  absl::Status error_;              // guarded by mu_
};

class FakeCommGroup : public CommGroup {
 public:
  FakeCommGroup(std::shared_ptr<Hub> hub, int rank, int size, uint64_t epoch)
      : hub_(std::move(hub)), rank_(rank), size_(size), epoch_(epoch) {}
  ~FakeCommGroup() override {
    hub_->Fail(absl::UnavailableError(absl::StrCat("rank ", rank_, " is gone")));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t epoch() const override { return epoch_; }
  void BeginStep(uint64_t step_id, uint64_t digest) override {
    step_ = step_id;
    digest_ = digest;
    operation_ = 0;
  }

  absl::Status AllReduce(ExecContext* ctx, TensorView data) override {
    RETURN_IF_ERROR(CheckAllReduce(data));
    Workspace::Scope scope(ctx->workspace);
    TensorView sum = ctx->workspace->Take(DType::kF32, Shape{data.shape.num_elements()});
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, "all_reduce", data.bytes(), data.data));
    std::vector<const float*> parts;
    for (int r = 0; r < size_; ++r) parts.push_back(static_cast<const float*>(hub_->data(r)));
    TreeSum(ctx->pool, parts, data.shape.num_elements(), static_cast<float*>(sum.data));
    RETURN_IF_ERROR(hub_->Meet(rank_, nullptr));
    if (data.bytes() > 0) std::memcpy(data.data, sum.data, static_cast<size_t>(data.bytes()));
    return absl::OkStatus();
  }

  absl::Status AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) override {
    RETURN_IF_ERROR(CheckAllGather(local, out, size_));
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, "all_gather", local.bytes(), local.data));
    for (int r = 0; r < size_ && local.bytes() > 0; ++r) {
      uint8_t* to = static_cast<uint8_t*>(out.data) + r * local.bytes();
      std::memmove(to, hub_->data(r), static_cast<size_t>(local.bytes()));
    }
    return hub_->Meet(rank_, nullptr);
  }

  absl::Status Barrier(ExecContext* ctx) override {
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, "barrier", 0, nullptr));
    return hub_->Meet(rank_, nullptr);
  }

  void Abort(absl::string_view reason) override { hub_->Fail(absl::AbortedError(reason)); }

 private:
  absl::Status Begin(ExecContext* ctx, const char* kind, int64_t bytes, const void* data) {
    ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
    ctx->counters->Add(Traffic::kCollectivesSent, bytes * (size_ - 1));
    const Ticket ticket = {kind, step_, operation_++, digest_, bytes, data};
    return hub_->Meet(rank_, &ticket);
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const int size_;
  const uint64_t epoch_;
  uint64_t step_ = 0;
  uint64_t digest_ = 0;
  uint64_t operation_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<CommGroup>> MakeFakeCommGroups(int size, uint64_t epoch,
                                                           absl::Duration collective_timeout) {
  CHECK(size > 0 && (size & (size - 1)) == 0) << size << " ranks ";
  auto hub = std::make_shared<Hub>(size, collective_timeout);
  std::vector<std::unique_ptr<CommGroup>> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<FakeCommGroup>(hub, r, size, epoch));
  }
  return ranks;
}

}  // namespace lockstep
