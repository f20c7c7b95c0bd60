// What device launchers give back: an error code of the vendor as a number, so that launch headers
// need neither Abseil nor CUDA. 0 is success.
#pragma once

namespace lockstep {

enum class LaunchStatus : int { kOk = 0 };

}  // namespace lockstep
