// What a launcher gave back, as a status that names the op.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/runtime/launch.h"

namespace lockstep {

// Internal with the vendor's error number unless the launch was accepted.
inline absl::Status ToStatus(const char* op, LaunchStatus status) {
  if (status == LaunchStatus::kOk) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(op, ": the launch failed with cuda error ", static_cast<int>(status)));
}

}  // namespace lockstep
