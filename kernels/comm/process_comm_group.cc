#include "kernels/comm/process_comm_group.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/collective_checks.h"
#include "kernels/comm/tree_sum.h"

namespace lockstep {
namespace {

enum class FrameKind : uint64_t { kAllReduce = 1, kAllGather = 2, kBarrier = 3, kAbort = 4 };

const char* Name(FrameKind kind) {
  switch (kind) {
    case FrameKind::kAllReduce:
      return "all_reduce";
    case FrameKind::kAllGather:
      return "all_gather";
    case FrameKind::kBarrier:
      return "barrier";
    case FrameKind::kAbort:
      return "abort";
  }
  return "unknown operation";
}

// Starts every frame. Ranks of one host: the byte order is the host's. Of an abort frame, `digest`
// is the status code and the payload is the message.
struct Header {
  FrameKind kind = FrameKind::kBarrier;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint64_t operation = 0;
  uint64_t digest = 0;
  int64_t bytes = 0;

  bool operator==(const Header& o) const {
    return kind == o.kind && epoch == o.epoch && step == o.step && operation == o.operation &&
           digest == o.digest && bytes == o.bytes;
  }
  std::string ToString() const {
    return absl::StrCat(Name(kind), " of ", bytes, " bytes, epoch ", epoch, ", step ", step,
                        ", operation ", operation, ", digest ", absl::Hex(digest));
  }
};

constexpr int64_t kHeaderBytes = sizeof(Header);
constexpr int64_t kMaxAbortMessage = 512;
constexpr int64_t kReduceElements = 1 << 18;  // per frame: bounds the scratch memory of a sum
constexpr int kSpins = 200;                   // fruitless rounds over all peers before blocking
constexpr int kPollMillis = 10;               // how often peers that are done are looked at

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// One peer's part of the exchange that runs.
struct Transfer {
  int64_t sent = 0;      // header and payload
  int64_t received = 0;  // header and payload
  Header header;         // theirs
  uint8_t* to = nullptr;
};

class ProcessCommGroup : public CommGroup {
 public:
  ProcessCommGroup(uint64_t epoch, int rank, std::vector<Fd> peers, absl::Duration timeout)
      : epoch_(epoch),
        rank_(rank),
        size_(static_cast<int>(peers.size())),
        timeout_(timeout),
        peers_(std::move(peers)),
        wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    CHECK(wake_.valid()) << "eventfd: " << strerror(errno) << " ";
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t epoch() const override { return epoch_; }
  void BeginStep(uint64_t step_id, uint64_t digest) override {
    step_ = step_id;
    digest_ = digest;
    operation_ = 0;
  }

  absl::Status AllReduce(ExecContext* ctx, TensorView data) override;
  absl::Status AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) override;
  absl::Status Barrier(ExecContext* ctx) override;
  void Abort(absl::string_view reason) override;

 private:
  // Gives `bytes` at `data` to every peer and puts theirs at to[rank]. The whole of rule 4 is here.
  absl::Status Exchange(ExecContext* ctx, FrameKind kind, const void* data, int64_t bytes,
                        const std::vector<uint8_t*>& to);
  absl::Status RunExchange(const Header& mine, const void* data, std::vector<Transfer>* transfers);
  absl::Status Send(int peer, const Header& mine, const void* data, Transfer* t, bool* progress);
  absl::Status Receive(int peer, const Header& mine, Transfer* t, bool* progress);
  absl::Status LookForAbort(int peer);
  absl::Status ReadAbort(int peer, const Header& header);
  absl::Status Closed(int peer);
  absl::Status Block(const std::vector<Transfer>& transfers, int64_t total);
  absl::Status Silent(const Header& mine, const std::vector<Transfer>& transfers) const;
  bool Done(int peer, const Transfer& t, int64_t total) const {
    return peer == rank_ || (t.sent == total && t.received == total);
  }
  // Tells the peers in `reachable` (null: all) why this rank ends. Holds mu_.
  void TellPeersLocked(const std::vector<bool>* reachable);

