// Sockets of the process transport: an owning descriptor, and listening, connecting and exchanging
// small messages with a deadline. All sockets are non-blocking; no call raises SIGPIPE.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lockstep {

// Owns a file descriptor. Move-only.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { Close(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// When to give up: a point in time, or a flag that another thread sets.
struct WaitLimit {
  absl::Time deadline = absl::InfiniteFuture();
  const std::atomic<bool>* cancelled = nullptr;

  // Ok, DeadlineExceeded or Cancelled.
  absl::Status Check() const;
};

// Waits until poll() reports one of `events` on `fd`, or the limit.
absl::Status WaitFor(int fd, short events, const WaitLimit& limit);

// A TCP socket that listens on host (a numeric address) and any free port; *port is that port.
absl::StatusOr<Fd> ListenTcp(const std::string& host, int* port);
// Connects to a numeric address. Unavailable when nobody listens there.
absl::StatusOr<Fd> ConnectTcp(const std::string& host, int port, const WaitLimit& limit);
// Turns off Nagle's delay and makes the socket non-blocking.
absl::Status PrepareStream(int fd);

// Exactly `size` bytes. Unavailable when the other side closes.
absl::Status SendBytes(int fd, const void* data, int64_t size, const WaitLimit& limit);
absl::Status ReceiveBytes(int fd, void* data, int64_t size, const WaitLimit& limit);

}  // namespace lockstep
