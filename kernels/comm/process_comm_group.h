// The process transport: a full mesh of stream sockets between the worker processes of one host.
// ProcessCommListener makes groups; this is what happens on the sockets afterwards.
//
// Every collective sends one frame (AllReduce: one per megabyte) to every peer and receives one
// from each, in both directions at once, so that no message size can block the group. A frame
// starts with epoch, step, operation number, kind, digest and byte count; a peer whose frame
// differs fails the collective on both sides with FailedPrecondition. A peer that closed gives
// Unavailable, one that makes no progress for the time bound DeadlineExceeded; both name the rank.
// A rank that fails tells its peers why, so that they end at once too. Sums are evaluated by every
// rank from all partials.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"
#include "kernels/comm/process_comm_socket.h"

namespace lockstep {

// `peers[r]` is a connected socket to rank r; peers[rank] is not valid.
std::unique_ptr<CommGroup> MakeProcessCommGroup(uint64_t epoch, int rank, std::vector<Fd> peers,
                                                absl::Duration collective_timeout);

}  // namespace lockstep
