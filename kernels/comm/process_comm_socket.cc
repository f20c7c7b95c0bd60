#include "kernels/comm/process_comm_socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

// How often a wait looks at its limit.
constexpr absl::Duration kSlice = absl::Milliseconds(20);

absl::Status Errno(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

absl::StatusOr<sockaddr_in> ParseAddress(const std::string& host, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("\"", host, "\" is not an IPv4 address"));
  }
  return address;
}

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

void Fd::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::Status WaitLimit::Check() const {
  if (cancelled != nullptr && cancelled->load()) return absl::CancelledError("cancelled");
  if (absl::Now() >= deadline) return absl::DeadlineExceededError("time is up");
  return absl::OkStatus();
}

absl::Status WaitFor(int fd, short events, const WaitLimit& limit) {
  for (;;) {
    RETURN_IF_ERROR(limit.Check());
    pollfd p = {fd, events, 0};
    const absl::Duration wait = std::min(kSlice, limit.deadline - absl::Now());
    const int n = poll(&p, 1, static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    if (n > 0) return absl::OkStatus();
    if (n < 0 && errno != EINTR) return Errno("poll");
  }
}

absl::StatusOr<Fd> ListenTcp(const std::string& host, int* port) {
  ASSIGN_OR_RETURN(sockaddr_in address, ParseAddress(host, 0));
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Errno("socket");
  socklen_t length = sizeof(address);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return Errno(absl::StrCat("bind ", host));
  }
  if (listen(fd.get(), 64) != 0) return Errno("listen");
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return Errno("getsockname");
  }
  *port = ntohs(address.sin_port);
  return fd;
}

absl::StatusOr<Fd> ConnectTcp(const std::string& host, int port, const WaitLimit& limit) {
  ASSIGN_OR_RETURN(const sockaddr_in address, ParseAddress(host, port));
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Errno("socket");
  const std::string what = absl::StrCat("connect to ", host, ":", port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EINPROGRESS) return Errno(what);
    RETURN_IF_ERROR(WaitFor(fd.get(), POLLOUT, limit));
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return Errno(what);
    if (error != 0) return absl::UnavailableError(absl::StrCat(what, ": ", strerror(error)));
  }
  RETURN_IF_ERROR(PrepareStream(fd.get()));
  return fd;
}

absl::Status PrepareStream(int fd) {
  const int one = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0) return Errno("TCP_NODELAY");
  const int flags = fcntl(fd, F_GETFL, 0);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return Errno("O_NONBLOCK");
  return absl::OkStatus();
}

absl::Status SendBytes(int fd, const void* data, int64_t size, const WaitLimit& limit) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = send(fd, next, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (n > 0) {
      next += n;
      size -= n;
    } else if (WouldBlock()) {
      RETURN_IF_ERROR(WaitFor(fd, POLLOUT, limit));
    } else {
      return Errno("send");
    }
  }
  return absl::OkStatus();
}

absl::Status ReceiveBytes(int fd, void* data, int64_t size, const WaitLimit& limit) {
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = recv(fd, next, static_cast<size_t>(size), 0);
    if (n > 0) {
      next += n;
      size -= n;
    } else if (n == 0) {
      return absl::UnavailableError("the other side closed the connection");
    } else if (WouldBlock()) {
      RETURN_IF_ERROR(WaitFor(fd, POLLIN, limit));
    } else {
      return Errno("recv");
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
