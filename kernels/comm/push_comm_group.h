// The push transport: collectives on the device, over peer memory (push_launch.h). Every call
// queues its work on ctx->stream and returns; a failure shows in Check once the work has ended, and
// ends later collectives at once.
//
// Messages larger than an arena's slot go in pieces. Barrier compares the step's number and digest.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"

namespace lockstep {

struct PushOptions {
  // Payload of a message that goes in one piece; the arena takes 4 times this per peer.
  int64_t message_bytes = int64_t{4} << 20;
  // A collective that waits longer for a peer fails.
  absl::Duration timeout = absl::Seconds(10);
};

// Every rank of `control` (the process transport between the same ranks, which carries the memory
// handles and says at an abort what happened) calls it together. Unavailable when a peer's memory
// cannot be opened; Unimplemented in builds without CUDA.
absl::StatusOr<std::unique_ptr<CommGroup>> MakePushCommGroup(std::unique_ptr<CommGroup> control,
                                                             const PushOptions& options);

// For tests: all ranks of a group in one process and on one device.
absl::StatusOr<std::vector<std::unique_ptr<CommGroup>>> MakeLocalPushCommGroups(
    int world, uint64_t epoch, const PushOptions& options);

}  // namespace lockstep
