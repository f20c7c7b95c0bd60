// ProcessCommListener: how worker processes of one host form a group. Set-up has two halves: every
// rank listens and gives its opaque address ("host:port|token") to the coordinator; then every rank
// connects with the addresses of all. A rank connects to the ranks below it and accepts those above
// it.
//
// The token is random and known only to whom the coordinator told it. Both sides of a connection
// prove that they know the other's token and agree on epoch and world, before anything else is
// said. Strangers, silent connections and ranks of an old epoch are turned away and disturb nobody.
//
// Address is thread safe, so is Cancel; Connect is called once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"
#include "kernels/comm/process_comm_socket.h"

namespace lockstep {

struct ProcessCommOptions {
  std::string host = "127.0.0.1";  // numeric IPv4 address to listen on
  // A collective that makes no progress with a peer for this long fails.
  absl::Duration collective_timeout = absl::Seconds(10);
};

class ProcessCommListener {
 public:
  // Unavailable when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<ProcessCommListener>> Listen(
      const ProcessCommOptions& options);

  const std::string& address() const { return address_; }

  // Joins the group of `addresses` (rank order; a power of two of them) as `rank`. InvalidArgument
  // for an address that is none, or when addresses[rank] is not this listener's;
  // FailedPrecondition, with its reason, when a rank refuses; Unavailable when a rank does not
  // listen any more; DeadlineExceeded naming the ranks that did not come; Cancelled after Cancel.
  absl::StatusOr<std::unique_ptr<CommGroup>> Connect(uint64_t epoch, int rank,
                                                     const std::vector<std::string>& addresses,
                                                     absl::Duration timeout);

  // Ends a running Connect, from any thread.
  void Cancel() { cancelled_ = true; }

 private:
  ProcessCommListener() = default;

  absl::StatusOr<Fd> ConnectToLower(int peer, const std::string& address, const WaitLimit& limit);
  absl::Status AcceptHigher(const WaitLimit& limit, absl::Duration timeout, std::vector<Fd>* peers);

  ProcessCommOptions options_;
  Fd socket_;
  uint64_t token_[2] = {0, 0};
  std::string address_;
  std::atomic<bool> cancelled_{false};
  // Set by Connect.
  uint64_t epoch_ = 0;
  int rank_ = 0;
  int world_ = 0;
  std::vector<std::string> addresses_;
};

}  // namespace lockstep
