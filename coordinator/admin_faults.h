// Fault records as the admin service tells them.
#pragma once

#include <vector>

#include "coordinator/group/fault.h"
#include "proto/admin.pb.h"

namespace lockstep {

// Newest first; `records` are oldest first.
std::vector<admin::v1::FaultRecord> ToProto(const std::vector<FaultRecord>& records);

}  // namespace lockstep