  const uint64_t epoch_;
  const int rank_;
  const int size_;
  const absl::Duration timeout_;
  const std::vector<Fd> peers_;
  const Fd wake_;

  // Of the executor thread.
  uint64_t step_ = 0;
  uint64_t digest_ = 0;
  uint64_t operation_ = 0;

  std::atomic<bool> aborted_{false};
  std::mutex mu_;
  bool exchanging_ = false;  // guarded by mu_
  absl::Status error_;       // guarded by mu_: the first one
};

absl::Status ProcessCommGroup::AllReduce(ExecContext* ctx, TensorView data) {
  RETURN_IF_ERROR(CheckAllReduce(data));
  const int64_t n = data.shape.num_elements();
  const int64_t frame = std::min(n, kReduceElements);
  Workspace::Scope scope(ctx->workspace);
  TensorView scratch = ctx->workspace->Take(DType::kF32, Shape{size_, frame});
  if (ctx->dry_run()) return absl::OkStatus();
  float* values = static_cast<float*>(data.data);
  std::vector<uint8_t*> to;
  std::vector<const float*> parts;
  for (int r = 0; r < size_; ++r) {
    parts.push_back(static_cast<const float*>(scratch.data) + r * frame);
    to.push_back(static_cast<uint8_t*>(scratch.data) + r * frame * 4);
  }
  ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
  for (int64_t begin = 0; begin == 0 || begin < n; begin += kReduceElements) {
    const int64_t count = std::min(kReduceElements, n - begin);
    parts[static_cast<size_t>(rank_)] = values + begin;
    RETURN_IF_ERROR(Exchange(ctx, FrameKind::kAllReduce, values + begin, count * 4, to));
    TreeSum(ctx->pool, parts, count, values + begin);
  }
  return absl::OkStatus();
}

absl::Status ProcessCommGroup::AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) {
  RETURN_IF_ERROR(CheckAllGather(local, out, size_));
  if (ctx->dry_run()) return absl::OkStatus();
  std::vector<uint8_t*> to;
  for (int r = 0; r < size_; ++r) to.push_back(static_cast<uint8_t*>(out.data) + r * local.bytes());
  ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
  RETURN_IF_ERROR(Exchange(ctx, FrameKind::kAllGather, local.data, local.bytes(), to));
  if (local.bytes() > 0) {
    memmove(to[static_cast<size_t>(rank_)], local.data, static_cast<size_t>(local.bytes()));
  }
  return absl::OkStatus();
}

absl::Status ProcessCommGroup::Barrier(ExecContext* ctx) {
  if (ctx->dry_run()) return absl::OkStatus();
  ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
  return Exchange(ctx, FrameKind::kBarrier, nullptr, 0,
                  std::vector<uint8_t*>(static_cast<size_t>(size_), nullptr));
}

void ProcessCommGroup::Abort(absl::string_view reason) {
  std::lock_guard<std::mutex> lock(mu_);
  if (!error_.ok()) return;
  error_ = absl::AbortedError(reason);
  aborted_ = true;
  const uint64_t one = 1;
  CHECK_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  // A running exchange may be in the middle of a frame: it tells the peers itself.
  if (!exchanging_) TellPeersLocked(nullptr);
}

void ProcessCommGroup::TellPeersLocked(const std::vector<bool>* reachable) {
  const std::string message(error_.message().substr(0, kMaxAbortMessage));
  Header header;
  header.kind = FrameKind::kAbort;
  header.epoch = epoch_;
  header.digest = static_cast<uint64_t>(error_.code());
  header.bytes = static_cast<int64_t>(message.size());
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  frame += message;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const int fd = peers_[static_cast<size_t>(peer)].get();
    if (reachable == nullptr || (*reachable)[static_cast<size_t>(peer)]) {
      // Should it not fit, the end of the stream tells the peer enough.
      const ssize_t ignored = send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      (void)ignored;
    }
    shutdown(fd, SHUT_WR);
  }
}

