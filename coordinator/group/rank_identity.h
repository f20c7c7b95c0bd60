// What must differ between the ranks of one group.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "proto/worker.pb.h"

namespace lockstep {

// `infos` in rank order. ALREADY_EXISTS (DEVICE_TAKEN), naming both ranks and their workers, when
// two are the same process (an address given twice), or, unless `share_devices`, use the same
// device.
absl::Status CheckDistinctRanks(const std::vector<worker::v1::GetInfoResponse>& infos,
                                bool share_devices);

}  // namespace lockstep
