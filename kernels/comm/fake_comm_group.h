// FakeCommGroup: ranks of one process that meet in shared memory, for tests. Each rank is used by a
// thread of its own. Same rules and errors as the real transports.
#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "kernels/comm/comm_group.h"

namespace lockstep {

// The ranks of a new group, in rank order. They share state that lives as long as any of them.
// A rank that is destroyed counts as gone: its peers' collectives end with Unavailable.
std::vector<std::unique_ptr<CommGroup>> MakeFakeCommGroups(
    int size, uint64_t epoch, absl::Duration collective_timeout = absl::Seconds(10));

}  // namespace lockstep
