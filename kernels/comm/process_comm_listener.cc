#include "kernels/comm/process_comm_listener.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/process_comm_group.h"

namespace lockstep {
namespace {

constexpr uint64_t kMagic = 0x314d4d4f434b4c00;  // and the version of the wire format
constexpr size_t kMaxPending = 64;               // connections that have not said who they are

// Both directions of the handshake. Ranks of one host: the byte order is the host's.
struct Hello {
  uint64_t magic = kMagic;
  uint64_t epoch = 0;
  int32_t rank = 0;
  int32_t world = 0;
  uint64_t token[2] = {0, 0};  // of the side that reads this
  char refusal[96] = {};       // answer: empty when welcome
};

struct Address {
  std::string host;
  int port = 0;
  uint64_t token[2] = {0, 0};
};

absl::StatusOr<Address> ParseAddress(const std::string& text) {
  Address a;
  const size_t colon = text.find(':');
  const size_t bar = text.find('|');
  if (colon != std::string::npos && bar != std::string::npos && colon < bar &&
      text.size() - bar - 1 == 32 &&
      absl::SimpleAtoi(text.substr(colon + 1, bar - colon - 1), &a.port) && a.port > 0 &&
      a.port < 65536 && absl::SimpleHexAtoi(text.substr(bar + 1, 16), &a.token[0]) &&
      absl::SimpleHexAtoi(text.substr(bar + 17, 16), &a.token[1])) {
    a.host = text.substr(0, colon);
    return a;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text.substr(0, colon == std::string::npos ? 16 : colon),
                   "\" is no address of a process group; expected host:port|token"));
}

absl::Status OfRank(int rank, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
}

// A connection whose hello is on its way.
struct Pending {
  Fd fd;
  Hello hello;
  size_t got = 0;
};

enum class ReadState { kMore, kComplete, kDead };

ReadState ReadHello(Pending* pending) {
  while (pending->got < sizeof(Hello)) {
    const ssize_t n =
        recv(pending->fd.get(), reinterpret_cast<char*>(&pending->hello) + pending->got,
             sizeof(Hello) - pending->got, 0);
    if (n == 0) return ReadState::kDead;
    if (n < 0) {
      const bool wait = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      return wait ? ReadState::kMore : ReadState::kDead;
    }
    pending->got += static_cast<size_t>(n);
    // Nothing that does not start like a hello is listened to any longer.
    if (pending->got >= sizeof(uint64_t) && pending->hello.magic != kMagic) return ReadState::kDead;
  }
  return ReadState::kComplete;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessCommListener>> ProcessCommListener::Listen(
    const ProcessCommOptions& options) {
  std::unique_ptr<ProcessCommListener> listener(new ProcessCommListener());
  listener->options_ = options;
  int port = 0;
  ASSIGN_OR_RETURN(listener->socket_, ListenTcp(options.host, &port));
  CHECK_EQ(getrandom(listener->token_, sizeof(token_), 0), static_cast<ssize_t>(sizeof(token_)));
  listener->address_ = absl::StrFormat("%s:%d|%016x%016x", options.host, port, listener->token_[0],
                                       listener->token_[1]);
  return listener;
}

absl::StatusOr<std::unique_ptr<CommGroup>> ProcessCommListener::Connect(
    uint64_t epoch, int rank, const std::vector<std::string>& addresses, absl::Duration timeout) {
  epoch_ = epoch;
  rank_ = rank;
  world_ = static_cast<int>(addresses.size());
  addresses_ = addresses;
  if (world_ < 1 || (world_ & (world_ - 1)) != 0 || rank < 0 || rank >= world_) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " of ", world_, " is no rank of a power of two of ranks"));
  }
  if (addresses[static_cast<size_t>(rank)] != address_) {
    return absl::InvalidArgumentError(
        absl::StrCat("the address of rank ", rank, " is not the one this rank gave"));
  }
  const WaitLimit limit = {absl::Now() + timeout, &cancelled_};
  std::vector<Fd> peers(static_cast<size_t>(world_));
  for (int peer = 0; peer < rank; ++peer) {
    absl::StatusOr<Fd> fd = ConnectToLower(peer, addresses[static_cast<size_t>(peer)], limit);
    if (!fd.ok()) return OfRank(peer, fd.status());
    peers[static_cast<size_t>(peer)] = *std::move(fd);
  }
  RETURN_IF_ERROR(AcceptHigher(limit, timeout, &peers));
  socket_.Close();
  return MakeProcessCommGroup(epoch, rank, std::move(peers), options_.collective_timeout);
}