absl::Status ProcessCommGroup::Exchange(ExecContext* ctx, FrameKind kind, const void* data,
                                        int64_t bytes, const std::vector<uint8_t*>& to) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!error_.ok()) return error_;
    exchanging_ = true;
  }
  const Header mine = {kind, epoch_, step_, operation_++, digest_, bytes};
  std::vector<Transfer> transfers(static_cast<size_t>(size_));
  for (size_t r = 0; r < transfers.size(); ++r) transfers[r].to = to[r];
  const absl::Status status = RunExchange(mine, data, &transfers);
  ctx->counters->Add(Traffic::kCollectivesSent, bytes * (size_ - 1));

  std::lock_guard<std::mutex> lock(mu_);
  exchanging_ = false;
  if (error_.ok()) error_ = status;
  if (error_.ok()) return error_;
  std::vector<bool> reachable;
  for (const Transfer& t : transfers) {
    reachable.push_back(t.sent == 0 || t.sent == kHeaderBytes + bytes);
  }
  TellPeersLocked(&reachable);
  return error_;
}

absl::Status ProcessCommGroup::RunExchange(const Header& mine, const void* data,
                                           std::vector<Transfer>* transfers) {
  const int64_t total = kHeaderBytes + mine.bytes;
  absl::Time deadline = absl::Now() + timeout_;
  int idle = 0;
  for (;;) {
    bool progress = false;
    bool done = true;
    for (int peer = 0; peer < size_; ++peer) {
      Transfer* t = &(*transfers)[static_cast<size_t>(peer)];
      if (Done(peer, *t, total)) continue;
      RETURN_IF_ERROR(Send(peer, mine, data, t, &progress));
      RETURN_IF_ERROR(Receive(peer, mine, t, &progress));
      done = done && Done(peer, *t, total);
    }
    if (done) return absl::OkStatus();
    // The status itself is already in error_.
    if (aborted_.load(std::memory_order_relaxed)) return absl::AbortedError("aborted");
    if (progress) {
      idle = 0;
    } else if (++idle > kSpins) {
      if (idle == kSpins + 1) deadline = absl::Now() + timeout_;
      if (absl::Now() >= deadline) return Silent(mine, *transfers);
      RETURN_IF_ERROR(Block(*transfers, total));
    }
  }
}

