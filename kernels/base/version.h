// The version of Lockstep, as every process of it reports it.
#pragma once

namespace lockstep {

constexpr char kVersion[] = "0.1.0";

}  // namespace lockstep
