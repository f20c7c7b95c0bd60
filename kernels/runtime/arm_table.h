// Arm table: the implementations of one op, best first, as constexpr rows. ChooseArm takes the
// first one that can run the problem on the device that was asked for; when none can, the status
// names every arm with its reason. Nothing registers itself and nothing falls back in silence.
//
//   constexpr Arm<Problem, RunFn> kArms[] = {
//       {"sm90", DeviceType::kCuda, CannotRunSm90, RunSm90},
//       {"cpu", DeviceType::kCpu, nullptr, RunCpu},
//   };
//   ASSIGN_OR_RETURN(const auto* arm, ChooseArm("rms_norm", kArms, ctx->device, problem));
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

template <typename Problem, typename Fn>
struct Arm {
  const char* name;
  DeviceType device;
  // Why this arm cannot run `problem`, or nullptr when it can. No function: it runs everything.
  const char* (*cannot_run)(const Problem& problem);
  Fn run;
};

inline const char* Name(DeviceType device) { return device == DeviceType::kCpu ? "cpu" : "cuda"; }

// FailedPrecondition names the op, the device and each arm's reason.
template <typename Problem, typename Fn, size_t kNumArms>
absl::StatusOr<const Arm<Problem, Fn>*> ChooseArm(const char* op,
                                                  const Arm<Problem, Fn> (&arms)[kNumArms],
                                                  DeviceType device, const Problem& problem) {
  std::string reasons;
  for (const Arm<Problem, Fn>& arm : arms) {
    const char* reason = nullptr;
    if (arm.device != device) {
      reason = arm.device == DeviceType::kCpu ? "runs on the cpu only" : "runs on cuda only";
    } else if (arm.cannot_run != nullptr) {
      reason = arm.cannot_run(problem);
    }
    if (reason == nullptr) return &arm;
    absl::StrAppend(&reasons, "; ", arm.name, ": ", reason);
  }
  return absl::FailedPreconditionError(
      absl::StrCat(op, ": no arm of this build runs on ", Name(device), reasons));
}

}  // namespace lockstep