absl::Status ProcessCommGroup::Send(int peer, const Header& mine, const void* data, Transfer* t,
                                    bool* progress) {
  const int64_t total = kHeaderBytes + mine.bytes;
  while (t->sent < total) {
    iovec parts[2];
    int count = 0;
    if (t->sent < kHeaderBytes) {
      uint8_t* header = reinterpret_cast<uint8_t*>(const_cast<Header*>(&mine));
      parts[count++] = {header + t->sent, static_cast<size_t>(kHeaderBytes - t->sent)};
    }
    if (mine.bytes > 0) {
      const int64_t offset = std::max<int64_t>(0, t->sent - kHeaderBytes);
      uint8_t* payload = static_cast<uint8_t*>(const_cast<void*>(data)) + offset;
      parts[count++] = {payload, static_cast<size_t>(mine.bytes - offset)};
    }
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t n =
        sendmsg(peers_[static_cast<size_t>(peer)].get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return WouldBlock() ? absl::OkStatus() : Closed(peer);
    t->sent += n;
    *progress = true;
  }
  return absl::OkStatus();
}

absl::Status ProcessCommGroup::Receive(int peer, const Header& mine, Transfer* t, bool* progress) {
  const int fd = peers_[static_cast<size_t>(peer)].get();
  const int64_t total = kHeaderBytes + mine.bytes;
  while (t->received < total) {
    const bool in_header = t->received < kHeaderBytes;
    uint8_t* to = in_header ? reinterpret_cast<uint8_t*>(&t->header) + t->received
                            : t->to + (t->received - kHeaderBytes);
    const int64_t wanted = (in_header ? kHeaderBytes : total) - t->received;
    const ssize_t n = recv(fd, to, static_cast<size_t>(wanted), MSG_DONTWAIT);
    if (n < 0 && WouldBlock()) return absl::OkStatus();
    if (n <= 0) {
      return absl::UnavailableError(absl::StrCat("rank ", peer, " closed the connection in ",
                                                 Name(mine.kind), " of step ", mine.step));
    }
    t->received += n;
    *progress = true;
    if (!in_header || t->received < kHeaderBytes) continue;
    if (t->header.kind == FrameKind::kAbort) return ReadAbort(peer, t->header);
    if (!(t->header == mine)) {
      return absl::FailedPreconditionError(absl::StrCat("ranks disagree: rank ", rank_, " is at ",
                                                        mine.ToString(), "; rank ", peer, " is at ",
                                                        t->header.ToString()));
    }
  }
  return absl::OkStatus();
}

absl::Status ProcessCommGroup::ReadAbort(int peer, const Header& header) {
  std::string message(
      static_cast<size_t>(std::min(std::max<int64_t>(0, header.bytes), kMaxAbortMessage)), '\0');
  const WaitLimit limit = {absl::Now() + absl::Milliseconds(200), &aborted_};
  if (!ReceiveBytes(peers_[static_cast<size_t>(peer)].get(), &message[0],
                    static_cast<int64_t>(message.size()), limit)
           .ok()) {
    message = "no reason given";
  }
  const bool known = header.digest > 0 && header.digest <= 16;
  return absl::Status(
      known ? static_cast<absl::StatusCode>(header.digest) : absl::StatusCode::kAborted,
      absl::StrCat("rank ", peer, " ended the group: ", message));
}

// The peer takes no more bytes; what it said before it went tells why.
absl::Status ProcessCommGroup::Closed(int peer) {
  RETURN_IF_ERROR(LookForAbort(peer));
  return absl::UnavailableError(absl::StrCat("rank ", peer, " closed the connection"));
}

absl::Status ProcessCommGroup::LookForAbort(int peer) {
  const int fd = peers_[static_cast<size_t>(peer)].get();
  Header header;
  const ssize_t n = recv(fd, &header, sizeof(header), MSG_PEEK | MSG_DONTWAIT);
  if (n < kHeaderBytes || header.kind != FrameKind::kAbort || header.epoch != epoch_) {
    return absl::OkStatus();
  }
  const WaitLimit limit = {absl::Now() + absl::Milliseconds(200), nullptr};
  RETURN_IF_ERROR(ReceiveBytes(fd, &header, sizeof(header), limit));
  return ReadAbort(peer, header);
}

absl::Status ProcessCommGroup::Block(const std::vector<Transfer>& transfers, int64_t total) {
  std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
  for (int peer = 0; peer < size_; ++peer) {
    const Transfer& t = transfers[static_cast<size_t>(peer)];
    if (peer == rank_) continue;
    if (Done(peer, t, total)) {
      // It may have gone on to its next collective, or given up.
      RETURN_IF_ERROR(LookForAbort(peer));
      continue;
    }
    short events = 0;
    if (t.sent < total) events |= POLLOUT;
    if (t.received < total) events |= POLLIN;
    polled.push_back({peers_[static_cast<size_t>(peer)].get(), events, 0});
  }
  if (poll(polled.data(), polled.size(), kPollMillis) < 0 && errno != EINTR) {
    return absl::InternalError(absl::StrCat("poll: ", strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status ProcessCommGroup::Silent(const Header& mine,
                                      const std::vector<Transfer>& transfers) const {
  std::string ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (Done(peer, transfers[static_cast<size_t>(peer)], kHeaderBytes + mine.bytes)) continue;
    absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", peer);
  }
  return absl::DeadlineExceededError(absl::StrCat("rank ", ranks, " did not answer within ",
                                                  absl::FormatDuration(timeout_), " in ",
                                                  mine.ToString()));
}

}  // namespace

std::unique_ptr<CommGroup> MakeProcessCommGroup(uint64_t epoch, int rank, std::vector<Fd> peers,
                                                absl::Duration collective_timeout) {
  return std::make_unique<ProcessCommGroup>(epoch, rank, std::move(peers), collective_timeout);
}

}  // namespace lockstep