absl::StatusOr<Fd> ProcessCommListener::ConnectToLower(int peer, const std::string& address,
                                                       const WaitLimit& limit) {
  ASSIGN_OR_RETURN(const Address target, ParseAddress(address));
  ASSIGN_OR_RETURN(Fd fd, ConnectTcp(target.host, target.port, limit));
  Hello hello;
  hello.epoch = epoch_;
  hello.rank = rank_;
  hello.world = world_;
  std::copy_n(target.token, 2, hello.token);
  RETURN_IF_ERROR(SendBytes(fd.get(), &hello, sizeof(hello), limit));
  Hello answer;
  RETURN_IF_ERROR(ReceiveBytes(fd.get(), &answer, sizeof(answer), limit));
  if (answer.refusal[0] != '\0') {
    answer.refusal[sizeof(answer.refusal) - 1] = '\0';
    return absl::FailedPreconditionError(absl::StrCat("refused: ", answer.refusal));
  }
  if (answer.magic != kMagic || answer.token[0] != token_[0] || answer.token[1] != token_[1] ||
      answer.epoch != epoch_ || answer.rank != peer) {
    return absl::FailedPreconditionError(absl::StrCat("what answers at ", target.host, ":",
                                                      target.port, " is not rank ", peer,
                                                      " of this group"));
  }
  return fd;
}

absl::Status ProcessCommListener::AcceptHigher(const WaitLimit& limit, absl::Duration timeout,
                                               std::vector<Fd>* peers) {
  std::vector<Pending> pending;
  std::string last_refusal;
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = rank_ + 1; r < world_; ++r) {
      if (!(*peers)[static_cast<size_t>(r)].valid()) ranks.push_back(r);
    }
    return ranks;
  };
  // Empty when the hello is that of a rank that is still missing, else why it is refused.
  const auto refusal = [&](const Hello& hello) -> std::string {
    if (hello.token[0] != token_[0] || hello.token[1] != token_[1]) return "wrong token";
    if (hello.epoch != epoch_) {
      return absl::StrCat("this rank is at epoch ", epoch_, ", asked for epoch ", hello.epoch);
    }
    if (hello.world != world_) {
      return absl::StrCat("this group has ", world_, " ranks, asked for ", hello.world);
    }
    if (hello.rank <= rank_ || hello.rank >= world_) {
      return absl::StrCat("rank ", hello.rank, " does not connect to rank ", rank_);
    }
    if ((*peers)[static_cast<size_t>(hello.rank)].valid()) {
      return absl::StrCat("rank ", hello.rank, " is already here");
    }
    return "";
  };
  const auto answer = [&](Pending* p) {
    Hello reply;
    const std::string reason = refusal(p->hello);
    if (reason.empty()) {
      absl::StatusOr<Address> theirs = ParseAddress(addresses_[static_cast<size_t>(p->hello.rank)]);
      if (!theirs.ok()) return;
      reply.epoch = epoch_;
      reply.rank = rank_;
      reply.world = world_;
      std::copy_n(theirs->token, 2, reply.token);
    } else {
      last_refusal = absl::StrCat("; the last connection was refused: ", reason);
      strncpy(reply.refusal, reason.c_str(), sizeof(reply.refusal) - 1);
    }
    const bool sent = SendBytes(p->fd.get(), &reply, sizeof(reply), limit).ok();
    if (sent && reason.empty()) (*peers)[static_cast<size_t>(p->hello.rank)] = std::move(p->fd);
  };

  while (!missing().empty()) {
    const absl::Status in_time = limit.Check();
    if (absl::IsDeadlineExceeded(in_time)) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", absl::StrJoin(missing(), ", "),
                                                      " did not connect within ",
                                                      absl::FormatDuration(timeout), last_refusal));
    }
    RETURN_IF_ERROR(in_time);
    std::vector<pollfd> polled = {{socket_.get(), POLLIN, 0}};
    for (const Pending& p : pending) polled.push_back({p.fd.get(), POLLIN, 0});
    poll(polled.data(), polled.size(), 20);
    for (;;) {
      Fd fd(accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) break;
      if (!PrepareStream(fd.get()).ok()) continue;
      // The oldest silent connection makes room for the next.
      if (pending.size() == kMaxPending) pending.erase(pending.begin());
      pending.emplace_back();
      pending.back().fd = std::move(fd);
    }
    std::vector<Pending> still;
    for (Pending& p : pending) {
      const ReadState state = ReadHello(&p);
      if (state == ReadState::kComplete) answer(&p);
      if (state == ReadState::kMore) still.push_back(std::move(p));
    }
    pending = std::move(still);
  }
  return absl::OkStatus();
}

}  // namespace lockstep
