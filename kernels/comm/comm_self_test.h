// The known-answer test that a new group runs before it is used: sums whose tree order shows in the
// bits, gathers and a barrier.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/comm/comm_group.h"

namespace lockstep {

// Called by all ranks together. The digest of what came back, equal on all ranks. DataLoss, naming
// the collective, the element and both values, when an answer is wrong; otherwise the error of the
// group.
absl::StatusOr<uint64_t> RunCommSelfTest(ExecContext* ctx, CommGroup* comm);

}  // namespace lockstep
