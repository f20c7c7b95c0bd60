#include "coordinator/group/rank_identity.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace lockstep {
namespace {

absl::Status Taken(const std::vector<worker::v1::GetInfoResponse>& infos, size_t first,
                   size_t second, absl::string_view what, absl::string_view advice) {
  ErrorDetail detail;
  detail.reason = "DEVICE_TAKEN";
  return MakeError(
      absl::StatusCode::kAlreadyExists,
      absl::StrCat("rank ", first, " (", infos[first].identity().worker_id(), ") and rank ", second,
                   " (", infos[second].identity().worker_id(), ") are ", what, "; ", advice),
      detail);
}

}  // namespace

absl::Status CheckDistinctRanks(const std::vector<worker::v1::GetInfoResponse>& infos,
                                bool share_devices) {
  for (size_t second = 1; second < infos.size(); ++second) {
    for (size_t first = 0; first < second; ++first) {
      const auto& a = infos[first];
      const auto& b = infos[second];
      if (a.identity().incarnation() != 0 &&
          a.identity().incarnation() == b.identity().incarnation()) {
        return Taken(infos, first, second, "the same process",
                     "give every rank the address of a worker of its own");
      }
      if (share_devices || a.device_uuid().empty() || a.device_uuid() != b.device_uuid()) continue;
      return Taken(infos, first, second,
                   absl::StrCat("both on device ", a.device_uuid(), " (", a.device_name(), ")"),
                   "start each worker with a --device of its own");
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
