// One linear of the resident model applied to a given input: what `lockstep eval` compares with the
// reference. Not on the serving path: it allocates.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/comm/comm_group.h"
#include "kernels/runtime/exec_context.h"
#include "models/model.h"
#include "proto/worker.pb.h"

namespace lockstep {

// On the executor thread. All ranks call it together for a row-parallel linear. NotFound when the
// model has no linear of that name; InvalidArgument when the input is not F32 [tokens, K].
absl::StatusOr<worker::v1::ProbeLinearResponse> RunProbeLinear(
    ExecContext* ctx, const Model& model, CommGroup* comm,
    const worker::v1::ProbeLinearRequest& request);

}  // namespace lockstep
